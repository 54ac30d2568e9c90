"""Which point of a space to measure next: the one that promises the most for the time it takes. Pure."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from amptune.search.space import Knob, Point, Value
from amptune.search.surrogate import Belief, Floats, Surrogate

__all__ = ["Proposal", "Proposer", "Seen"]

Strings = NDArray[np.str_]
Codes = NDArray[np.int64]

# These make a trial dear: plans to be timed, graphs to be compiled.
DEAR_KNOBS = ("compile", "cudnn_benchmark")
# An infeasible point counts as this share of the slowest: bad, and its neighbours suspect.
INFEASIBLE_SHARE = 0.7
# So many standard deviations below what was expected surprise, but no less than this (on the logarithm) does.
SURPRISING, LEAST_SURPRISE = 2.0, 0.07


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """What a trial of a point gave: samples per second (None where it failed), and the seconds it cost."""

    speed: float | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A point by its index; `gain` is the improvement expected over the best, on the logarithm of the speed.

    A measurement below `least` samples per second would be a surprise: an outlier, or a wrong expectation.
    """

    index: int
    gain: float
    least: float = 0.0


class Proposer:
    """Proposes points of one space that were not seen."""

    def __init__(self, knobs: Sequence[Knob], points: Sequence[Point], *, seed: int) -> None:
        self._surrogate = Surrogate(knobs, points)
        self._values = {knob.name: np.array([str(point[knob.name]) for point in points]) for knob in knobs}
        self._kinds = _kinds([values for name, values in self._values.items() if name in DEAR_KNOBS], len(points))
        self._random = random.Random(seed)  # noqa: S311  # a choice of what to measure, no secret

    def next(self, seen: Mapping[int, Seen], fixed: Mapping[str, Value]) -> Proposal | None:
        """What promises the most improvement a second; None where every point with the `fixed` values was seen."""
        free = self._free(seen, fixed)
        if not free.any():
            return None
        belief = self.belief(seen)
        if belief is None:
            return Proposal(index=self._random.choice(np.flatnonzero(free).tolist()), gain=math.inf)
        feasible = [index for index, one in seen.items() if one.speed is not None]
        gain = np.where(free, belief.improvement(float(belief.mean[feasible].max())), -1.0)
        chosen = int((gain / self._seconds(seen)).argmax())
        surprise = max(SURPRISING * float(belief.deviation[chosen]), LEAST_SURPRISE)
        least = math.exp(float(belief.mean[chosen]) - surprise)
        return Proposal(index=chosen, gain=float(gain.max()), least=least)

    def belief(self, seen: Mapping[int, Seen]) -> Belief | None:
        """What to believe of every point; None where too little was seen to believe anything."""
        speeds = {index: one.speed for index, one in seen.items() if one.speed is not None}
        if len(speeds) < 2:
            return None
        bad = INFEASIBLE_SHARE * min(speeds.values())
        return self._surrogate.belief({index: math.log(speeds.get(index, bad)) for index in seen})

    def _free(self, seen: Mapping[int, Seen], fixed: Mapping[str, Value]) -> NDArray[np.bool_]:
        free = np.ones(self._surrogate.size, dtype=bool)
        free[list(seen)] = False
        for name, value in fixed.items():
            free &= self._values[name] == str(value)
        return free

    def _seconds(self, seen: Mapping[int, Seen]) -> Floats:
        """What a trial of each point will cost, by those with the same dear settings; the mean where there are none."""
        costs: dict[int, list[float]] = defaultdict(list)
        for index, one in seen.items():
            costs[int(self._kinds[index])].append(one.seconds)
        seconds = np.full(self._surrogate.size, fmean(one.seconds for one in seen.values()))
        for kind, some in costs.items():
            seconds[self._kinds == kind] = fmean(some)
        positive: Floats = np.maximum(seconds, 1e-3)
        return positive


def _kinds(columns: Sequence[Strings], count: int) -> Codes:
    """A number for each combination of values that occurs in the columns."""
    kinds = np.zeros(count, dtype=np.int64)
    for column in columns:
        _, codes = np.unique(column, return_inverse=True)
        kinds = kinds * (int(codes.max()) + 1) + codes
    return kinds
