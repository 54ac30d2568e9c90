"""What is best depends on what is asked for: throughput, memory or energy, of the same machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from measurements import took
from simulated.recorded import RecordedEvaluator
from test_pipeline import request_in

from amptune.errors import ObjectiveError
from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.decide.comparison import Comparison
from amptune.search.decide.decision import Decision
from amptune.search.events import Event, SearchStarted, TrialEnded
from amptune.search.pipeline import tune_with
from amptune.search.plan.budget import Budget
from amptune.search.table.ablation import ablated
from amptune.search.table.gains import gain_in_words, goal_of
from amptune.search.table.objective import OBJECTIVES, THROUGHPUT, Objective, Yardstick, objective_of
from amptune.search.table.ratio import Ratio, Round, is_fast_enough, ratio_between
from amptune.search.table.verdict import Verdict, contenders_of, settled, verdict_of

MEMORY, ENERGY = Objective("memory"), Objective("energy")
BF16, FP16 = amp_recipe("bf16"), amp_recipe("fp16")


def measured(ms: float = 10.0, mib: float = 1000.0, joules: float | None = None) -> Measurement:
    return took(ms, mib, energy_j_per_sample=joules)


def rounds_by(objective: Objective, *columns: tuple[Policy, Sequence[Outcome]]) -> list[Round]:
    return [
        Round(launch=i, outcomes={policy: outcomes[i] for policy, outcomes in columns}, objective=objective)
        for i in range(len(columns[0][1]))
    ]


def decided_by(objective: Objective, *columns: tuple[Policy, Sequence[Outcome]]) -> Verdict:
    verdict = verdict_of(rounds_by(objective, *columns), STOCK)
    assert verdict is not None
    return verdict


# --- the value -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OBJECTIVES)
def test_twice_as_good_is_twice_the_score(name: str) -> None:
    objective = objective_of(name)
    once, twice = measured(ms=10.0, mib=1000.0, joules=2.0), measured(ms=5.0, mib=500.0, joules=1.0)
    assert objective.score(twice) == pytest.approx(2 * (objective.score(once) or 0))


def test_energy_that_was_not_measured_gives_no_score() -> None:
    assert ENERGY.score(measured()) is None
    assert ENERGY.score(measured(joules=0.0)) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("speed", None), "one of throughput, memory, energy, not 'speed'"),
        (("memory", 0.0), "a share of the baseline's above 0, such as 0.9, not 0.0"),
        (("memory", math.nan), "above 0"),
        (("energy", 0.9), "the least speed is for the objective memory; energy has no need of one"),
        (("memory", math.inf), "the least speed is a share of the baseline's above 0, such as 0.9, not inf"),
    ],
)
def test_an_objective_that_means_nothing_is_a_clear_error(arguments: tuple[str, float | None], words: str) -> None:
    with pytest.raises(ObjectiveError, match=words):
        objective_of(*arguments)


def test_a_trial_that_is_too_slow_loses_more_than_its_memory_gains_and_the_more_the_slower_it_is() -> None:
    yardstick = Yardstick(MEMORY, measured(ms=10.0, mib=1000.0))
    scores = [yardstick.score(measured(ms=ms, mib=600.0)) or 0.0 for ms in (8.0, 10.0, 10.5, 11.0, 12.0, 15.0, 19.0)]
    assert scores[0] == scores[1]
    assert scores[1:] == sorted(scores[1:], reverse=True)
    assert len(set(scores[1:])) == 6
    own = yardstick.score(measured()) or 0.0
    assert scores[1] > own > scores[4]


def test_a_trial_a_little_below_the_speed_needed_may_be_an_answer_and_a_slow_one_is_none() -> None:
    yardstick = Yardstick(Objective("memory", 0.9), measured(ms=10.0))
    assert yardstick.allows(measured(ms=10 / 0.895))
    assert not yardstick.allows(measured(ms=10 / 0.88))
    assert not yardstick.allows(Failure(kind="oom", message="no memory"))
    assert Yardstick(THROUGHPUT, measured(ms=10.0)).allows(measured(ms=100.0))


def test_energy_is_measured_long_enough_for_its_counter() -> None:
    effort = ENERGY.effort(Effort(measure_s=0.4))
    assert (effort.measure_s, effort.energy_s) == (1.0, 1.0)
    assert MEMORY.effort(Effort(measure_s=0.4)) == Effort(measure_s=0.4)


# --- comparisons ----------------------------------------------------------------------------------------------------


def test_a_ratio_is_that_of_the_rounds_objective_or_of_another_one() -> None:
    rounds = rounds_by(MEMORY, (STOCK, [measured()] * 3), (BF16, [measured(ms=8.0, mib=500.0)] * 3))
    ratio = ratio_between(rounds, BF16, STOCK)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert ratio_between(rounds, BF16, STOCK, by=THROUGHPUT).value == pytest.approx(1.25)


def test_pairs_without_the_figure_are_left_out() -> None:
    some = [measured(joules=1.0), measured(), measured(joules=1.0)]
    rounds = rounds_by(ENERGY, (STOCK, [measured(joules=2.0)] * 3), (BF16, some))
    assert ratio_between(rounds, BF16, STOCK).launches == 2


def test_for_memory_the_smallest_wins_of_those_that_are_fast_enough() -> None:
    columns = (
        (STOCK, [measured()] * 3),
        (BF16, [measured(ms=9.0, mib=700.0)] * 3),
        (FP16, [measured(ms=12.0, mib=400.0)] * 3),
    )
    verdict = decided_by(MEMORY, *columns)
    assert verdict.winner.policy == BF16
    assert verdict.gain.value == pytest.approx(1 / 0.7)
    assert verdict.speedup.value == pytest.approx(10 / 9)
    assert verdict.findings[0].code == "less-memory"
    words = "uses 0.70 times the memory of the baseline at 1.11 times its throughput"
    assert str(verdict.findings[0]) == f"bf16: {words}"
    assert decided_by(Objective("memory", 0.8), *columns).winner.policy == FP16


def test_what_is_too_slow_stands_behind_what_is_not() -> None:
    rounds = rounds_by(MEMORY, (STOCK, [measured()] * 3), (FP16, [measured(ms=12.0, mib=400.0)] * 3))
    first, last = contenders_of(rounds, STOCK)
    assert (first.policy, last.policy, last.too_slow) == (STOCK, FP16, True)
    assert last.merit == pytest.approx(2.5)
    verdict = decided_by(MEMORY, (STOCK, [measured()] * 3), (FP16, [measured(ms=12.0, mib=400.0)] * 3))
    assert str(verdict.findings[0]).startswith(
        "keep what you have: no policy was shown to use less memory at the baseline's throughput; the best rival: "
        "fp16, "
        "uses 0.40 times the memory of the baseline at 0.83 times its throughput"
    )


def test_a_speed_that_only_seems_too_low_is_not_held_against_a_policy() -> None:
    """1 % below and an interval that reaches it: to a user that is the baseline's speed."""
    slower = [measured(ms=ms, mib=500.0) for ms in (10.0, 10.1, 10.1, 10.05)]
    assert decided_by(MEMORY, (STOCK, [measured()] * 4), (BF16, slower)).winner.policy == BF16
    surely = [measured(ms=10.15, mib=500.0)] * 4
    assert decided_by(MEMORY, (STOCK, [measured()] * 4), (BF16, surely)).keeps_the_baseline


