"""What a graph took that was paused while others were timed, and when its limit is over."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from amptune.measure.bench.stillness import Pause
from amptune.measure.results.outcome import Failure, Measurement, Outcome
from amptune.measure.workers import background_graph, processes
from amptune.measure.workers.background_graph import BackgroundGraph
from amptune.measure.workers.processes import Pending, WorkerProcess
from amptune.measure.workers.setting import Setting
from amptune.measure.workers.source import Source
from amptune.policy.settings import Policy


class ScriptedProcess(WorkerProcess):
    """A worker that answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(Setting(source=Source(), device="cpu", log=Path("log")))
        self.future: Future[Any] = Future()
        self.limit_s: float | None = 0.0
        self.stopped = False

    def begin(self, limit_s: float | None, function: Callable[..., Any], *_: Any, **__: Any) -> Pending[Any]:  # noqa: ARG002
        self.limit_s = limit_s
        return Pending(self, self.future, Future(), limit_s)

    def stop(self) -> None:
        self.stopped = True


class Clock:
    """Stands for the `time` module: its time passes where a test says so."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (background_graph, processes):
        monkeypatch.setattr(module, "time", clock)
    return clock


def compiled_in(startup_s: float) -> Measurement:
    figures: dict[str, Any] = {
        "peak_allocated_mib": 1.0,
        "peak_reserved_mib": 1.0,
        "warmup_s": 0.0,
        "startup_s": startup_s,
    }
    return Measurement(samples_per_step=1, step_ms=(1.0,), losses=(1.0,), warmup_steps=1, **figures)


def graph(limit_s: float = 1000.0) -> tuple[BackgroundGraph, ScriptedProcess]:
    process = ScriptedProcess()
    return BackgroundGraph(process, Policy(compile="default"), 1, limit_s), process


BROKEN = Failure(kind="error", message="no compiler")


@pytest.mark.parametrize(
    ("outcome", "pauses_ago", "result"),
    [
        (compiled_in(30.0), [], 30.0),
        (compiled_in(30.0), [(20.0, 18.0), (10.0, 9.5)], 27.5),
        (compiled_in(30.0), [(40.0, 38.0)], 30.0),  # before it compiled: the worker imports and builds then
        (BROKEN, [(2.0, 1.0)], BROKEN),
        (None, [], 0.0),  # there was nothing to compile
    ],
)
def test_pauses_do_not_count_for_what_compiling_took(
    clock: Clock, outcome: Outcome | None, pauses_ago: list[tuple[float, float]], result: float | Failure
) -> None:
    one, process = graph()
    assert one.result() is None
    assert process.limit_s is None  # the graph itself keeps it
    one.pauses += [Pause(from_s=clock.now_s - a, until_s=clock.now_s - b) for a, b in pauses_ago]
    process.future.set_result(outcome)
    assert one.result() == result


def test_pauses_do_not_count_for_the_limit(clock: Clock) -> None:
    one, process = graph(limit_s=50.0)
    one.pauses.append(Pause(from_s=clock.now_s + 10, until_s=clock.now_s + 15))
    clock.now_s += 54
    assert one.result() is None
    clock.now_s += 1
    failure = one.result()
    assert isinstance(failure, Failure)
    assert failure.message.startswith("no answer within 50 s: ")
    assert process.stopped


def test_waiting_ends_when_a_graph_is_past_its_limit(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(Pending, "wait_for_one", lambda _, limit_s: waits.append(limit_s))
    graphs = [graph(limit_s=50.0)[0], graph()[0]]
    for passed_s in (0.0, 30.0, 30.0):
        clock.now_s += passed_s
        BackgroundGraph.wait_for_one(graphs, 40.0)
    assert waits == [40.0, 20.0, 0.0]
