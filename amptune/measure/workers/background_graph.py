"""A graph that compiles in a worker process of its own, while policies are measured in others."""

from __future__ import annotations

import time
from collections.abc import Collection

from amptune.measure.bench.stillness import Pause
from amptune.measure.results.outcome import Failure, Measurement
from amptune.measure.workers import worker
from amptune.measure.workers.processes import Pending, WorkerProcess
from amptune.policy.settings import Policy

__all__ = ["BackgroundGraph"]


class BackgroundGraph:
    """A policy's graph that compiles in `process`, one of `at_once`, within `limit_s` seconds.

    `pauses`, in which the process stood still, count neither for that limit nor for what compiling took.
    """

    def __init__(self, process: WorkerProcess, policy: Policy, at_once: int, limit_s: float) -> None:
        self.process = process
        self.pauses: list[Pause] = []
        self._limit_s = limit_s
        self._begun_s = time.monotonic()
        # pebble cannot extend a limit by pauses that come later
        self._pending = process.begin(None, worker.get_ready, policy, at_once)

    def result(self) -> float | Failure | None:
        """Returns the seconds that compiling took, or its failure; None while it goes on. Ends it past its limit."""
        if self._pending.has_come:
            outcome = self._pending.answer()
            return self._seconds(outcome.startup_s) if isinstance(outcome, Measurement) else outcome or 0.0
        return self._pending.give_up(self._limit_s) if self._left_s <= 0 else None

    @staticmethod
    def wait_for_one(graphs: Collection[BackgroundGraph], limit_s: float) -> None:
        """Waits until one of them has come or is past its limit, or for `limit_s` seconds."""
        wait_s = min(limit_s, *(max(0.0, graph._left_s) for graph in graphs))
        Pending.wait_for_one([graph._pending for graph in graphs], wait_s)

    @property
    def _left_s(self) -> float:
        now_s = time.monotonic()
        return self._limit_s - (now_s - self._begun_s - self._paused_s(self._begun_s, now_s))

    def _seconds(self, startup_s: float) -> float:
        """Returns the time of the first steps, which came last, without pauses."""
        came_s = min(self._pending.came_s, time.monotonic())  # pebble's thread may be about to set it
        return max(0.0, startup_s - self._paused_s(came_s - startup_s, came_s))

    def _paused_s(self, from_s: float, until_s: float) -> float:
        return sum(pause.within(from_s, until_s) for pause in self.pauses)