def test_next_to_no_memory_is_no_reason_to_change() -> None:
    assert decided_by(MEMORY, (STOCK, [measured()] * 3), (BF16, [measured(mib=997.0)] * 3)).keeps_the_baseline


def test_of_two_that_use_about_the_same_the_simpler_wins() -> None:
    last = amp_recipe("bf16", memory_format="channels_last")
    verdict = decided_by(
        MEMORY, (STOCK, [measured()] * 3), (last, [measured(mib=600.0)] * 3), (BF16, [measured(mib=602.0)] * 3)
    )
    assert verdict.winner.policy == BF16
    assert "no difference shown between the 2 that use least memory" in str(verdict.findings[1])


def test_a_little_less_memory_is_not_worth_a_speed() -> None:
    last = amp_recipe("bf16", memory_format="channels_last")
    small, fast = [measured(ms=8.0, mib=600.0)] * 3, [measured(ms=5.0, mib=602.0)] * 3
    assert decided_by(MEMORY, (STOCK, [measured()] * 3), (BF16, small), (last, fast)).winner.policy == last


def test_for_energy_the_thriftiest_wins_whatever_its_speed() -> None:
    verdict = decided_by(
        ENERGY,
        (STOCK, [measured(joules=j) for j in (2.0, 2.02, 1.98)]),
        (BF16, [measured(ms=12.0, joules=j) for j in (1.0, 1.01, 0.99)]),
    )
    assert verdict.winner.policy == BF16
    assert verdict.findings[0].code == "less-energy"
    assert "uses 0.500 times" not in str(verdict.findings[0])
    assert "times the energy of the baseline per sample at 0.83 times its throughput" in str(verdict.findings[0])


