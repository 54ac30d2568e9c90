"""Memory observed in runs, and the line through the observations. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from amptune.measure.results.outcome import Measurement, Outcome

__all__ = ["FixedPart", "Line", "Observation", "line_through", "observation_of"]

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One run at one batch size; infinite peaks mean that it ran out of memory."""

    batch_size: int
    allocated_mib: float = math.inf
    reserved_mib: float = math.inf
    alloc_retries: int = 0

    @property
    def ran(self) -> bool:
        return math.isfinite(self.allocated_mib)

    def fits(self, limit_mib: float) -> bool:
        """Returns True if the run stayed within the limit. If nothing enforces a limit, a run may exceed it."""
        return self.reserved_mib <= limit_mib


def observation_of(batch_size: int, outcome: Outcome) -> Observation | None:
    """Returns the memory that an outcome shows, or None for a failure that tells nothing about it."""
    if isinstance(outcome, Measurement):
        return Observation(
            batch_size=batch_size,
            allocated_mib=outcome.peak_allocated_mib,
            reserved_mib=outcome.peak_reserved_mib,
            alloc_retries=outcome.alloc_retries,
        )
    return Observation(batch_size=batch_size) if outcome.kind == "oom" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPart:
    """Bounds of the memory held at any batch size, in MiB; the default bounds mean that nothing is known.

    Memory of an arm above `most_mib` counts as workspaces, which may be released.
    """

    least_mib: float = 0.0
    most_mib: float = math.inf

    @staticmethod
    def of_weights(parameters: int) -> FixedPart:
        """Returns the bounds for FP32 weights: the weights; and those with gradients, two moments and temporaries.

        A large batch has its peak where the backward pass begins; the last step's gradients are freed by then.
        `foreach` optimizers hold up to two temporaries of all parameters.
        """
        weights_mib = 4 * parameters / _MIB
        return FixedPart(least_mib=weights_mib, most_mib=6 * weights_mib)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """Memory as a fixed part and a part for each sample, in MiB."""

    fixed_mib: float
    per_sample_mib: float

    def at(self, n: int) -> float:
        return self.fixed_mib + self.per_sample_mib * n


def line_through(points: Sequence[tuple[int, float]]) -> Line:
    """Fits a line by least squares; the sizes must differ."""
    mean_n = sum(n for n, _ in points) / len(points)
    mean_mib = sum(mib for _, mib in points) / len(points)
    spread = sum((n - mean_n) ** 2 for n, _ in points)
    slope = sum((n - mean_n) * (mib - mean_mib) for n, mib in points) / spread
    return Line(fixed_mib=mean_mib - slope * mean_n, per_sample_mib=slope)
