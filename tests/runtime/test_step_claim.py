"""What a file claims of a training step, and when steps miss it: values alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import Policy
from amptune.runtime.step_claim import STEPS_COMPARED, StepClaim, claim_about_steps, missed, typical_step_ms

CLAIM = StepClaim(step_ms=17.8, batch_size=32, accumulate=1, baseline_ms=40.6)


def code(claim: StepClaim, steps_ms: list[float]) -> str | None:
    found = missed(claim, steps_ms)
    return None if found is None else found.code


def steps(ms: float) -> list[float]:
    return [ms] * STEPS_COMPARED


@pytest.mark.parametrize(
    ("ms", "expected"),
    [(9.0, None), (17.8, None), (22.2, None), (22.3, "slower-than-promised"), (44.6, "slower-than-promised")],
)
def test_steps_may_take_a_quarter_longer_than_the_claim(ms: float, expected: str | None) -> None:
    assert code(CLAIM, steps(ms)) == expected


def test_steps_slower_than_the_baselines_say_that_the_policy_should_go() -> None:
    assert code(CLAIM, steps(44.7)) == "slower-than-baseline"
    assert code(replace(CLAIM, baseline_ms=None), steps(44.7)) == "slower-than-promised"


def test_a_policy_hardly_faster_than_the_baseline_is_held_to_its_claim() -> None:
    assert code(replace(CLAIM, step_ms=40.0), steps(45.0)) is None


def test_the_words_have_the_figures_and_what_to_do() -> None:
    found = missed(CLAIM, steps(30.0))
    assert found is not None
    assert str(found) == (
        "your steps take 30 ms from the forward pass to the optimizer, this policy promised 17.8: `amptune verify` "
        "says why"
    )
    assert found.figures == {"step_ms": 30.0, "tuned_step_ms": 17.8}
    worse = missed(CLAIM, steps(1234.5))
    assert worse is not None
    assert str(worse) == (
        "your steps take 1234 ms from the forward pass to the optimizer. This policy promised 17.8, and its baseline "
        "took 40.6, so training is faster without it: put amptune.Policy() in its place, or tune again with `amptune "
        "tune`. `amptune verify` says why"
    )
    assert worse.figures == {"step_ms": 1234.0, "tuned_step_ms": 17.8, "baseline_step_ms": 40.6}


def test_compiling_anew_every_few_steps_counts_though_the_median_step_is_fast() -> None:
    assert code(CLAIM, [500.0 if n % 10 == 0 else 17.8 for n in range(STEPS_COMPARED)]) == "slower-than-baseline"


def test_a_few_long_steps_do_not_count() -> None:
    once = [10_000.0 if n in {0, 60, 130, 200} else 17.8 for n in range(STEPS_COMPARED)]
    assert code(CLAIM, once) is None
    assert typical_step_ms(once) == pytest.approx(17.8)


def test_the_baselines_time_is_for_as_many_samples() -> None:
    policy = Policy(batch_size=64, accumulate=2)
    baseline = {"step_ms": 10.0, "policy": {"batch_size": 32}}
    file = PolicyFile(policy=policy, evidence={"step_ms": 25.0, "baseline": baseline})
    assert claim_about_steps(file) == StepClaim(step_ms=25.0, batch_size=64, accumulate=2, baseline_ms=40.0)


@pytest.mark.parametrize(
    "evidence",
    [
        {"baseline": {"step_ms": 17.8}},  # the baseline itself stays
        {"baseline": {"step_ms": 40.6}, "objective": "memory"},
        {"baseline": {"failure": {"kind": "oom"}}},
        {"baseline": "none"},
        {"baseline": {"step_ms": "40.6"}},
        {},
    ],
)
def test_without_a_claim_to_be_faster_there_is_no_baseline_to_compare_with(evidence: Any) -> None:
    known: Any = {"step_ms": 17.8, **evidence}
    file = PolicyFile(policy=Policy(batch_size=32), evidence=known)
    claim = claim_about_steps(file)
    assert claim is not None
    assert claim.baseline_ms is None


@pytest.mark.parametrize("step_ms", [None, "17.8", 0, -1.0, float("nan"), float("inf"), True])
def test_without_a_step_time_nothing_is_claimed(step_ms: Any) -> None:
    assert claim_about_steps(PolicyFile(policy=Policy(batch_size=32), evidence={"step_ms": step_ms})) is None
    assert claim_about_steps(PolicyFile(policy=Policy(batch_size=32))) is None


def test_a_time_without_its_batch_size_claims_nothing() -> None:
    assert claim_about_steps(PolicyFile(policy=Policy(), evidence={"step_ms": 17.8})) is None