def test_a_comparison_of_memory_is_settled_once_the_speeds_are_known() -> None:
    quiet, noisy = [10.0] * 6, [9.0, 11.0, 9.5, 10.5, 9.2, 10.1]
    for times, expected in ((quiet, True), (noisy, False)):
        rival = [measured(ms=ms, mib=500.0) for ms in times]
        assert settled(rounds_by(MEMORY, (STOCK, [measured()] * 6), (BF16, rival)), STOCK) is expected


def test_a_speed_is_surely_enough_only_where_its_interval_says_so() -> None:
    noisy = rounds_by(
        MEMORY, (STOCK, [measured()] * 3), (BF16, [measured(ms=ms, mib=500.0) for ms in (9.0, 10.0, 11.0)])
    )
    assert is_fast_enough(noisy, BF16, STOCK)
    assert not is_fast_enough(noisy, BF16, STOCK, surely=True)
    assert is_fast_enough(noisy, FP16, STOCK)


def compared(evaluator: RecordedEvaluator, objective: Objective, *policies: Policy) -> list[Round]:
    comparison = Comparison(
        evaluator=evaluator,
        policies=policies,
        baseline=STOCK,
        budget=Budget(seconds=60.0),
        stage="finals",
        observer=lambda _: None,
        objective=objective,
    )
    return list(comparison.rounds())


def test_one_that_is_too_slow_drops_nobody_and_is_dropped_itself() -> None:
    """It uses least memory by far; but what it would beat may be the answer."""
    evaluator = RecordedEvaluator(
        "resnet50",
        noise=0.002,
        true_ms=lambda policy: 30.0 if policy == FP16 else 20.0,
        peak_mib=lambda policy: {STOCK: 1000.0, BF16: 800.0, FP16: 200.0}[policy],
    )
    rounds = compared(evaluator, MEMORY, STOCK, BF16, FP16)
    assert evaluator.measured.count(FP16) < len(rounds)
    assert BF16 in rounds[-1].outcomes
    verdict = verdict_of(rounds, STOCK)
    assert verdict is not None
    assert verdict.winner.policy == BF16


def test_a_policy_that_is_slow_but_small_enough_stays_where_its_speed_is_enough() -> None:
    evaluator = RecordedEvaluator(
        "resnet50",
        noise=0.002,
        true_ms=lambda policy: 30.0 if policy == FP16 else 20.0,
        peak_mib=lambda policy: {STOCK: 1000.0, BF16: 800.0, FP16: 700.0}[policy],
    )
    rounds = compared(evaluator, Objective("memory", 0.6), STOCK, BF16, FP16)
    assert FP16 in rounds[-1].outcomes
    assert BF16 not in rounds[-1].outcomes


