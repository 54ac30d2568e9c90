"""Fits peak memory against the batch size, from runs of policies that need the same memory (an arm). Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from amptune.search.batch_size.memory_runs import FixedPart, Line, Observation, line_through

__all__ = ["CLEARLY", "REACH", "Fit", "fit_of"]

# A prediction reaches at most this many times beyond the anchor's batch, or to where memory in proportion to the batch
# would leave half of the limit free.
REACH = 8
# How far a peak may be off its line, as a share of what the samples take. ROUNDING_SHARE applies at the observation
# (blocks are rounded to 2 MiB and more: c10/cuda/CUDACachingAllocator), FAR_AWAY is added far from it: another
# convolution algorithm moves peaks by up to 6 % even without cudnn.benchmark (tests/simulated/h200_grid.json).
ROUNDING_SHARE, FAR_AWAY = 0.004, 0.125
# Two peaks, slopes or sizes are clearly different if they are this factor apart.
CLEARLY = 1 + FAR_AWAY
# The scatter of peaks about the line, as a share of what the samples take, if fewer than three runs tell.
SCATTER = 0.01
# If memory is short, the allocator flushes memory that is reserved but not in use, except the share lost to
# fragmentation. That share was 0 to 2/3 on an H200, seen from the largest batch that ran. A quarter gives the best
# search steps on simulated devices (tests/search/test_largest_batch.py), and good ones on all that were measured.
LOST = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Peak memory of one arm as a line in its batch size, for one limit.

    The line passes through `anchor`: the largest run within the limit, without allocator retries if there is such a
    run. Its slope is between `least_slope` and `most_slope`, in MiB a sample. `gives_mib` of the anchor's memory may be
    released if memory is short. `floor` is the line of another arm that needs the same tensors but less memory;
    `may_give_more` is set if such an arm would be needed to tell. `largest_run` is the largest batch that ran within
    the limit (0 if none did), `smallest_failed` the smallest failed batch above it. `was_contradicted` is set if all
    other data predicted that `smallest_failed` would run.
    """

    anchor: Observation
    least_slope: float
    most_slope: float
    limit_mib: float
    fixed_least_mib: float = 0.0
    gives_mib: float = 0.0
    floor: Line | None = None
    was_contradicted: bool = False
    may_give_more: bool = False
    largest_run: int = 0
    smallest_failed: int | None = None

    def most_mib(self, n: int) -> float:
        """Returns the peak of `n` samples in the worst case."""
        slope = self.most_slope if n >= self.anchor.batch_size else self.least_slope
        line = self.anchor.reserved_mib + slope * (n - self.anchor.batch_size)
        return line + self._doubt(n) * max(0.0, line - self.fixed_least_mib)

    def least_mib(self, n: int) -> float:
        """Returns the least memory that `n` samples need."""
        slope = self.least_slope if n >= self.anchor.batch_size else self.most_slope
        line = self._given_way_mib(n, slope)
        return line - self._doubt(n) * max(0.0, line - self.fixed_least_mib)

    @property
    def surely(self) -> int:
        """The largest batch that should run even in the worst case, within the reach of predictions."""
        in_proportion = self.anchor.batch_size * self.limit_mib / max(1.0, self.anchor.reserved_mib)
        highest = max(REACH * self.anchor.batch_size, int(in_proportion / 2))
        return max(self.largest_run, self._largest(self.most_mib, highest))

    def at_most(self, cap: int) -> int:
        """Returns the largest batch up to `cap` that could run in the best case."""
        return max(self.largest_run, self._largest(self.least_mib, cap))

    @property
    def likely(self) -> int:
        """The largest batch that should run if workspaces are released."""
        return self._largest(self._likely_mib, REACH * self.anchor.batch_size)

    @property
    def has_workspaces(self) -> bool:
        """True if the anchor holds workspaces that may be released."""
        return self.gives_mib > 0 or self.floor is not None

    @property
    def knows_its_slope(self) -> bool:
        """True if the memory per sample is known well."""
        return self.most_slope <= CLEARLY * self.least_slope

    @property
    def was_surprised(self) -> bool:
        """True if a batch ran although its best case exceeded the limit."""
        return self.least_mib(self.largest_run) > self.limit_mib

    def _likely_mib(self, n: int) -> float:
        """Returns the memory of `n` samples after workspaces are released and the allocator has flushed its cache."""
        is_flushed = self.anchor.alloc_retries > 0
        beyond_mib = 0.0 if is_flushed else self.anchor.reserved_mib - self.anchor.allocated_mib
        lost_mib = LOST * beyond_mib * n / self.anchor.batch_size
        return self._given_way_mib(n, (self.least_slope + self.most_slope) / 2) + lost_mib

    def _given_way_mib(self, n: int, slope: float) -> float:
        """Returns the memory in use by `n` samples after all workspaces that can be are released."""
        line = self.anchor.allocated_mib - self.gives_mib + slope * (n - self.anchor.batch_size)
        return line if self.floor is None else min(line, self.floor.at(n))

    def _doubt(self, n: int) -> float:
        near, far = sorted((self.anchor.batch_size, n))
        return ROUNDING_SHARE + FAR_AWAY * (1 - near / far)

    def _largest(self, needs_mib: Callable[[int], float], highest: int) -> int:
        """Returns the largest batch up to `highest`, and below what failed, that fits the limit; 0 if none does."""
        highest = highest if self.smallest_failed is None else min(highest, self.smallest_failed - 1)
        low, high = 0, highest
        if self.anchor.fits(self.limit_mib):
            low, high = self.anchor.batch_size, max(highest, self.anchor.batch_size)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if needs_mib(middle) <= self.limit_mib else (low, middle - 1)
        return low


