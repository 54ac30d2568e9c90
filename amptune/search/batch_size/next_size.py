"""Which batch size to run next, so that few runs find the largest that fits. Pure.

Peak memory is nearly a line in the batch size, and a line through the peaks seen so far predicts what fits. What the
allocator *reserved* includes memory that it only caches and releases if memory is short, so a line through it is
careful; a line through what was *allocated* is hopeful. A size that fails is followed by half way down, in ratio.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from amptune.search.batch_size.probe import Probe

__all__ = ["GOOD", "Question"]

MOST_OOMS = 2
# An answer is good if it is at least this share of the largest that may run: a smaller step is not worth a run.
GOOD = 0.97
# A line may be this much steeper beyond its peaks: another convolution algorithm moves peaks by up to 6 % even
# without cudnn.benchmark (tests/simulated/h200_grid.json).
STEEPER = 1.1
# A line predicts at most this many times the size that memory in proportion to the batch allows: small batches have
# their peak in the optimizer step, so that a line through them is flat.
BEYOND_PROPORTION = 2
# The share of cached memory that is lost to fragmentation if memory is short: 0 to 2/3 on an H200, here the middle.
FRAGMENTED = 1 / 3
# Memory held at any batch size is at most this many times the weights: gradients, two moments, and two temporaries of
# a `foreach` optimizer beside them. Anything above that is workspaces, which are released if memory is short.
MOST_TIMES_WEIGHTS = 6
# If not even the first size fits, the next one is this many times smaller.
SMALLER = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The largest sizes that fit if all cached memory is lost, if a usual share of it is, and if all is released."""

    careful: float
    likely: float
    hopeful: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which of the sizes is the largest that fits?

    `sizes` ascend, and `ends` says in words why there is none beyond. `weights_mib` is the size of the weights in FP32;
    None if nothing is known of the memory held at any batch size.
    """

    sizes: Sequence[int]
    ends: str
    own: int
    limit_mib: float
    weights_mib: float | None = None

    def best(self, probes: Sequence[Probe]) -> Probe | None:
        """Returns the largest run within the limit. If nothing enforces the limit, a run may exceed it."""
        fitting = (probe for probe in probes if probe.reserved_mib <= self.limit_mib)
        return max(fitting, key=_size, default=None)

    def next_size(self, probes: Sequence[Probe]) -> int | str:
        """Returns the size to run next, or in words why there is none."""
        best = self.best(probes)
        ok = best.batch_size if best else 0
        failed = min((probe for probe in probes if probe.batch_size > ok), key=_size, default=None)
        if failed is not None and failed.failure == "timeout":  # each may take as long again
            return failed.why
        ran = [probe for probe in probes if not probe.failure]
        telling = [probe for probe in ran if not probe.was_pressed] or ran
        is_enough = failed is not None and sum(probe.failure == "oom" for probe in probes) >= MOST_OOMS
        if not telling:
            return self._first_size(failed, is_enough)
        predicted = self._predict(telling, ok)
        end = self.sizes[-1] if failed is None else failed.batch_size - 1
        top = max(ok, int(min(end, predicted.hopeful)))
        larger = self.sizes[bisect_right(self.sizes, ok) :]
        if not larger:
            return self.ends
        if larger[0] > top or ok >= GOOD * top:
            tight = failed is not None and failed.batch_size <= max(larger[0], top + 1)
            return failed.why if failed is not None and tight else f"more than {top} would not fit"
        if failed is not None and is_enough:
            return f"{failed.why}, and nothing between the two was tried"
        return max(larger[0], self._at_most(_wanted(predicted, ok, top, failed)))

    def _first_size(self, failed: Probe | None, is_enough: bool) -> int | str:
        """Returns a size while nothing ran: the own batch size, then one far below what failed."""
        size = self._at_most(self.own if failed is None else failed.batch_size // SMALLER)
        if failed is None:
            return size
        if size >= failed.batch_size:
            return failed.why if failed.failure != "oom" else f"even a batch of {failed.batch_size} does not fit"
        return f"a batch of {failed.batch_size} does not fit, and none below was tried" if is_enough else size

    def _at_most(self, n: float) -> int:
        """Returns the largest size up to `n`, or the smallest size of all."""
        return self.sizes[max(0, bisect_right(self.sizes, n) - 1)]

    def _predict(self, telling: Sequence[Probe], ok: int) -> Prediction:
        """Draws the lines through the largest run that fits and the next smaller one.

        With a single run a line begins at the memory held at any batch size: at least the weights (the careful line),
        at most several times as much (the hopeful one).
        """
        last = max((probe for probe in telling if probe.batch_size <= ok), key=_size, default=min(telling, key=_size))
        n, free_mib = last.batch_size, self.limit_mib - last.reserved_mib
        least_mib = min(self.weights_mib or 0.0, last.reserved_mib / 2)
        most_mib = last.allocated_mib if self.weights_mib is None else MOST_TIMES_WEIGHTS * self.weights_mib
        careful = _reach(n, free_mib, STEEPER * (last.reserved_mib - least_mib) / n)
        each_mib = (last.allocated_mib - most_mib) / n
        if (before := _before(last, telling)) is not None:
            apart = n - before.batch_size
            along = _reach(n, free_mib, STEEPER * (last.reserved_mib - before.reserved_mib) / apart)
            careful = max(careful, min(along, BEYOND_PROPORTION * careful))
            each_mib = (last.allocated_mib - before.allocated_mib) / apart
        spare_mib = self.limit_mib - min(last.allocated_mib, most_mib + each_mib * n)
        lost_mib = FRAGMENTED * (last.reserved_mib - last.allocated_mib)
        hopeful = max(careful, _reach(n, spare_mib, each_mib))
        return Prediction(careful=careful, likely=_reach(n, spare_mib - lost_mib, each_mib), hopeful=hopeful)


def _wanted(predicted: Prediction, ok: int, top: int, failed: Probe | None) -> float:
    """Returns the careful size if it gains much, else one that may not fit; half way to an unforeseen failure."""
    half_way = math.isqrt(max(1, ok) * top)
    if failed is not None and failed.batch_size <= predicted.hopeful:
        return half_way
    bold = min(2 * ok, max(half_way, GOOD * predicted.likely))
    return predicted.careful if predicted.careful >= min(STEEPER * ok, bold) else bold


def _before(last: Probe, telling: Sequence[Probe]) -> Probe | None:
    """Returns the run that a line to `last` begins at, the next smaller one; None for a peak that is only the limit."""
    smaller = (probe for probe in telling if probe.batch_size < last.batch_size)
    return None if last.was_pressed else max(smaller, key=_size, default=None)


def _reach(n: int, free_mib: float, each_mib: float) -> float:
    """Returns the size that `free_mib` beyond `n` samples are enough for."""
    return n + free_mib / each_mib if each_mib > 0 else math.inf


def _size(probe: Probe) -> int:
    return probe.batch_size
