"""Predicts the memory of a batch size from earlier runs. Pure.

Peak memory is modelled as a fixed part plus a part per sample. Real GPUs distort that line in four ways: workspaces
come and go with the size, the allocator reserves more than is in use, small batches have their peak in the optimizer
step, and convolution workspaces are released if memory is short.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from amptune.measure.results.outcome import Outcome
from amptune.policy.setting_effects import memory_of, takes_workspaces, tensors_of
from amptune.policy.settings import Policy
from amptune.search.batch_size.memory_fit import CLEARLY, Fit, fit_of
from amptune.search.batch_size.memory_runs import FixedPart, Line, Observation, line_through, observation_of

__all__ = ["MemoryModel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryModel:
    """All that is known of memory, by arm: the settings that it depends on. One process may allocate `limit_mib`."""

    limit_mib: float
    fixed: FixedPart = field(default_factory=FixedPart)
    seen: Mapping[Policy, tuple[Observation, ...]] = field(default_factory=dict)

    def with_outcome(self, policy: Policy, batch_size: int, outcome: Outcome) -> MemoryModel:
        """Returns a model that includes the outcome; the later of two at one batch size counts."""
        new = observation_of(batch_size, outcome)
        if new is None:
            return self
        arm = memory_of(policy)
        others = tuple(one for one in self.seen.get(arm, ()) if one.batch_size != batch_size)
        return replace(self, seen={**self.seen, arm: (*others, new)})

    def with_outcomes(self, outcomes: Iterable[tuple[Policy, int, Outcome]]) -> MemoryModel:
        """Returns a model that includes several outcomes, given as (policy, batch size, outcome)."""
        model = self
        for policy, batch_size, outcome in outcomes:
            model = model.with_outcome(policy, batch_size, outcome)
        return model

    def fit(self, policy: Policy) -> Fit | None:
        """Returns the fit of the policy's arm, supported by other arms; None if none of its runs succeeded."""
        arm = memory_of(policy)
        others = {other: points for other in self.seen if other != arm and (points := self._free(other))}
        like = [line_through(points) for other, points in others.items() if len(points) > 1]
        floors = [self._floor(points) for other, points in others.items() if tensors_of(other) == tensors_of(arm)]
        fit = fit_of(
            self.seen.get(arm, ()),
            self.limit_mib,
            self.fixed,
            like=like[0] if like else None,
            floor=min(floors, key=lambda line: line.per_sample_mib, default=None),
        )
        return fit and replace(fit, may_give_more=takes_workspaces(policy) and not floors)

    def predicts_oom(self, policy: Policy, batch_size: int) -> bool:
        """Returns True if `batch_size` samples clearly do not fit and a run would be wasted."""
        fit = self.fit(policy)
        if fit is None:
            seen = self.seen.get(memory_of(policy), ())
            return any(batch_size >= CLEARLY * one.batch_size for one in seen)
        if fit.smallest_failed is not None and batch_size >= CLEARLY * fit.smallest_failed:
            return True
        return batch_size > fit.largest_run and fit.least_mib(batch_size) > CLEARLY * self.limit_mib

    def _free(self, arm: Policy) -> list[tuple[int, float]]:
        """Returns (batch size, allocated MiB) of an arm's runs without allocator retries."""
        return [(one.batch_size, one.allocated_mib) for one in self.seen[arm] if one.ran and not one.alloc_retries]

    def _floor(self, points: Sequence[tuple[int, float]]) -> Line:
        """Fits a line; with a single point, assumes the middle of the fixed part's bounds."""
        if len(points) > 1:
            return line_through(points)
        ((n, mib),) = points
        most_mib = self.fixed.most_mib if math.isfinite(self.fixed.most_mib) else self.fixed.least_mib
        fixed_mib = min(self.fixed.least_mib + most_mib, mib) / 2
        return Line(fixed_mib=fixed_mib, per_sample_mib=(mib - fixed_mib) / n)
