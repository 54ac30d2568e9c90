"""Clocks that time steps, and stopwatches that split a loop's time into laps.

On a GPU both use CUDA events, since the host runs ahead of it, and do not wait for it; on a CPU a monotonic clock.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import pairwise
from typing import Any, Literal, Protocol

import torch

__all__ = [
    "FEW_STEPS",
    "Clock",
    "CpuClock",
    "CudaClock",
    "Stopwatch",
    "clock_for",
    "finish",
    "hold_device",
    "stopwatch_for",
]

# So many single steps are enough for a median, and for what only the first steps of a policy do.
FEW_STEPS = 5


class Clock(Protocol):
    """A clock that times steps back to back and tells the current time.

    Of the steps that it times in one call, the first `lead` are slower than in training, where the queue is full: after
    a wait the device is idle until the host has launched something.
    """

    lead: int

    def time_steps(
        self, step: Callable[[], object], count: int, while_busy: Callable[[], object] = lambda: None
    ) -> list[float]:
        """Runs `step` `count` times and returns each step's time in ms, from the end of the step before it.

        `while_busy` is called once, after the last step was given to the device and before waiting for it. It can
        therefore read a GPU's sensors while the GPU is busy. It must not use the device itself.
        """
        ...

    def now_s(self) -> float:
        """Returns seconds on a monotonic clock with an arbitrary zero."""
        return time.perf_counter()


class CudaClock(Clock):
    """A clock of CUDA events between steps. It synchronises only at the end: the queue stays full, as in training.

    The first step waits for the host: with recorded graphs it took up to 18 % longer (reports/h100/first_steps.jsonl).
    """

    lead = 1

    def time_steps(
        self, step: Callable[[], object], count: int, while_busy: Callable[[], object] = lambda: None
    ) -> list[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        while_busy()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in pairwise(marks)]


class CpuClock(Clock):
    """A clock of `time.perf_counter` around each step. All work is done when the last step returns."""

    lead = 0

    def time_steps(
        self, step: Callable[[], object], count: int, while_busy: Callable[[], object] = lambda: None
    ) -> list[float]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            step()
            times.append(1000 * (time.perf_counter() - start))
        while_busy()
        return times


def clock_for(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else CpuClock()


Lap = Literal["wait", "step"]

# How many laps the host may be ahead of the device: 8 batches of 2 laps. With more, a step of few launches (a CUDA
# graph) would run seconds past the end and keep that many batches in pinned memory. With fewer, the queue would drain.
_AHEAD = 16
# Clock cycles per ms at about the fastest existing GPU clock (2 GHz): a slower GPU is held longer.
_CYCLES_PER_MS = 2_000_000


class Stopwatch(Protocol):
    """A sum of laps of each kind. A mark ends one lap and begins the next."""

    def reset(self) -> None:
        """Waits for the device, then begins the first lap."""
        ...

    def mark(self, lap: Lap) -> None:
        """Marks the end of this lap in the device's queue."""
        ...

    def totals_ms(self) -> dict[Lap, float]:
        """Waits for the device; returns the sums of the laps since `reset`, in ms."""
        ...


class CudaStopwatch:
    """A stopwatch of CUDA events, read long after they were recorded."""

    def __init__(self) -> None:
        self._marks: deque[tuple[Lap, Any]] = deque()
        self._totals_ms: dict[Lap, float] = defaultdict(float)

    def reset(self) -> None:
        torch.cuda.synchronize()
        self._marks.clear()
        self._totals_ms = defaultdict(float)
        self.mark("step")

    def mark(self, lap: Lap) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has not typed it
        event.record()
        self._marks.append((lap, event))
        if len(self._marks) > _AHEAD:
            self._read_oldest()

    def totals_ms(self) -> dict[Lap, float]:
        while len(self._marks) > 1:
            self._read_oldest()
        torch.cuda.synchronize()  # waits for other streams too
        return self._totals_ms

    def _read_oldest(self) -> None:
        _, start = self._marks.popleft()
        lap, end = self._marks[0]
        end.synchronize()
        self._totals_ms[lap] += start.elapsed_time(end)


class CpuStopwatch:
    """A stopwatch on `time.perf_counter`: on a CPU the work is done when the call returns."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._totals_ms: dict[Lap, float] = defaultdict(float)
        self._last_s = time.perf_counter()

    def mark(self, lap: Lap) -> None:
        now_s = time.perf_counter()
        self._totals_ms[lap] += 1000 * (now_s - self._last_s)
        self._last_s = now_s

    def totals_ms(self) -> dict[Lap, float]:
        return self._totals_ms


def hold_device(ms: float) -> None:
    """Keeps the GPU busy for about `ms` before the next queued work, so that the host can run ahead."""
    torch.cuda._sleep(int(ms * _CYCLES_PER_MS))  # type: ignore[no-untyped-call]  # torch's tests' own


def finish(device: torch.device) -> None:
    """Waits until the device has done all its work; a CPU's is done when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stopwatch_for(device: torch.device) -> Stopwatch:
    return CudaStopwatch() if device.type == "cuda" else CpuStopwatch()
