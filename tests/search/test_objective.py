"""What is best depends on what is asked for: throughput, memory or energy, of the same machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measurements import took
from simulated.recorded import RecordedEvaluator
from tables import block, decided, in_turn
from test_pipeline import request_in

from amptune.errors import ObjectiveError
from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.decide.decision import Decision
from amptune.search.events import Event, SearchStarted, TrialEnded
from amptune.search.pipeline import tune_with
from amptune.search.table.ablation import ablated
from amptune.search.table.effects import GPU
from amptune.search.table.gains import gain_in_words, goal_of
from amptune.search.table.next_rows import next_round
from amptune.search.table.objective import OBJECTIVES, THROUGHPUT, Objective, Yardstick, objective_of
from amptune.search.table.ratio import Ratio
from amptune.search.table.verdict import Verdict

MEMORY, ENERGY = Objective("memory"), Objective("energy")
BF16, FP16 = amp_recipe("bf16"), amp_recipe("fp16")


def measured(ms: float = 10.0, mib: float = 1000.0, joules: float | None = None) -> Measurement:
    return took(ms, mib, energy_j_per_sample=joules)


def decided_by(objective: Objective, *columns: tuple[Policy, Sequence[Measurement]]) -> Verdict:
    return decided(in_turn(dict(columns)), GPU, objective)


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
        (("memory", None, 100), "steps are for the objective throughput"),
        (("throughput", None, 0), "and at least 1, not 0"),
        (("speed", None), "one of throughput, memory, energy, not 'speed'"),
        (("memory", 0.0), "a share of the baseline's above 0, such as 0.9, not 0.0"),
        (("memory", math.nan), "above 0"),
        (("energy", 0.9), "the least speed is for the objective memory; energy has no need of one"),
        (("memory", math.inf), "the least speed is a share of the baseline's above 0, such as 0.9, not inf"),
    ],
)
def test_an_objective_that_means_nothing_is_a_clear_error(arguments: tuple[Any, ...], words: str) -> None:
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


# --- the verdict ----------------------------------------------------------------------------------------------------


def test_a_gain_is_that_of_the_objective_and_the_speed_stands_beside_it() -> None:
    verdict = decided_by(MEMORY, (STOCK, [measured()] * 3), (BF16, [measured(ms=8.0, mib=500.0)] * 3))
    assert verdict.gain.value == pytest.approx(2.0, rel=1e-3)
    assert verdict.speedup.value == pytest.approx(1.25, rel=0.01)


def test_rows_without_the_figure_tell_of_the_speed_alone() -> None:
    some = [measured(joules=1.0), measured(), measured(joules=1.0)]
    verdict = decided_by(ENERGY, (STOCK, [measured(joules=2.0)] * 3), (BF16, some))
    assert (verdict.gain.launches, verdict.speedup.launches) == (2, 3)


def test_for_memory_the_smallest_wins_of_those_that_are_fast_enough() -> None:
    columns = (
        (STOCK, [measured()] * 3),
        (BF16, [measured(ms=9.0, mib=700.0)] * 3),
        (FP16, [measured(ms=12.0, mib=400.0)] * 3),
    )
    verdict = decided_by(MEMORY, *columns)
    assert verdict.winner.policy == BF16
    assert verdict.gain.value == pytest.approx(1 / 0.7, rel=1e-3)
    assert verdict.speedup.value == pytest.approx(10 / 9, rel=0.01)
    assert verdict.findings[0].code == "less-memory"
    assert str(verdict.findings[0]).startswith("bf16: uses 0.70")
    assert " times the memory of the baseline at 1.11 [1." in str(verdict.findings[0])
    assert decided_by(Objective("memory", 0.8), *columns).winner.policy == FP16


def test_a_speed_that_only_seems_too_low_is_not_held_against_a_policy() -> None:
    """1 % below: to a user that is the baseline's speed."""
    slower = [measured(ms=ms, mib=500.0) for ms in (10.0, 10.1, 10.1, 10.05)]
    assert decided_by(MEMORY, (STOCK, [measured()] * 4), (BF16, slower)).winner.policy == BF16
    surely = [measured(ms=10.2, mib=500.0)] * 4
    assert decided_by(MEMORY, (STOCK, [measured()] * 4), (BF16, surely)).keeps_the_baseline


def test_of_two_that_use_about_the_same_the_simpler_wins() -> None:
    last = amp_recipe("bf16", memory_format="channels_last")
    verdict = decided_by(
        MEMORY, (STOCK, [measured()] * 3), (last, [measured(mib=600.0)] * 3), (BF16, [measured(mib=602.0)] * 3)
    )
    assert verdict.winner.policy == BF16
    assert "no difference shown between the 2 that use least memory" in str(verdict.findings[1])


def test_for_energy_the_thriftiest_wins_whatever_its_speed() -> None:
    verdict = decided_by(
        ENERGY,
        (STOCK, [measured(joules=j) for j in (2.0, 2.02, 1.98)]),
        (BF16, [measured(ms=12.0, joules=j) for j in (1.0, 1.01, 0.99)]),
    )
    assert verdict.winner.policy == BF16
    assert verdict.findings[0].code == "less-energy"
    assert "times the energy of the baseline per sample at 0.83 [0." in str(verdict.findings[0])


@pytest.mark.parametrize(("count", "enough"), [(2, False), (30, True)])
def test_for_memory_more_is_measured_until_the_speed_is_known_too(count: int, *, enough: bool) -> None:
    """Peaks are the same in every block, and say nothing of the time."""
    times = [10.0 * factor for factor in (1.0, 1.05, 0.96, 1.02, 0.98)]
    columns = {
        STOCK: [block(times[i % 5], 0.03, mib=1000.0) for i in range(count)],
        BF16: [block(times[(i + 2) % 5], 0.03, mib=500.0) for i in range(count)],
    }
    verdict = decided(in_turn(columns), GPU, Objective("memory", 0.97))
    assert (verdict.winner.policy, verdict.confidence) == (BF16, "likely"), "its speed may differ in another sitting"
    chosen = next_round(verdict, lambda _: None, fresh_s=lambda _: 2.0, cost_s=lambda _: 1.0, left_s=100.0)
    assert (chosen is None) is enough


def test_what_a_setting_buys_is_told_in_the_objectives_terms_and_in_speed() -> None:
    verdict = decided_by(MEMORY, (STOCK, [measured(mib=900.0)] * 3), (BF16, [measured(ms=5.0, mib=600.0)] * 3))
    (autocast,) = ablated(verdict, BF16)
    assert autocast.buys.value == pytest.approx(1.5, rel=1e-3)
    assert autocast.speed.value == pytest.approx(2.0, rel=0.01)


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
    return {"off": 300.0, "bf16": 700.0, "fp16": 200.0}[policy.autocast]


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
    evaluator = evaluator or recording()
    request = replace(request_in(folder, evaluator.clock, **options), objective=objective)  # type: ignore[arg-type]
    return tune_with(evaluator, request, events.append), events


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
