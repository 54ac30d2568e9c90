"""A trial: one policy and what became of it."""

from __future__ import annotations

from dataclasses import dataclass

from amptune.measure.outcome import Measurement, Outcome
from amptune.policy.settings import Policy
from amptune.search.objective import Objective

__all__ = ["TRIAL_NOISE", "Trial", "noise_of"]

# One short trial beside another does not tell a smaller difference: drift alone was seen to be 13 % within 45 s.
# A peak on a GPU is the same in every trial but for the allocator's rounding; on a CPU not quite.
TRIAL_NOISE, TRIAL_NOISE_OF_MEMORY = 0.1, 0.02


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

    @property
    def again_s(self) -> float:
        """What it would cost once more, its graphs lying in a cache by then."""
        startup_s = self.outcome.startup_s if isinstance(self.outcome, Measurement) else 0.0
        return max(0.0, self.seconds - startup_s)


def noise_of(objective: Objective) -> float:
    """What one short trial beside another does not tell: a gain of this share or less may be none."""
    return TRIAL_NOISE_OF_MEMORY if objective.name == "memory" else TRIAL_NOISE
