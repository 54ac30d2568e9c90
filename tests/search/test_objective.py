"""What is best depends on what is asked for: throughput, memory or energy, of the same machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from measurements import took
from simulated.recorded import RecordedEvaluator
from test_pipeline import request_in

from amptune.errors import ObjectiveError
from amptune.measure.results.outcome import Effort, Failure, Outcome
from amptune.policy.settings import STOCK, Policy
from amptune.search.decide.decision import Decision
from amptune.search.events import Event, TrialEnded
from amptune.search.pipeline import tune_with
from amptune.search.table.objective import THROUGHPUT, Objective, Yardstick, objective_of

MEMORY, ENERGY = Objective("memory"), Objective("energy")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("speed", None), "one of throughput, memory, energy, not 'speed'"),
        (("energy", 0.9), "the least speed is for the objective memory; energy has no need of one"),
        (("memory", math.inf), "the least speed is a share of the baseline's above 0, such as 0.9, not inf"),
    ],
)
def test_an_objective_that_means_nothing_is_a_clear_error(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(ObjectiveError, match=words):
        objective_of(*arguments)


def test_a_trial_that_is_too_slow_loses_more_than_its_memory_gains_and_the_more_the_slower_it_is() -> None:
    yardstick = Yardstick(MEMORY, took(10.0, 1000.0))
    scores = [yardstick.score(took(ms, 600.0)) or 0.0 for ms in (8.0, 10.0, 10.5, 11.0, 12.0, 15.0, 19.0)]
    assert scores[0] == scores[1]
    assert scores[1:] == sorted(set(scores[1:]), reverse=True)
    assert scores[1] > (yardstick.score(took(10.0, 1000.0)) or 0.0) > scores[4]


def test_a_trial_a_little_below_the_speed_needed_may_be_an_answer_and_a_slow_one_is_none() -> None:
    yardstick = Yardstick(Objective("memory", 0.9), took(10.0))
    assert yardstick.allows(took(10 / 0.895))
    assert not yardstick.allows(took(10 / 0.88))
    assert not yardstick.allows(Failure(kind="oom", message="no memory"))
    assert Yardstick(THROUGHPUT, took(10.0)).allows(took(100.0))


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


@dataclass
class Watched(RecordedEvaluator):
    """Keeps the efforts asked of it."""

    efforts: list[Effort] = field(default_factory=list)

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        self.efforts.append(effort)
        return super().measure(policy, effort)


def recording(*, energy: bool = True) -> Watched:
    spent = watts if energy else None
    return Watched("resnet50", noise=0.002, true_ms=speed_costs_memory, peak_mib=peak_mib, watts=spent)


def tuned_for(
    objective: Objective, folder: Path, evaluator: RecordedEvaluator | None = None, *, trials: int = 30, **wanted: Any
) -> tuple[Decision, list[Event]]:
    events: list[Event] = []
    evaluator = evaluator or recording()
    pins = {"cuda_graphs": "false", "compile": "off"}  # which were not recorded
    request = request_in(folder, evaluator.clock, trials=trials, **{"pins": pins, **wanted})
    return tune_with(evaluator, replace(request, objective=objective), events.append), events


@pytest.mark.parametrize(
    ("objective", "autocast", "layout"),
    [
        (MEMORY, "fp16", "contiguous"),
        (Objective("memory", 0.45), "fp16", "channels_last"),
        (ENERGY, "fp16", "contiguous"),
    ],
)
def test_each_objective_finds_its_own_policy(objective: Objective, autocast: str, layout: str, tmp_path: Path) -> None:
    evaluator = recording()
    decision, events = tuned_for(objective, tmp_path, evaluator)
    assert (decision.policy.autocast, decision.policy.memory_format) == (autocast, layout)
    assert not decision.policy.fp32_modules
    assert decision.objective == objective
    truth = speed_costs_memory(STOCK) / speed_costs_memory(decision.winner)
    assert decision.speedup.value == pytest.approx(truth, rel=0.02)
    best = [event.best.policy for event in events if isinstance(event, TrialEnded) and event.best is not None]
    assert best[-1].autocast == autocast
    limits = {effort.abandon_above_ms for effort in evaluator.efforts} - {None}
    if objective == ENERGY:
        assert limits == set(), "no trial for energy is cut short"
        assert {effort.energy_s for effort in evaluator.efforts} == {1.0}
    elif objective.name == "memory":
        assert objective != MEMORY or {policy.memory_format for policy in best} == {layout}, "too slow is never best"
        assert limits
        assert all(limit == pytest.approx(2 * 40 / objective.least_speed, rel=0.02) for limit in limits)


def test_a_machine_without_energy_is_told_so(tmp_path: Path) -> None:
    evaluator = recording(energy=False)
    with pytest.raises(ObjectiveError, match=r"this machine reports no energy: none could be read"):
        tuned_for(ENERGY, tmp_path, evaluator)
    assert evaluator.measured == [STOCK]
