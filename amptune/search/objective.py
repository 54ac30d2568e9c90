"""What is to be best: samples per second, peak memory, or energy a sample. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from amptune.measure.outcome import Measurement

__all__ = ["THROUGHPUT", "Objective", "ObjectiveName"]

ObjectiveName = Literal["throughput", "memory", "energy"]


@dataclass(frozen=True, slots=True)
class Objective:
    """What a policy is judged by.

    With `memory`, only policies count that reach the share `least_speed` of the baseline's samples per second.
    """

    name: ObjectiveName = "throughput"
    least_speed: float = 1.0

    def score(self, measurement: Measurement) -> float | None:
        """Higher is better, and twice as much is twice as good; None where the figure was not measured.

        Samples per second; or per MiB, or per joule.
        """
        match self.name:
            case "throughput":
                return measurement.samples_per_s
            case "memory":
                return 1 / measurement.peak_allocated_mib
            case "energy":
                return 1 / measurement.energy_j_per_sample if measurement.energy_j_per_sample else None

    @property
    def needs_speed(self) -> bool:
        """Whether a policy slower than the baseline is no answer, however good its score."""
        return self.name == "memory"


THROUGHPUT = Objective()
