"""What is decided where comparisons are few: of which nothing is proven, but which were not blind either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from measurements import took

from amptune.measure.outcome import Outcome
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.deciding import _verdict_of_looks, _verdict_of_trials
from amptune.search.decision import Verdict
from amptune.search.objective import THROUGHPUT, Objective, objective_of
from amptune.search.proof import Contest, Proof
from amptune.search.ratios import Round
from amptune.search.trial import Trial

BF16, FP16 = amp_recipe("bf16"), amp_recipe("fp16")
BF16_LAST, FP16_LAST = (amp_recipe(dtype, memory_format="channels_last") for dtype in ("bf16", "fp16"))

# DeepLabV3+ tuned in 120 s on an H200 with a busy host, ms a step: single trials, then two rounds of one launch.
TRIALS = {STOCK: 48.55, BF16: 34.67, FP16: 36.05, BF16_LAST: 29.58, FP16_LAST: 29.26}
ROUNDS = (
    {STOCK: 48.56, BF16: 38.31, FP16: 35.92, BF16_LAST: 28.89, FP16_LAST: 36.86},
    {STOCK: 50.83, BF16: 34.72, FP16: 39.87, BF16_LAST: 34.41, FP16_LAST: 32.21},
)


def outcomes(times: Mapping[Policy, float], peaks: Mapping[Policy, float] | None = None) -> dict[Policy, Outcome]:
    return {policy: took(ms, (peaks or {}).get(policy, 4000.0)) for policy, ms in times.items()}


def trials_of(times: Mapping[Policy, float], peaks: Mapping[Policy, float] | None = None) -> list[Trial]:
    found = outcomes(times, peaks)
    return [Trial(number=i, policy=policy, outcome=found[policy], seconds=2.0) for i, policy in enumerate(found)]


def proof_of(
    rounds: Sequence[Mapping[Policy, float]], *, rejected: Policy | None = None, objective: Objective = THROUGHPUT
) -> Proof:
    contest = Contest(
        baseline=STOCK,
        finalists=tuple(TRIALS),
        eligible=lambda _: True,
        variant_eligible=lambda _: True,
        rejected=lambda policy: policy == rejected,
        objective=objective,
    )
    return Proof(contest=contest, finals=[Round(launch=0, outcomes=outcomes(times)) for times in rounds])


def by_looks(proof: Proof, trials: Mapping[Policy, float] = TRIALS) -> Verdict | None:
    compared = proof.verdict()
    assert compared is not None
    assert compared.keeps_the_baseline
    return _verdict_of_looks(compared, trials_of(trials), proof)


def test_what_was_much_better_in_every_look_is_taken_though_two_rounds_prove_nothing() -> None:
    verdict = by_looks(proof_of(ROUNDS))
    assert verdict is not None
    assert verdict.winner.policy == BF16_LAST
    assert [finding.code for finding in verdict.findings] == ["provisional", "few-launches", "noisy"]
    assert "the speed of the baseline, which is not proven; in each of 3 looks, its trial included" in str(
        verdict.findings[0]
    )


def test_what_was_not_better_in_one_of_the_looks_is_not_taken() -> None:
    slow = {BF16: 60.0, FP16: 60.0, BF16_LAST: 50.0, FP16_LAST: 50.0}
    assert by_looks(proof_of([ROUNDS[0], {**ROUNDS[1], **slow}])) is None
    assert by_looks(proof_of(ROUNDS), {**TRIALS, **slow}) is None


def test_what_the_numerics_gate_rejects_leaves_it_to_the_next() -> None:
    verdict = by_looks(proof_of(ROUNDS, rejected=BF16_LAST))
    assert verdict is not None
    assert verdict.winner.policy == FP16_LAST


def test_of_trials_that_use_the_same_memory_the_fastest_is_taken() -> None:
    """2 MiB less are worth no speed: on an H200 fp16 had taken 46 ms and 3,901 MiB, bf16 37 ms and 3,903."""
    objective = objective_of("memory")
    peaks = {STOCK: 6499.0, FP16: 3901.0, BF16: 3903.0, BF16_LAST: 3980.0}
    times = {STOCK: 48.8, FP16: 46.3, BF16: 37.1, BF16_LAST: 35.9}
    verdict = _verdict_of_trials(trials_of(times, peaks), proof_of([], objective=objective))
    assert verdict is not None
    assert verdict.winner.policy == BF16
