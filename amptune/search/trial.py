"""A trial: one policy and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from amptune.measure.outcome import Measurement, Outcome
from amptune.policy.settings import Policy

__all__ = ["Trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """`number` counts from 0 within a study; `seconds` is what it cost, the failed ones included."""

    number: int
    policy: Policy
    outcome: Outcome
    seconds: float

    @property
    def samples_per_s(self) -> float:
        """0 where it failed: worse than any policy that runs."""
        return self.outcome.samples_per_s if isinstance(self.outcome, Measurement) else 0.0
