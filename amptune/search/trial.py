"""A trial: one policy and its outcome."""

from __future__ import annotations

from dataclasses import dataclass

from amptune.measure.results.outcome import Measurement, Outcome
from amptune.policy.settings import Policy
from amptune.search.objective import Objective

__all__ = ["TRIAL_NOISE", "Trial", "noise_of"]

# Two short trials do not show a smaller difference: drift alone reached 13 % within 45 s. On a GPU a peak is equal in
# every trial except for the allocator's rounding; on a CPU not quite.
TRIAL_NOISE, TRIAL_NOISE_OF_MEMORY = 0.1, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One policy's trial; `number` counts from 0 within a study, `seconds` is its cost, also if it failed."""

    number: int
    policy: Policy
    outcome: Outcome
    seconds: float

    @property
    def samples_per_s(self) -> float:
        """Samples per second; 0 if the trial failed, which is worse than any policy that runs."""
        return self.outcome.samples_per_s if isinstance(self.outcome, Measurement) else 0.0

    @property
    def again_s(self) -> float:
        """The seconds it would cost once more, with its graphs in a cache."""
        startup_s = self.outcome.startup_s if isinstance(self.outcome, Measurement) else 0.0
        return max(0.0, self.seconds - startup_s)


def noise_of(objective: Objective) -> float:
    """Returns the gain that two short trials cannot show: a gain of this share or less may be none."""
    return TRIAL_NOISE_OF_MEMORY if objective.name == "memory" else TRIAL_NOISE
