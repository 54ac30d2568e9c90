"""What is decided where comparisons are few: of which nothing is proven, but which were not blind either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from measurements import took

from amptune.measure.results.outcome import Measurement, Outcome
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.decide.comparisons import CandidateRounds, Comparisons, ComparisonSetup
from amptune.search.decide.conclusion import _verdict_of_looks, _verdict_of_trials
from amptune.search.table.objective import THROUGHPUT, Objective, objective_of
from amptune.search.table.ratio import Round
from amptune.search.table.trial import Trial
from amptune.search.table.verdict import Verdict

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
) -> Comparisons:
    setup = ComparisonSetup(
        baseline=STOCK,
        finalists=tuple(TRIALS),
        eligible=lambda _: True,
        variant_eligible=lambda _: True,
        rejected=lambda policy: policy == rejected,
        objective=objective,
    )
    return Comparisons(setup=setup, finals=[Round(launch=0, outcomes=outcomes(times)) for times in rounds])


def by_looks(comparisons: Comparisons, trials: Mapping[Policy, float] = TRIALS) -> Verdict | None:
    compared = comparisons.verdict()
    assert compared is not None
    assert compared.keeps_the_baseline
    return _verdict_of_looks(compared, trials_of(trials), comparisons)


def test_what_was_much_better_in_every_look_is_taken_though_two_rounds_prove_nothing() -> None:
    verdict = by_looks(proof_of(ROUNDS))
    assert verdict is not None
    assert verdict.winner.policy == BF16_LAST
    assert [finding.code for finding in verdict.findings] == ["provisional", "few-launches", "noisy"]
    assert "which is not proven; in each look, its trial included, it gained more than 10%" in str(verdict.findings[0])


def test_what_was_not_better_in_one_of_the_looks_is_not_taken() -> None:
    slow = {BF16: 60.0, FP16: 60.0, BF16_LAST: 50.0, FP16_LAST: 50.0}
    assert by_looks(proof_of([ROUNDS[0], {**ROUNDS[1], **slow}])) is None
    assert by_looks(proof_of(ROUNDS), {**TRIALS, **slow}) is None


def test_what_was_better_in_every_look_by_no_more_than_the_looks_differ_is_not_taken() -> None:
    rounds = (
        {STOCK: 40.0, BF16: 33.0, FP16: 60.0, BF16_LAST: 25.0, FP16_LAST: 60.0},
        {STOCK: 60.0, BF16: 50.0, FP16: 40.0, BF16_LAST: 70.0, FP16_LAST: 36.0},
    )
    assert by_looks(proof_of(rounds)) is None


def test_what_an_ablation_that_was_begun_speaks_against_is_not_taken() -> None:
    comparisons = proof_of(ROUNDS)
    worse = [Round(launch=0, outcomes=outcomes({STOCK: 48.0, BF16_LAST: 56.0}))]
    comparisons.ablations.append(CandidateRounds(candidate=BF16_LAST, rounds=worse))
    verdict = by_looks(comparisons)
    assert verdict is not None
    assert verdict.winner.policy == FP16_LAST


@pytest.mark.parametrize(("ms", "winner"), [(30.0, BF16), (56.0, STOCK)])
def test_a_round_that_contradicts_its_trial_counts_where_trials_decide(ms: float, winner: Policy) -> None:
    comparisons = proof_of([{STOCK: 40.0, BF16: ms}])
    assert comparisons.verdict() is None
    verdict = _verdict_of_trials(trials_of({STOCK: 40.0, BF16: 30.0}), comparisons)
    assert verdict is not None
    assert verdict.winner.policy == winner


def test_for_memory_each_look_has_to_be_fast_enough_too() -> None:
    objective = objective_of("memory")
    peaks = {STOCK: 6000.0, BF16: 3900.0}

    def taken(slowest_ms: float) -> Policy:
        comparisons = proof_of([{STOCK: 40.0, BF16: 39.0}, {STOCK: 40.0, BF16: slowest_ms}], objective=objective)
        rounds = [replace(one, objective=objective, outcomes=with_peaks(one, peaks)) for one in comparisons.finals]
        comparisons = replace(comparisons, finals=rounds)
        compared = comparisons.verdict()
        assert compared is not None
        kept = replace(compared, winner=compared.baseline)  # as if nothing had been shown
        verdict = _verdict_of_looks(kept, trials_of({STOCK: 40.0, BF16: 39.0}, peaks), comparisons)
        return (verdict or kept).winner.policy

    assert taken(39.0) == BF16
    assert taken(52.0) == STOCK


def with_peaks(one: Round, peaks: Mapping[Policy, float]) -> dict[Policy, Outcome]:
    return {
        policy: replace(outcome, peak_allocated_mib=peaks[policy], peak_reserved_mib=peaks[policy])
        for policy, outcome in one.outcomes.items()
        if isinstance(outcome, Measurement)
    }


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
