"""What a graph took that was paused while others were timed, and when its limit is over."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from amptune.measure.bench.stillness import Pause
from amptune.measure.results.outcome import Failure, Measurement, Outcome
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
        return Pending(self, self.future, limit_s, 0)

    def stop(self) -> None:
        self.stopped = True


def compiled_in(startup_s: float) -> Measurement:
    return Measurement(
        samples_per_step=1,
        step_ms=(1.0,),
        warmup_s=0.0,
        warmup_steps=1,
        peak_allocated_mib=1.0,
        peak_reserved_mib=1.0,
        losses=(1.0,),
        startup_s=startup_s,
    )


def graph(limit_s: float = 1000.0) -> tuple[BackgroundGraph, ScriptedProcess]:
    process = ScriptedProcess()
    return BackgroundGraph(process, Policy(compile="default"), 1, limit_s), process


def came(outcome: Outcome | None, *ago: tuple[float, float]) -> float | Failure | None:
    """The result of a graph with pauses between so many seconds ago."""
    one, process = graph()
    now_s = time.monotonic()
    one.pauses += [Pause(from_s=now_s - begun, until_s=now_s - ended) for begun, ended in ago]
    process.future.set_result(outcome)
    return one.result()


def test_a_graph_that_still_compiles_has_no_result() -> None:
    one, process = graph()
    assert one.result() is None
    assert process.limit_s is None  # the graph itself keeps it


def test_pauses_do_not_count_for_what_compiling_took() -> None:
    assert came(compiled_in(30.0)) == 30.0
    assert came(compiled_in(30.0), (20.0, 18.0), (10.0, 9.5)) == pytest.approx(27.5, abs=0.1)


def test_a_pause_before_it_compiled_does_not_shorten_that() -> None:
    """The worker imports and builds before."""
    assert came(compiled_in(30.0), (40.0, 38.0)) == 30.0


def test_a_failure_comes_as_it_is_and_nothing_to_compile_took_no_time() -> None:
    failure = Failure(kind="error", message="no compiler")
    assert came(failure, (2.0, 1.0)) == failure
    assert came(None) == 0.0


def test_pauses_do_not_count_for_the_limit() -> None:
    now_s = time.monotonic()
    one, process = graph(limit_s=0.0)
    one.pauses.append(Pause(from_s=now_s, until_s=math.inf))
    time.sleep(0.01)
    assert one._left_s > -0.01
    one.pauses.clear()
    failure = one.result()
    assert isinstance(failure, Failure)
    assert failure.message.startswith("no answer within 0 s: ")
    assert process.stopped


def test_waiting_ends_when_a_graph_is_past_its_limit() -> None:
    one, _ = graph(limit_s=0.05)
    BackgroundGraph.wait_for_one([one, graph()[0]], 600.0)
    assert isinstance(one.result(), Failure)