def test_what_a_setting_buys_is_told_in_the_objectives_terms_and_in_speed() -> None:
    rounds = rounds_by(MEMORY, (STOCK, [measured(mib=900.0)] * 3), (BF16, [measured(ms=5.0, mib=600.0)] * 3))
    (autocast,) = ablated(rounds, BF16)
    assert (autocast.buys.value, autocast.speed.value) == pytest.approx((1.5, 2.0))


# --- words ----------------------------------------------------------------------------------------------------------


def test_what_was_looked_for_is_said_for_each_objective() -> None:
    assert goal_of(THROUGHPUT) == "to be faster"
    assert goal_of(MEMORY) == "to use less memory at the baseline's throughput"
    assert goal_of(Objective("memory", 0.9)) == "to use less memory at 0.9 times the baseline's throughput"
    assert goal_of(ENERGY) == "to use less energy per sample"


def test_a_gain_is_said_as_what_is_used() -> None:
    gain = Ratio(value=1 / 0.61, low=1 / 0.61, high=1 / 0.61, launches=3)
    speedup = Ratio(value=1.02, low=1.01, high=1.03, launches=3)
    words = "uses 0.61 times the memory of the baseline at 1.020 [1.010, 1.030] times its throughput"
    assert gain_in_words(MEMORY, gain, speedup) == words
    assert gain_in_words(THROUGHPUT, speedup, speedup) == "1.020× [1.010, 1.030] the speed of the baseline"


# --- whole tunings --------------------------------------------------------------------------------------------------


def speed_costs_memory(policy: Policy) -> float:
    """bf16 is the fastest, fp16 smaller at the baseline's speed; channels_last smaller still, and slower than that."""
    factor = {"off": 1.0, "bf16": 0.5, "fp16": 0.9}[policy.autocast]
    slow = 2.2 if policy.memory_format == "channels_last" else 1.0
    return 40.0 * factor * slow * 1.02 ** len(policy.fp32_modules)


def peak_mib(policy: Policy) -> float:
    factor = {"off": 1.0, "bf16": 0.8, "fp16": 0.5}[policy.autocast]
    small = 0.4 if policy.memory_format == "channels_last" else 1.0
    return 10_000 * factor * small * 1.03 ** len(policy.fp32_modules)


def watts(policy: Policy) -> float:
    return 700.0 if policy.autocast == "bf16" else 300.0


def recording(*, energy: bool = True) -> RecordedEvaluator:
    return RecordedEvaluator(
        "resnet50",
        noise=0.002,
        true_ms=speed_costs_memory,
        peak_mib=peak_mib,
        watts=watts if energy else None,
    )


def tuned_for(
    objective: Objective, folder: Path, evaluator: RecordedEvaluator | None = None, **options: object
) -> tuple[Decision, list[Event]]:
    events: list[Event] = []
    request = replace(request_in(folder, **options), objective=objective)  # type: ignore[arg-type]
    return tune_with(evaluator or recording(), request, events.append), events


@pytest.mark.parametrize(
    ("objective", "autocast", "layout"),
    [
        (THROUGHPUT, "bf16", "contiguous"),
        (MEMORY, "fp16", "contiguous"),
        (Objective("memory", 0.85), "bf16", "channels_last"),
        (Objective("memory", 0.45), "fp16", "channels_last"),
        (ENERGY, "fp16", "contiguous"),
    ],
)
def test_each_objective_finds_its_own_policy(objective: Objective, autocast: str, layout: str, tmp_path: Path) -> None:
    decision, _ = tuned_for(objective, tmp_path)
    assert (decision.policy.autocast, decision.policy.memory_format) == (autocast, layout)
    assert not decision.policy.fp32_modules
    assert decision.objective == objective
    truth = speed_costs_memory(STOCK) / speed_costs_memory(decision.winner)
    assert decision.speedup.value == pytest.approx(truth, rel=0.02)


