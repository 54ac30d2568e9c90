"""What is to be best: samples per second, peak memory, or energy a sample. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

from amptune.errors import ObjectiveError
from amptune.measure.outcome import Effort, Measurement, Outcome

__all__ = ["OBJECTIVES", "SPEED_SLACK", "THROUGHPUT", "Objective", "ObjectiveName", "Yardstick", "objective_of"]

ObjectiveName = Literal["throughput", "memory", "energy"]
OBJECTIVES: tuple[ObjectiveName, ...] = get_args(ObjectiveName)

# A speed is known to about 1 %: one this much below what is needed is not shown to be too slow.
SPEED_SLACK = 0.01
# Less than this share is not worth a change. Peaks have next to no noise, so that any difference would be shown.
LEAST_MEMORY_GAIN = 0.005
# What is too slow loses this power of its share of the speed needed, down to a share where it is hopeless anyway:
# steep enough that memory does not make up for it, smooth enough for a surrogate to learn.
PENALTY, HOPELESS_SHARE = 6.0, 0.5
# The energy of a block of this length is known to 10 %, whatever its steps take: the counter moves once in 0.1 s.
ENERGY_BLOCK_S, ENERGY_STEPS = 1.0, 5000


@dataclass(frozen=True, slots=True)
class Objective:
    """What a policy is judged by.

    With `memory`, only policies count that reach the share `least_speed` of the baseline's samples per second.
    Raises `ObjectiveError` for a name that is none, or a share that is not above 0.
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
        """Higher is better, and twice as much is twice as good; None where the figure was not measured."""
        return self.score_of(measurement.samples_per_s, measurement.peak_allocated_mib, measurement.energy_j_per_sample)

    def score_of(self, samples_per_s: float, peak_mib: float, joules_per_sample: float | None) -> float | None:
        """The same of these figures: samples per second; or per MiB, or per joule."""
        match self.name:
            case "throughput":
                return samples_per_s
            case "memory":
                return 1 / peak_mib
            case "energy":
                return 1 / joules_per_sample if joules_per_sample else None

    @property
    def needs_speed(self) -> bool:
        """Whether a policy slower than the baseline is no answer, however good its score."""
        return self.name == "memory"

    @property
    def least_gain(self) -> float:
        """A gain of this share or less is none, even where it is shown."""
        return LEAST_MEMORY_GAIN if self.name == "memory" else 0.0

    def effort(self, effort: Effort) -> Effort:
        """What it takes to measure a policy for this objective, where `effort` is enough to know its speed."""
        if self.name != "energy":
            return effort
        seconds = max(ENERGY_BLOCK_S, effort.measure_s)
        return replace(effort, measure_s=seconds, energy_s=seconds, max_steps=max(ENERGY_STEPS, effort.max_steps))

    def allows_speed(self, share: float) -> bool:
        """Whether so many times the samples per second of the baseline are enough, to within what a speed is known."""
        return not self.needs_speed or share >= self.least_speed - SPEED_SLACK


def objective_of(name: str, least_speed: float | None = None) -> Objective:
    """The objective as a user names it. Raises `ObjectiveError`, also for a least speed that would mean nothing."""
    if least_speed is not None and name != "memory":
        raise ObjectiveError(f"the least speed is for the objective memory; {name} has no need of one")
    return Objective(name, 1.0 if least_speed is None else least_speed)  # type: ignore[arg-type]  # checked there


THROUGHPUT = Objective()


@dataclass(frozen=True, slots=True)
class Yardstick:
    """An objective for single trials, and the baseline's, None where that failed or is still to be measured."""

    objective: Objective
    baseline: Measurement | None = None

    def score(self, outcome: Outcome) -> float | None:
        """That of the objective, less where the policy is too slow; None where it failed or the figure is missing."""
        if not isinstance(outcome, Measurement):
            return None
        score = self.objective.score(outcome)
        share = min(1.0, max(HOPELESS_SHARE, self.share_of_needed_speed(outcome)))
        return None if score is None else score * share**PENALTY

    def share_of_needed_speed(self, measurement: Measurement) -> float:
        """1 where no speed is needed, or nothing is known to hold it against."""
        if not self.objective.needs_speed or self.baseline is None:
            return 1.0
        return measurement.samples_per_s / (self.objective.least_speed * self.baseline.samples_per_s)

    def allows(self, outcome: Outcome) -> bool:
        """Whether the policy runs, and is fast enough to be an answer."""
        if not isinstance(outcome, Measurement) or self.baseline is None or not self.objective.needs_speed:
            return isinstance(outcome, Measurement)
        return self.objective.allows_speed(outcome.samples_per_s / self.baseline.samples_per_s)
