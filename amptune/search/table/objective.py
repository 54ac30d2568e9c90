"""Objectives of tuning: samples per second, peak memory, or energy per sample. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from amptune.errors import ObjectiveError
from amptune.measure.results.outcome import Effort, Measurement, Outcome

__all__ = [
    "KNOWN_TO",
    "NEGLIGIBLE",
    "OBJECTIVES",
    "THROUGHPUT",
    "Objective",
    "ObjectiveName",
    "Yardstick",
    "objective_of",
]

ObjectiveName = Literal["throughput", "memory", "energy"]
OBJECTIVES: tuple[ObjectiveName, ...] = get_args(ObjectiveName)

# To know a figure to this share is enough: a speed that is as little below the needed one is not shown to be too slow,
# and an interval as narrow (half its width) needs no further rows.
KNOWN_TO = 0.01
# To a user, two policies that differ by at most this share are equal, and the simpler one wins.
NEGLIGIBLE = 0.005
# A too slow policy's score is multiplied by its share of the needed speed to this power; the share counts as no less
# than HOPELESS_SHARE. So memory does not make up for slowness, and the score is smooth enough for a surrogate to learn.
PENALTY, HOPELESS_SHARE = 6.0, 0.5
# A block of this length gives the energy to 10 %, however long a step is: the counter moves once in 0.1 s.
ENERGY_BLOCK_S, ENERGY_STEPS = 1.0, 5000


@dataclass(frozen=True, slots=True)
class Objective:
    """A goal that policies are compared by.

    With `memory`, a policy counts only if it reaches the share `least_speed` of the baseline's samples per second.
    Raises `ObjectiveError` for an unknown name or a share that is not above 0.
    """

    name: ObjectiveName = "throughput"
    least_speed: float = 1.0

    def __post_init__(self) -> None:
        if self.name not in OBJECTIVES:
            raise ObjectiveError(f"the objective is one of {', '.join(OBJECTIVES)}, not {self.name!r}")
        if not 0 < self.least_speed < math.inf:
            raise ObjectiveError(
                f"the least speed is a share of the baseline's above 0, such as 0.9, not {self.least_speed}"
            )

    def score(self, measurement: Measurement) -> float | None:
        """Returns the score (higher is better, twice as much is twice as good); None if the figure was not measured."""
        return self.score_of(measurement.samples_per_s, measurement.peak_allocated_mib, measurement.energy_j_per_sample)

    def score_of(self, samples_per_s: float, peak_mib: float, joules_per_sample: float | None) -> float | None:
        """Returns the score of these figures: samples per second, 1 / MiB, or samples per joule."""
        match self.name:
            case "throughput":
                return samples_per_s
            case "memory":
                return 1 / peak_mib
            case "energy":
                return 1 / joules_per_sample if joules_per_sample else None

    @property
    def needs_speed(self) -> bool:
        """True if a policy that is too slow against the baseline cannot win, however good its score."""
        return self.name == "memory"

    @property
    def least_gain(self) -> float:
        """The largest gain that counts as none, even if it is shown."""
        return NEGLIGIBLE if self.name == "memory" else 0.0

    def effort(self, effort: Effort) -> Effort:
        """Returns the effort to measure a policy for this objective; `effort` is enough to know its speed."""
        if self.name != "energy":
            return effort
        seconds = max(ENERGY_BLOCK_S, effort.measure_s)
        return replace(effort, measure_s=seconds, energy_s=seconds, max_steps=max(ENERGY_STEPS, effort.max_steps))

    def allows_speed(self, share: float) -> bool:
        """Returns True if this share of the baseline's samples per second is enough, within a speed's accuracy."""
        return not self.needs_speed or share >= self.least_speed - KNOWN_TO


def objective_of(name: str, least_speed: float | None = None) -> Objective:
    """Returns the objective that a user names. Raises `ObjectiveError`, also for what does not apply to it."""
    if least_speed is not None and name != "memory":
        raise ObjectiveError(f"the least speed is for the objective memory; {name} has no need of one")
    return Objective(name, 1.0 if least_speed is None else least_speed)  # type: ignore[arg-type]  # checked there


THROUGHPUT = Objective()


@dataclass(frozen=True, slots=True)
class Yardstick:
    """An objective that scores single trials; `baseline` is None if that failed or is not measured yet."""

    objective: Objective
    baseline: Measurement | None = None

    def score(self, outcome: Outcome) -> float | None:
        """Returns the objective's score, lowered if the policy is too slow; None if it failed or has no such figure."""
        if not isinstance(outcome, Measurement):
            return None
        score = self.objective.score(outcome)
        share = min(1.0, max(HOPELESS_SHARE, self.share_of_needed_speed(outcome)))
        return None if score is None else score * share**PENALTY

    def share_of_needed_speed(self, measurement: Measurement) -> float:
        """Returns the speed over the needed one; 1 if no speed is needed or the baseline's is unknown."""
        if not self.objective.needs_speed or self.baseline is None:
            return 1.0
        return measurement.samples_per_s / (self.objective.least_speed * self.baseline.samples_per_s)

    def allows(self, outcome: Outcome) -> bool:
        """Returns True if the policy runs and is fast enough to win."""
        if not isinstance(outcome, Measurement) or self.baseline is None or not self.objective.needs_speed:
            return isinstance(outcome, Measurement)
        return self.objective.allows_speed(outcome.samples_per_s / self.baseline.samples_per_s)
