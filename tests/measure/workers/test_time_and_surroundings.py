"""What all workers of an evaluator share: the time of a trial, and what is known of the machine around them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from measurements import took

from amptune.measure import evaluator as evaluator_module
from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import Effort, Failure, Measurement
from amptune.measure.workers import cpu_share, processes, worker
from amptune.measure.workers.processes import Pending, WorkerProcess
from amptune.measure.workers.source import Source
from amptune.measure.workers.worker import Reply
from amptune.policy.settings import STOCK


class Clock:
    """Stands for the `time` module: its time passes where a test says so."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (evaluator_module, processes):
        monkeypatch.setattr(module, "time", clock)
    return clock


Answer = Callable[[float], Any]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What every worker is asked last; each answers with `answer`, which is given its limit."""
    last: dict[str, Any] = {"answer": lambda _: Reply(outcome=took())}

    def call(_: WorkerProcess, limit_s: float, task: Callable[..., Any], *arguments: Any) -> Any:
        last.update(limit_s=limit_s, task=task, arguments=arguments)
        return last["answer"](limit_s)

    monkeypatch.setattr(WorkerProcess, "call", call)
    return last


@pytest.fixture
def evaluator(monkeypatch: pytest.MonkeyPatch) -> WorkerEvaluator:
    monkeypatch.setattr(WorkerEvaluator, "_stop_others", lambda *_: True)
    return WorkerEvaluator(Source(target="target"), "cpu", Path("log"))


@pytest.mark.parametrize("took_s", [30.0, 50.0])
def test_a_trial_that_is_repeated_with_more_memory_has_the_time_that_is_left(
    evaluator: WorkerEvaluator, asked: dict[str, Any], clock: Clock, took_s: float
) -> None:
    limits: list[float] = []

    def short_of_memory_first(limit_s: float) -> Reply:
        limits.append(limit_s)
        clock.now_s += took_s
        return Reply(outcome=Failure(kind="oom", message="") if len(limits) == 1 else took())

    asked["answer"] = short_of_memory_first
    outcome = evaluator.measure(STOCK, Effort(time_limit_s=50.0))
    assert limits == [50.0, 20.0][: len(limits)]
    assert isinstance(outcome, Measurement) == (took_s < 50.0)


@pytest.mark.parametrize(
    ("device", "gpus", "cores", "begun"),
    [("cpu", 8, 16, 0), (None, 0, 16, 0), (None, 1, 3, 0), (None, 1, 4, 1), ("cuda:0", 1, 16, 2), (None, None, 16, 2)],
)
def test_processes_build_ahead_only_where_they_are_to_compile_and_with_less_than_all_threads(
    evaluator: WorkerEvaluator,
    monkeypatch: pytest.MonkeyPatch,
    device: str | None,
    gpus: int | None,
    cores: int,
    begun: int,
) -> None:
    tasks: list[tuple[Any, ...]] = []
    monkeypatch.setattr(WorkerProcess, "begin", lambda _, __, *task: tasks.append(task))
    monkeypatch.setattr(cpu_share, "cores", lambda: cores)
    monkeypatch.setattr(evaluator_module, "cores", lambda: cores)
    monkeypatch.setattr(evaluator_module, "gpu_count", lambda: gpus)
    evaluator.device = device
    evaluator.build_ahead(2)
    building = [task[1:] for task in tasks if task[0] is worker.get_ready]
    assert len(building) == begun
    assert all(policy == STOCK and among >= 2 for policy, among in building)


def test_the_start_of_a_process_and_what_it_did_before_count_for_the_limit(clock: Clock) -> None:
    process, waits = Mock(), list[float | None]()
    future: Future[None] = Future()
    pending = Pending(process, future, 50.0)
    clock.now_s += 40.0  # it still starts
    monkeypatched: Any = future
    monkeypatched.result = lambda timeout: waits.append(timeout)
    pending.answer()
    assert waits == [10.0]
