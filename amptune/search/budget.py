"""The budget: wall-clock time of the whole command, and optionally a number of trials."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["Budget"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """`seconds` from `started` (a reading of `time.monotonic`); `trials` are new measurements, finals aside."""

    seconds: float
    trials: int | None = None
    started: float = field(default_factory=time.monotonic)

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.started

    @property
    def left_s(self) -> float:
        return self.seconds - self.spent_s
