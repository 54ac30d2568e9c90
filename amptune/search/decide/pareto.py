"""The Pareto set of policies by speed, memory and energy. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from amptune.policy.serialization import policy_to_dict
from amptune.policy.settings import Policy
from amptune.search.gate.judgements import Judgements
from amptune.search.table.trial import Trial
from amptune.search.table.verdict import Verdict

__all__ = ["ParetoPoint", "front_of", "points_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParetoPoint:
    """A policy with its three figures; `judged` is set if the numerics gate passed it or had nothing to judge.

    An energy that was not measured counts as more than any other.
    """

    policy: Policy
    samples_per_s: float
    peak_memory_mib: float
    energy_j_per_sample: float | None = None
    judged: bool = False

    @property
    def costs(self) -> tuple[float, float, float]:
        """The figures as costs: less is better in each."""
        joules = self.energy_j_per_sample
        return -self.samples_per_s, self.peak_memory_mib, math.inf if joules is None else joules

    def dominates(self, other: ParetoPoint) -> bool:
        """Returns True if this point is at least as good in every figure, and better in one."""
        mine, theirs = self.costs, other.costs
        return mine != theirs and all(own <= its for own, its in zip(mine, theirs, strict=True))

    @property
    def figures(self) -> dict[str, float]:
        """The known figures, to four digits."""
        figures = {
            "samples_per_s": self.samples_per_s,
            "peak_memory_mib": self.peak_memory_mib,
            "energy_j_per_sample": self.energy_j_per_sample,
        }
        return {name: float(f"{value:.4g}") for name, value in figures.items() if value is not None}

    def as_dict(self) -> dict[str, Any]:
        """Returns an entry of `evidence.pareto`."""
        return {"policy": policy_to_dict(self.policy), **self.figures, "judged": self.judged}


def points_of(trials: Iterable[Trial], verdict: Verdict, judgements: Judgements) -> tuple[ParetoPoint, ...]:
    """Returns each policy that was tried, never failed and was not rejected by the numerics gate, with its figures."""
    tried = {trial.policy for trial in trials}
    return tuple(
        ParetoPoint(
            policy=one.policy,
            samples_per_s=one.samples_per_s,
            peak_memory_mib=one.peak_memory_mib,
            energy_j_per_sample=one.energy_j_per_sample,
            judged=judgements.passes(one.policy),
        )
        for one in verdict.contenders
        if one.samples_per_s and one.peak_memory_mib and one.policy in tried and not judgements.bars(one.policy)
    )


def front_of(points: Iterable[ParetoPoint]) -> tuple[ParetoPoint, ...]:
    """Returns the points that no other dominates, fastest first; of equal points the first."""
    front: list[ParetoPoint] = []
    for point in sorted(points, key=lambda point: point.costs):  # a dominating point comes earlier
        if not any(other.costs == point.costs or other.dominates(point) for other in front):
            front.append(point)
    return tuple(front)
