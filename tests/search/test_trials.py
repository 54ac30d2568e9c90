"""Graphs compile in the background of a search: no more than fit, and none where it cannot be done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import optuna
import pytest
from simulated.recorded import RecordedEvaluator
from test_pipeline import request_in

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import Policy
from amptune.search.decide.decision import Decision
from amptune.search.events import Event, Observer, SearchStarted, TrialEnded
from amptune.search.pipeline import tune_with
from amptune.search.sampler import backend
from amptune.search.sampler.claims import Claims

NO_COMPILER = Failure(kind="unsupported", message="no working C++ compiler found")


@dataclass
class Behind(RecordedEvaluator):
    """Graphs compile in the background, for as long as `compile_s`, or not at all: they are `broken`."""

    takes_s: ClassVar[float] = 1.5
    launch_s: ClassVar[float] = 2.0
    broken: bool = False
    most_at_once: int = 0

    def begin_compiling(self, policy: Policy, limit_s: float) -> None:
        super().begin_compiling(policy, limit_s)
        self.most_at_once = max(self.most_at_once, len(self.in_background))

    def compiled(self, wait_s: float = 0.0) -> Mapping[Policy, float | Failure]:
        found = super().compiled(wait_s)
        return dict.fromkeys(found, NO_COMPILER) if self.broken else found


def waiting_for_the_host(policy: Policy) -> float:
    """Eager steps tell nothing of the graphs."""
    eager, graph = {"off": (8.0, 6.0), "bf16": (10.0, 3.0), "fp16": (11.0, 4.0)}[policy.autocast]
    late = policy.memory_format == "contiguous"
    return eager + late if policy.compile == "off" else graph - late


def searched(evaluator: Behind, folder: Path, observer: Observer = lambda _: None) -> tuple[Decision, list[Event]]:
    evaluator.compile_s, evaluator.true_ms = 30.0, waiting_for_the_host
    request = request_in(folder, evaluator.clock, trials=None)
    events: list[Event] = []

    def observe(event: Event) -> None:
        events.append(event)
        observer(event)

    return tune_with(evaluator, replace(request, budget=replace(request.budget, seconds=180)), observe), events


def test_a_graph_that_another_worker_has_claimed_is_not_compiled(tmp_path: Path) -> None:
    alone, beside = (Behind("resnet50", noise=0.002, graphs_at_once=4) for _ in range(2))
    searched(alone, tmp_path / "alone")
    likeliest = next(iter(alone.compiled_behind))
    others: list[Claims] = []

    def claim(event: Event) -> None:
        if isinstance(event, SearchStarted):
            storage = backend.opened(tmp_path / "beside")
            (name,) = (study.study_name for study in storage.get_all_studies())
            others.append(Claims(optuna.load_study(study_name=name, storage=storage)))
            assert others[0].take(likeliest)

    searched(beside, tmp_path / "beside", claim)
    assert beside.compiled_behind
    assert likeliest not in beside.compiled_behind


@pytest.mark.parametrize(("peak_mib", "most"), [(5_000.0, 4), (30_000.0, 2)])
def test_no_more_compile_than_the_cores_and_the_memory_are_enough_for(
    tmp_path: Path, peak_mib: float, most: int
) -> None:
    """Each is thought to need 1.5 times its eager peak, of 143,000 MiB, and so is what is measured beside them."""
    evaluator = Behind("resnet50", noise=0.002, graphs_at_once=4, peak_mib=lambda _: peak_mib)
    decision, _ = searched(evaluator, tmp_path)
    assert evaluator.most_at_once <= most <= len(evaluator.compiled_behind)
    assert (decision.policy.autocast, decision.policy.compile != "off") == ("bf16", True)


@pytest.mark.parametrize("graphs_at_once", [0, 4])
def test_compiling_is_given_up_where_it_cannot_be_done(tmp_path: Path, graphs_at_once: int) -> None:
    evaluator = Behind("resnet50", noise=0.002, graphs_at_once=graphs_at_once, broken=True)
    evaluator.interfere = lambda policy: NO_COMPILER if policy.compile != "off" else None
    decision, events = searched(evaluator, tmp_path)
    assert decision.policy.compile == "off"
    trials = [event.trial for event in events if isinstance(event, TrialEnded) and event.trial.policy.compile != "off"]
    assert {trial.outcome for trial in trials} == {NO_COMPILER}
    assert max(len(trials), len(evaluator.compiled_behind)) <= 6
    (told,) = [str(finding) for finding in decision.findings if finding.code == "compile-failed"]
    assert "C++ compiler" in told
