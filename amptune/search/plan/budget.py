"""The budget: wall-clock time of the whole command, and optionally a number of trials."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["SHORT_S", "Budget", "Clock"]

# Returns seconds since an arbitrary start; they never go backwards.
Clock = Callable[[], float]

# What the answer rests on is given at least this long, however little of the budget is left.
SHORT_S = 10.0
# Importing torch and building a small model must be possible under the shortest budget.
SHORTEST_PREPARE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A limit of `seconds` after `started`, both by `clock`, and of `trials` new measurements besides comparisons."""

    seconds: float
    trials: int | None = None
    started: float = field(default_factory=time.monotonic)
    clock: Clock = time.monotonic

    @property
    def spent_s(self) -> float:
        return self.clock() - self.started

    @property
    def left_s(self) -> float:
        return self.seconds - self.spent_s

    def trials_left(self, measured: int) -> float:
        """Returns the number of trials that may still be made."""
        return math.inf if self.trials is None else self.trials - measured

    @property
    def left_to_prepare_s(self) -> float:
        """The time limit for building the workload."""
        return max(SHORTEST_PREPARE_S, self.left_s)