def fit_of(
    seen: Sequence[Observation], limit_mib: float, fixed: FixedPart, *, like: Line | None = None, floor: Line | None
) -> Fit | None:
    """Returns the fit of one arm, or None if nothing ran.

    `like` is the line of an arm with about the same fixed part, used if there is only one run. `floor` is the line of
    an arm with the same tensors.
    """
    runs = sorted((one for one in seen if one.ran), key=lambda one: one.batch_size)
    if not runs:
        return None
    free = [one for one in runs if not one.alloc_retries]
    telling = free or runs
    anchor = next((one for one in reversed(telling) if one.fits(limit_mib)), telling[0])
    others = [one for one in telling if one.batch_size != anchor.batch_size]
    bounds = _slopes_of_one(anchor, fixed, like)
    least, most = _slopes(anchor, others, fixed) if others else bounds
    if not free:  # if workspaces were released, all peaks are near the limit and the slope looks like 0
        least, most = (min(max(slope, bounds[0]), bounds[1]) for slope in (least, most))
    largest_run = max((one.batch_size for one in runs if one.fits(limit_mib)), default=0)
    failed = [one.batch_size for one in seen if not one.fits(limit_mib) and one.batch_size > largest_run]
    steeper = _slope_to_failure(anchor, min(failed, default=math.inf), limit_mib)
    swollen = floor is not None and any(one.allocated_mib > CLEARLY * floor.at(one.batch_size) for one in telling)
    explained_mib = fixed.most_mib + max(most, steeper) * anchor.batch_size
    return Fit(
        anchor=anchor,
        least_slope=least,
        most_slope=max(most, steeper),
        limit_mib=limit_mib,
        fixed_least_mib=fixed.least_mib,
        gives_mib=max(0.0, anchor.allocated_mib - explained_mib),
        floor=floor if swollen else None,
        was_contradicted=steeper > most,
        largest_run=largest_run,
        smallest_failed=min(failed, default=None),
    )


def _slope_to_failure(anchor: Observation, failed: float, limit_mib: float) -> float:
    """Returns the least slope beyond the anchor that explains the failed size, in MiB a sample; 0 if none failed."""
    return (
        max(0.0, (limit_mib - anchor.reserved_mib) / (failed - anchor.batch_size))
        if failed > anchor.batch_size
        else 0.0
    )


def _slopes(anchor: Observation, others: Sequence[Observation], fixed: FixedPart) -> tuple[float, float]:
    """Returns (least, most) MiB a sample near the anchor: secants to the other runs, weighted by their certainty."""
    scatter = _scatter([*others, anchor], fixed)
    secants = [_secant(anchor, one, scatter, fixed) for one in others]
    weight = sum(error**-2 for _, error in secants)
    slope = sum(slope * error**-2 for slope, error in secants) / weight
    least, most = slope - 2 / math.sqrt(weight), slope + 2 / math.sqrt(weight)
    steepest = max(0.0, (anchor.reserved_mib - fixed.least_mib) / anchor.batch_size)
    if others[-1].allocated_mib <= others[0].allocated_mib:
        # These peaks may come from the optimizer step, and only the anchor's from its samples.
        most = max(most, math.sqrt(max(0.0, slope) * steepest), FAR_AWAY * steepest)
    return max(0.0, least), max(0.0, least, min(most, steepest))


def _slopes_of_one(anchor: Observation, fixed: FixedPart, like: Line | None) -> tuple[float, float]:
    n = anchor.batch_size
    least = max(0.0, (anchor.allocated_mib - fixed.most_mib) / n)
    most = max(0.0, (anchor.reserved_mib - fixed.least_mib) / n)
    if like is None or not least < (slope := (anchor.allocated_mib - like.fixed_mib) / n) < most:
        return least, most
    return max(least, (1 - FAR_AWAY) * slope), min(most, (1 + FAR_AWAY) * slope)


def _secant(anchor: Observation, one: Observation, scatter: float, fixed: FixedPart) -> tuple[float, float]:
    """Returns (slope, its standard error)."""
    apart = anchor.batch_size - one.batch_size
    ends = [max(1.0, end.allocated_mib - fixed.least_mib) for end in (anchor, one)]
    return (anchor.allocated_mib - one.allocated_mib) / apart, scatter * math.hypot(*ends) / abs(apart)


def _scatter(runs: Sequence[Observation], fixed: FixedPart) -> float:
    """Returns the standard deviation of peaks about a line through them, as a share of what the samples take."""
    if len(runs) <= 2:
        return SCATTER
    line = line_through([(one.batch_size, one.allocated_mib) for one in runs])
    off = [one.allocated_mib - line.at(one.batch_size) for one in runs]
    takes = max(one.allocated_mib for one in runs) - fixed.least_mib
    deviation = math.sqrt(sum(mib**2 for mib in off) / (len(runs) - 2))
    return max(ROUNDING_SHARE, deviation / takes) if takes > 0 else SCATTER
