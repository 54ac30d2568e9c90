"""Does a claim hold? Driven by recorded trials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from simulated.clock import SimulatedClock
from simulated.landscape import WORKLOADS, SyntheticEvaluator, Trouble, landscape_of
from simulated.recorded import H200, RecordedEvaluator, recorded_ms

from amptune.cli.entry import exit_code_of
from amptune.errors import AmptuneError, ClaimError, HardwareMismatchError, NothingFeasibleError, NotMeasuredError
from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome
from amptune.policy.file_io import load, save
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.plan.budget import Budget
from amptune.search.verification import Verification, verify_with

BEST = amp_recipe("fp16", memory_format="channels_last", batch_size=128)
OOM, HANGS = Failure(kind="oom", message="CUDA out of memory"), Failure(kind="timeout", message="no answer")
TRUE = recorded_ms("resnet50", STOCK) / recorded_ms("resnet50", BEST)


def claiming(
    speedup: float, *, policy: Policy = BEST, labels: Mapping[str, str] | None = None, **evidence: Any
) -> PolicyFile:
    found: Any = {"speedup": speedup, "baseline": {"policy": {"autocast": "off"}}, **evidence}
    return PolicyFile(policy=policy, name="resnet50", valid_for=labels or dict(H200.labels), evidence=found)


def verified(
    policy_file: PolicyFile, evaluator: RecordedEvaluator | None = None, seconds: float = 100.0
) -> Verification:
    evaluator = evaluator or RecordedEvaluator("resnet50", noise=0.002)
    budget = Budget(seconds=seconds, started=evaluator.clock(), clock=evaluator.clock)
    return verify_with(evaluator, policy_file, budget, lambda _: None)


def codes(found: Verification) -> list[str]:
    return [finding.code for finding in found.findings]


def small(policy: Policy) -> float:
    return 3000.0 if policy.autocast == "fp16" else 5000.0


@pytest.mark.parametrize(
    ("factor", "evidence", "answer", "rounds"),
    [
        (1.0, {}, "met", 2),
        (1.015, {}, "met", 2),  # missed by less than 2 %
        (1.05, {}, "missed", 3),
        (1.0, {"objective": "memory", "gain": 5 / 3}, "met", 2),
        (1.0, {"objective": "memory", "gain": 1.8}, "missed", 2),
    ],
)
def test_policy_and_baseline_are_measured_in_turn_until_an_answer_is_given_twice(
    factor: float, evidence: dict[str, Any], answer: str, rounds: int
) -> None:
    """Each in a process of its own; a miss is confirmed in fresh ones."""
    evaluator = RecordedEvaluator("resnet50", noise=0.002, peak_mib=small)
    found = verified(claiming(factor * TRUE, **evidence), evaluator)
    assert (found.answer, found.holds) == (answer, answer == "met")
    assert found.speedup is not None
    assert found.speedup.low <= TRUE * 1.005
    assert found.policy.rows == found.baseline.rows == len(evaluator.measured) / 2 == rounds
    assert answer == "met" or len(evaluator.launched) == rounds
    assert all(len(set(contenders)) == len(contenders) == 2 for contenders in evaluator.launched)
    if evidence:
        words = f"; it uses 0.60 times the memory of the baseline, {1 / evidence['gain']:.3g} times claimed"
        assert words in str(found.findings[0])


@pytest.mark.parametrize(
    ("claim", "machine", "seconds", "words"),
    [
        (claiming(TRUE / 0.97), {"noise": 0.05}, 100.0, "give more with --budget, or a quieter machine"),
        (
            claiming(TRUE, objective="energy", gain=1.05 * TRUE),
            {"noise": 0.002, "watts": lambda _: 300.0},
            100.0,
            "energy: ",
        ),
        (
            claiming(TRUE),
            {"noise": 0.3},
            0.0,
            "the timings differ too much from each other, after 1 measurement in 1 process of each",
        ),
        (claiming(50.0), {"noise": 0.002}, 0.0, "this is below 49.00×, the claim less 2%, and a second round"),
    ],
    ids=["hard to tell", "energy that is met in speed alone", "too rough", "a miss in one round"],
)
def test_a_claim_that_is_not_settled_when_the_budget_is_spent_is_left_open_and_says_why(
    claim: PolicyFile, machine: dict[str, Any], seconds: float, words: str
) -> None:
    evaluator = RecordedEvaluator("resnet50", **machine)
    found = verified(claim, evaluator, seconds)
    assert (found.answer, found.holds, codes(found)[0]) == ("open", False, "undecided")
    assert words in str(found.findings[0])
    assert evaluator.clock() <= max(seconds, RecordedEvaluator.launch_s + 2 * RecordedEvaluator.takes_s)


def test_a_loop_that_waits_for_its_data_leaves_the_claim_to_steps_by_themselves() -> None:
    class Waiting(RecordedEvaluator):
        def measure(self, policy: Policy, effort: Effort) -> Outcome:
            outcome = super().measure(policy, effort)
            assert isinstance(outcome, Measurement)
            return replace(outcome, wait_share=0.4 if effort.in_loop else 0.0)

    assert verified(claiming(TRUE), Waiting("resnet50", noise=0.002)).holds


def test_a_claim_that_fails_says_what_changed() -> None:
    labels = {**dict(H200.labels), "torch": "2.9"}
    found = verified(claiming(4.0, labels=labels))
    assert codes(found)[:2] == ["does-not-hold", "drift"]
    assert found.findings[1].figures["label"] == "torch"
    moved = verified(claiming(TRUE, devices=2, labels={**dict(H200.labels), "model": "sha256:other"}))
    assert [one.figures["label"] for one in moved.findings if one.code == "drift"] == ["model", "devices"]


def failing(outcome: Failure, *policies: Policy, keeps: bool = False) -> RecordedEvaluator:
    """A machine on which these policies fail, or all others."""
    return RecordedEvaluator("resnet50", interfere=lambda policy: outcome if (policy in policies) != keeps else None)


def test_a_policy_that_fails_here_does_not_hold() -> None:
    found = verified(claiming(TRUE), failing(OOM, BEST))
    assert (found.holds, codes(found)[0]) == (False, "policy-fails")


def test_a_policy_that_claims_nothing_is_measured_beside_the_baseline() -> None:
    found = verified(PolicyFile(policy=BEST, name="mine"), RecordedEvaluator("resnet50", noise=0.002), 60.0)
    assert (found.holds, codes(found)[0]) == (True, "measured")
    assert found.speedup is not None
    assert found.speedup.low > 2
    assert "the speed of the baseline (stock PyTorch); nothing is claimed" in str(found.findings[0])


@pytest.mark.parametrize("evidence", [{}, {"objective": "memory", "gain": 1.0}])
def test_a_policy_that_keeps_the_baseline_holds_while_it_runs(evidence: dict[str, Any]) -> None:
    found = verified(claiming(1.0, policy=Policy(batch_size=128), **evidence), seconds=0.0)
    assert (found.holds, codes(found)[0]) == (True, "holds")
    assert found.speedup is not None
    assert (found.speedup.low, found.speedup.high) == (1.0, 1.0)


ALL_FAIL, ALL_HANG = failing(OOM, BEST, keeps=True), failing(HANGS, BEST, keeps=True)


@pytest.mark.parametrize(
    ("claim", "evaluator", "error", "words"),
    [
        (claiming(TRUE), ALL_FAIL, NothingFeasibleError, r"the baseline .* fails here: oom: CUDA"),
        (claiming(TRUE), ALL_HANG, NotMeasuredError, r"could not tell: .* within the budget"),
        (
            claiming(TRUE, objective="energy", gain=2.0),
            None,
            NothingFeasibleError,
            "cannot be measured on this",
        ),
        (
            claiming(TRUE, objective="beauty"),
            None,
            ClaimError,
            r"evidence\.objective is not what `amptune",
        ),
        (
            claiming(TRUE, baseline={"policy": {"autocast": "int8"}}),
            None,
            ClaimError,
            r"evidence\.baseline is not what",
        ),
        (claiming(TRUE, baseline={"policy": None}), None, ClaimError, r"evidence\.baseline is not what"),
        (claiming(TRUE, labels={"nvidia.com/gpu.product": "A100"}), None, HardwareMismatchError, "A100"),
    ],
)
def test_a_claim_that_cannot_be_verified_is_an_error_that_says_why(
    claim: PolicyFile, evaluator: RecordedEvaluator | None, error: type[AmptuneError], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        verified(claim, evaluator)
    assert (exit_code_of(caught.value) == 1) is (error is NotMeasuredError)


def test_the_baseline_of_the_claim_is_the_one_measured(tmp_path: Path) -> None:
    recipe = amp_recipe("fp16")
    true = recorded_ms("resnet50", recipe) / recorded_ms("resnet50", BEST)
    file = claiming(true, baseline={"policy": {"autocast": "fp16"}, "step_ms": recorded_ms("resnet50", recipe)})
    save(file, tmp_path / "policy.yaml")
    evaluator = RecordedEvaluator("resnet50", noise=0.002)
    assert verified(load(tmp_path / "policy.yaml"), evaluator).holds
    assert {replace(policy, batch_size=128) for policy in evaluator.measured} == {replace(recipe, batch_size=128), BEST}


def answer_on_a_simulated_machine(seed: int, trouble: Trouble, factor: float) -> str:
    """The answer to a claim so many times as high as it is true, within the default budget."""
    clock, landscape = SimulatedClock(), landscape_of(WORKLOADS[seed % len(WORKLOADS)])
    known_good = (STOCK, *landscape.candidates.known_good)
    stock, *others = dict.fromkeys(replace(one, batch_size=landscape.own_batch_size) for one in known_good)
    policy = others[seed % len(others)]
    claim = claiming(factor * landscape.samples_per_s(policy) / landscape.samples_per_s(stock), policy=policy)
    machine = SyntheticEvaluator(landscape, clock, trouble, seed)
    answer = verify_with(machine, claim, Budget(seconds=90.0, started=0.0, clock=clock), lambda _: None).answer
    assert clock() <= 100.0, "a budget is kept to 10 s"
    return answer


@pytest.mark.parametrize("trouble", [Trouble(), Trouble(busy=0.5)], ids=["an ordinary day", "a busy host"])
def test_true_claims_are_met_and_never_missed_and_no_claim_raised_by_a_fifth_is_met(trouble: Trouble) -> None:
    true, raised = (Counter(answer_on_a_simulated_machine(i, trouble, of) for i in range(7)) for of in (1.0, 1.2))
    assert true["missed"] == raised["met"] == 0
    assert true["met"] >= (6 if trouble == Trouble() else 0)
