"""Seconds that pass only when somebody says so."""

from __future__ import annotations

__all__ = ["SimulatedClock"]


class SimulatedClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds
