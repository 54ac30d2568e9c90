"""What a graph took that was paused while others were timed, and when its limit is over."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any
from unittest.mock import Mock

import pytest
from measurements import took

from amptune.measure.bench.stillness import Pause
from amptune.measure.results.outcome import Failure, Outcome
from amptune.measure.workers import background_graph, processes
from amptune.measure.workers.background_graph import BackgroundGraph
from amptune.measure.workers.processes import Pending
from amptune.policy.settings import Policy


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


def graph(limit_s: float = 1000.0) -> tuple[BackgroundGraph, Mock, Future[Any]]:
    """It compiles in a worker that answers when it is told to."""
    process, future = Mock(), Future[Any]()
    process.begin = Mock(side_effect=lambda limit_s, *_: Pending(process, future, limit_s))
    return BackgroundGraph(process, Policy(compile="default"), 1, limit_s), process, future


BROKEN = Failure(kind="error", message="no compiler")


@pytest.mark.parametrize(
    ("outcome", "pauses_ago", "result"),
    [
        (took(startup_s=30.0), [], 30.0),
        (took(startup_s=30.0), [(20.0, 18.0), (10.0, 9.5)], 27.5),
        (took(startup_s=30.0), [(40.0, 38.0)], 30.0),  # before it compiled: the worker imports and builds then
        (BROKEN, [(2.0, 1.0)], BROKEN),
        (None, [], 0.0),  # there was nothing to compile
    ],
)
def test_pauses_do_not_count_for_what_compiling_took(
    clock: Clock, outcome: Outcome | None, pauses_ago: list[tuple[float, float]], result: float | Failure
) -> None:
    one, process, future = graph()
    assert one.result() is None
    assert process.begin.call_args.args[0] is None  # the graph itself keeps its limit
    one.pauses += [Pause(from_s=clock.now_s - a, until_s=clock.now_s - b) for a, b in pauses_ago]
    future.set_result(outcome)
    assert one.result() == result


def test_pauses_do_not_count_for_the_limit(clock: Clock) -> None:
    one, process, _ = graph(limit_s=50.0)
    one.pauses.append(Pause(from_s=clock.now_s + 10, until_s=clock.now_s + 15))
    clock.now_s += 54
    assert one.result() is None
    clock.now_s += 1
    failure = one.result()
    assert isinstance(failure, Failure)
    assert failure.message.startswith("no answer within 50 s: ")
    process.stop.assert_called()


def test_waiting_ends_when_a_graph_is_past_its_limit(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(Pending, "wait_for_one", lambda _, limit_s: waits.append(limit_s))
    graphs = [graph(limit_s=50.0)[0], graph()[0]]
    for passed_s in (0.0, 30.0, 30.0):
        clock.now_s += passed_s
        BackgroundGraph.wait_for_one(graphs, 40.0)
    assert waits == [40.0, 20.0, 0.0]
