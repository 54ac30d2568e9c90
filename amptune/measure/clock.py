"""Timing steps: CUDA events on a GPU, where the host runs ahead of the work; a monotonic clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch

__all__ = ["Clock", "CpuClock", "CudaClock", "clock_for"]


class Clock(Protocol):
    """Times steps back to back, and says what time it is."""

    def time_steps(
        self, step: Callable[[], object], count: int, while_busy: Callable[[], object] = lambda: None
    ) -> list[float]:
        """Runs `step` `count` times and returns each step's time in ms, from the end of the step before it.

        `while_busy` is called once, when the last step was given to the device and before waiting for it: what it
        reads of a GPU is read of a GPU at work. It must not use the device itself.
        """
        ...

    def now_s(self) -> float:
        """Seconds on a clock that never goes back, from an arbitrary zero."""
        ...


class CudaClock:
    """Events between the steps, one synchronisation at the end: the queue stays full, as in training."""

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

    def now_s(self) -> float:
        return time.perf_counter()


class CpuClock:
    """`time.perf_counter` around each step. Nothing is left to wait for when the last step returns."""

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

    def now_s(self) -> float:
        return time.perf_counter()


def clock_for(device: torch.device) -> Clock:
    return CudaClock() if device.type == "cuda" else CpuClock()
