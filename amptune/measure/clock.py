"""Clocks for timing steps: CUDA events on a GPU, where the host runs ahead; a monotonic clock on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from typing import Protocol

import torch

__all__ = ["Clock", "CpuClock", "CudaClock", "clock_for"]


class Clock(Protocol):
    """A clock that times steps back to back and tells the current time."""

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
        ...


class CudaClock:
    """A clock of CUDA events between steps. It synchronises only at the end: the queue stays full, as in training."""

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
    """A clock of `time.perf_counter` around each step. All work is done when the last step returns."""

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
