"""In which order policies are tried: the cheap before the dear, the best of them compiled first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar

import pytest
from simulated.recorded import RecordedEvaluator
from test_pipeline import request_in

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.settings import Policy
from amptune.search.decide.decision import Decision
from amptune.search.events import Compiling as GraphBegun
from amptune.search.events import Event, TrialEnded
from amptune.search.pipeline import tune_with
from amptune.search.table.objective import THROUGHPUT, Objective

MODES = ("default", "reduce-overhead")
NO_COMPILER = Failure(kind="unsupported", message="no working C++ compiler found")


def tried(events: list[Event]) -> list[Policy]:
    return [event.trial.policy for event in events if isinstance(event, TrialEnded)]


class Behind(RecordedEvaluator):
    """Graphs compile in the background, for as long as `compile_s`. Eager steps tell nothing of the graphs."""

    takes_s: ClassVar[float] = 1.5
    launch_s: ClassVar[float] = 2.0
    most_at_once = 0

    def begin_compiling(self, policy: Policy, limit_s: float) -> None:
        super().begin_compiling(policy, limit_s)
        self.most_at_once = max(self.most_at_once, len(self.in_background))


def waiting_for_the_host(policy: Policy) -> float:
    if policy.compile == "off":
        eager = {"off": 8.0, "bf16": 10.0, "fp16": 11.0}
        return eager[policy.autocast] + (policy.memory_format == "contiguous")
    graph = {"off": 6.0, "bf16": 3.0, "fp16": 4.0}
    return graph[policy.autocast] - (policy.memory_format == "contiguous")


def searched_behind(
    folder: Path,
    evaluator: Behind | None = None,
    *,
    budget_s: float = 180,
    compile_s: float = 30.0,
    peak_mib: float = 5000.0,
    objective: Objective = THROUGHPUT,
    **wanted: Any,
) -> tuple[Behind, Decision, list[Event]]:
    evaluator = evaluator or Behind("resnet50", noise=0.002, graphs_at_once=4)
    evaluator.peak_mib, evaluator.compile_s = lambda _: peak_mib, compile_s
    evaluator.true_ms = waiting_for_the_host
    request = request_in(folder, evaluator.clock, trials=None, **wanted)
    request = replace(request, budget=replace(request.budget, seconds=budget_s), objective=objective)
    events: list[Event] = []
    return evaluator, tune_with(evaluator, request, events.append), events


def graphs_in(events: list[Event]) -> list[Policy]:
    return [policy for policy in tried(events) if policy.compile != "off"]


def test_others_are_measured_while_graphs_compile_and_each_graph_once_it_is_ready(tmp_path: Path) -> None:
    """The best dtype with CUDA graphs and without: an encoder-decoder was fastest without (an H200)."""
    evaluator, decision, events = searched_behind(tmp_path)
    assert isinstance(next(event for event in events if isinstance(event, GraphBegun | TrialEnded)), GraphBegun)
    likeliest = Policy(autocast="bf16", memory_format="channels_last", fused_optimizer=True)
    assert evaluator.compiled_behind[:2] == [likeliest.compiled("reduce-overhead"), likeliest.compiled("default")]
    eager = list(takewhile(lambda policy: policy.compile == "off", tried(events)))
    assert len(eager) >= 10
    assert graphs_in(events)[:2] == evaluator.compiled_behind[:2]
    assert decision.policy.autocast == "bf16"
    assert decision.policy.compile != "off"
    assert {policy.compile for policy in graphs_in(events) if policy.autocast == "bf16"} == set(MODES)
    trials = [event.trial for event in events if isinstance(event, TrialEnded) and event.trial.policy.compile != "off"]
    assert [trial.seconds for trial in trials] == pytest.approx([31.5] * len(trials))
    assert all(isinstance(trial.outcome, Measurement) and trial.outcome.startup_s == 30.0 for trial in trials)
    assert next(f for f in decision.findings if f.code == "compile-pays").figures["compile_s"] == 30.0


@pytest.mark.parametrize(("peak_mib", "most"), [(5_000.0, 4), (30_000.0, 2)])
def test_no_more_compile_than_the_cores_and_the_memory_are_enough_for(
    tmp_path: Path, peak_mib: float, most: int
) -> None:
    """Each is thought to need 1.5 times its eager peak, of 143,000 MiB, and so is what is measured beside them."""
    evaluator, _, _ = searched_behind(tmp_path, peak_mib=peak_mib)
    assert evaluator.most_at_once <= most
    assert len(evaluator.compiled_behind) >= most


@pytest.mark.parametrize("graphs_at_once", [0, 4])
def test_compiling_is_given_up_where_it_cannot_be_done(tmp_path: Path, graphs_at_once: int) -> None:
    class Broken(Behind):
        def compiled(self, wait_s: float = 0.0) -> Mapping[Policy, float | Failure]:
            return dict.fromkeys(super().compiled(wait_s), NO_COMPILER)

    evaluator = Broken("resnet50", noise=0.002, graphs_at_once=graphs_at_once)
    evaluator.interfere = lambda policy: NO_COMPILER if policy.compile != "off" else None
    _, decision, events = searched_behind(tmp_path, evaluator=evaluator)
    assert decision.policy.compile == "off"
    failed = {event.trial.policy: event.trial.outcome for event in events if isinstance(event, TrialEnded)}
    assert {failed[policy] for policy in graphs_in(events)} == {NO_COMPILER}
    assert {policy.compile for policy in graphs_in(events)} == set(MODES)
    assert max(len(graphs_in(events)), len(evaluator.compiled_behind)) <= 6
    (told,) = [str(finding) for finding in decision.findings if finding.code == "compile-failed"]
    assert "C++ compiler" in told


def test_a_graph_that_lacked_memory_beside_others_is_compiled_once_more_in_its_trial(tmp_path: Path) -> None:
    class Crowded(Behind):
        def compiled(self, wait_s: float = 0.0) -> Mapping[Policy, float | Failure]:
            return dict.fromkeys(super().compiled(wait_s), Failure(kind="oom", message="CUDA out of memory"))

    _, decision, events = searched_behind(
        tmp_path, evaluator=Crowded("resnet50", noise=0.002, graphs_at_once=4), compile_s=20.0
    )
    graphs = [
        event.trial for event in events if isinstance(event, TrialEnded) and event.trial.policy in graphs_in(events)
    ]
    assert graphs
    assert all(isinstance(trial.outcome, Measurement) for trial in graphs)
    assert decision.policy.compile != "off"