def test_what_uses_least_energy_may_be_slower(tmp_path: Path) -> None:
    evaluator = recording()
    evaluator.watts = lambda policy: 700.0 if policy.autocast == "bf16" else 100.0 + 200 * (policy.autocast == "off")
    decision, _ = tuned_for(ENERGY, tmp_path, evaluator)
    assert decision.policy.autocast == "fp16"
    assert decision.gain.value == pytest.approx(300 * 40 / (100 * 36), rel=0.02)
    assert decision.speedup.value == pytest.approx(40 / 36, rel=0.02)


def test_one_study_answers_every_objective_and_measures_nothing_twice(tmp_path: Path) -> None:
    first, _ = tuned_for(THROUGHPUT, tmp_path, trials=30)
    second, events = tuned_for(MEMORY, tmp_path, trials=5)
    started = next(event for event in events if isinstance(event, SearchStarted))
    assert started.remembered == len(first.trials)
    tried = {event.trial.policy for event in events if isinstance(event, TrialEnded)}
    assert not tried & {trial.policy for trial in first.trials}
    assert second.policy.autocast == "fp16"


def test_trials_without_energy_are_measured_again_when_energy_is_asked_for(tmp_path: Path) -> None:
    tuned_for(THROUGHPUT, tmp_path, recording(energy=False), trials=10)
    decision, events = tuned_for(ENERGY, tmp_path, trials=10)
    started = next(event for event in events if isinstance(event, SearchStarted))
    assert started.remembered == 0
    assert decision.policy.autocast == "fp16"


def test_a_machine_without_energy_is_told_so(tmp_path: Path) -> None:
    evaluator = recording(energy=False)
    with pytest.raises(ObjectiveError, match=r"this machine reports no energy: none could be read"):
        tuned_for(ENERGY, tmp_path, evaluator)
    assert evaluator.measured == [STOCK]


def test_the_best_trial_for_memory_is_none_that_is_too_slow(tmp_path: Path) -> None:
    _, events = tuned_for(MEMORY, tmp_path)
    best = [event.best.policy for event in events if isinstance(event, TrialEnded) and event.best is not None]
    assert {policy.memory_format for policy in best} == {"contiguous"}
    assert best[-1].autocast == "fp16"


class Watched(RecordedEvaluator):
    """Keeps the efforts asked of it."""

    efforts: list[Effort]

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        self.efforts = [*getattr(self, "efforts", []), effort]
        return super().measure(policy, effort)


def efforts_for(objective: Objective, folder: Path) -> list[Effort]:
    evaluator = Watched("resnet50", noise=0.002, true_ms=speed_costs_memory, peak_mib=peak_mib, watts=watts)
    tuned_for(objective, folder, evaluator, trials=12)
    return evaluator.efforts


def test_no_trial_for_energy_is_cut_short(tmp_path: Path) -> None:
    efforts = efforts_for(ENERGY, tmp_path)
    assert {effort.abandon_above_ms for effort in efforts} == {None}
    assert {effort.energy_s for effort in efforts} == {1.0}


def test_a_trial_for_memory_is_cut_short_only_at_half_the_speed_needed(tmp_path: Path) -> None:
    limits = {effort.abandon_above_ms for effort in efforts_for(Objective("memory", 0.8), tmp_path)} - {None}
    assert limits
    assert all(limit == pytest.approx(2 * 40 / 0.8, rel=0.02) for limit in limits)


@pytest.mark.parametrize("objective", [THROUGHPUT, MEMORY, ENERGY], ids=lambda one: one.name)
def test_an_interrupted_tuning_answers_by_the_objective_too(objective: Objective, tmp_path: Path) -> None:
    evaluator = recording()
    decision, _ = tuned_for(objective, tmp_path, evaluator, trials=3)
    assert decision.objective == objective
