"""The Pareto set of policies by speed, memory and energy. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from amptune.search.table.contenders import Contender

__all__ = ["costs_of", "front_of"]


def costs_of(one: Contender) -> tuple[float, float, float]:
    """Returns a policy's figures as costs: less is better in each, and an unknown figure costs more than any other."""
    used = (one.peak_memory_mib, one.energy_j_per_sample)
    mib, joules = (math.inf if figure is None else figure for figure in used)
    return -(one.samples_per_s or 0.0), mib, joules


def front_of(some: Iterable[Contender]) -> tuple[Contender, ...]:
    """Returns those that no other is at least as good as in every figure, fastest first; of equals the first."""
    front: list[Contender] = []
    for one in sorted(some, key=costs_of):  # one that is better in all comes earlier
        if not any(_is_as_good(other, one) for other in front):
            front.append(one)
    return tuple(front)


def _is_as_good(other: Contender, one: Contender) -> bool:
    """Returns True if `other` is no worse in any figure; differences that no figure shows are none."""
    costs = zip(costs_of(other), costs_of(one), strict=True)
    return all(theirs <= own or math.isclose(theirs, own, rel_tol=1e-4) for theirs, own in costs)
