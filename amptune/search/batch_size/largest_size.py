"""The largest batch that fits: which size to run next, how many may fail, and when an answer is good enough. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from amptune.search.batch_size.memory_fit import CLEARLY, REACH, Fit
from amptune.search.batch_size.memory_runs import Observation

__all__ = ["MOST_PROBES", "MOST_TIMES_OWN", "MOST_TIMES_OWN_ON_CPU", "Outlook", "Sizes"]

MOST_PROBES = 6
MOST_OOMS = 2
# Bounds the search for a model that takes almost no memory, if the loader does not tell how many samples there are.
MOST_TIMES_OWN = 4096
# A CPU is kept busy by batches far below what fits into its memory.
MOST_TIMES_OWN_ON_CPU = 16
# The goal: an answer is good if it is at least this share of the largest that runs. A step that brings less than that
# is not worth a run, and a failed one is forgiven.
GOOD = 0.97
# Matrix units are fastest on multiples of this (NVIDIA, "Tensor Core requirements").
GRAIN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The batch sizes that may be tried: multiples of 8, of less where that costs too much; or those allowed."""

    cap: int
    allowed: tuple[int, ...] | None = None
    is_all_data: bool = False

    @staticmethod
    def around(own_batch_size: int, allowed: Sequence[int] | None = None, most: int | None = None) -> Sizes:
        """Returns the sizes up to 4096 times the own one, or all the data; with `allowed` sizes, only those."""
        cap = MOST_TIMES_OWN * own_batch_size
        cap, is_all_data = (most, True) if most is not None and most < cap else (cap, False)
        if allowed is not None:
            allowed = tuple(sorted({size for size in allowed if 1 <= size <= cap}))
        return Sizes(cap=cap, allowed=allowed, is_all_data=is_all_data)

    def at_most(self, n: int) -> int:
        """Returns the largest size up to `n`; 0 if there is none."""
        n = min(n, self.cap)
        if self.allowed is None:
            return n - n % _grain(n) if n > 0 else 0
        place = bisect_right(self.allowed, n)
        return self.allowed[place - 1] if place else 0

    def at_least(self, n: int) -> int:
        """Returns the smallest size from `n` on; 0 if there is none."""
        if self.allowed is None:
            up = n + -n % _grain(n)
            return up if up <= self.cap else 0
        place = bisect_left(self.allowed, n)
        return self.allowed[place] if place < len(self.allowed) else 0

    def holds(self, n: int) -> bool:
        """Returns True if the size may be an answer: any size that ran, unless only some are allowed."""
        return self.allowed is None or n in self.allowed


def _grain(n: int) -> int:
    may_cost = max(1, int((1 - GOOD) / 2 * n))
    return min(GRAIN, 1 << (may_cost.bit_length() - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """All that is known before a run, and so which size to run next.

    `seen` are all runs of the arm that `fit` is of, `ooms` is how many of this search ran out of memory, `left` how
    many more runs are allowed.
    """

    fit: Fit | None
    seen: tuple[Observation, ...]
    sizes: Sizes
    own: int
    limit_mib: float
    ooms: int = 0
    left: int = MOST_PROBES

    @property
    def best(self) -> Observation | None:
        """The largest run that may be the answer."""
        fitting = (one for one in self.seen if one.fits(self.limit_mib) and self.sizes.holds(one.batch_size))
        return max(fitting, key=lambda one: one.batch_size, default=None)

    def next_size(self) -> int | str:
        """Returns the size to run next, or in words why there is none."""
        if self.fit is None or not self.sizes.at_most(self.fit.surely):
            return self._first_size()
        ok = self.best.batch_size if self.best else 0
        top = self.top(self.fit)
        if self.sizes.at_most(top) <= ok or ok >= GOOD * top:
            return self._last_size(self.fit, ok) or self._why_nothing_larger(self.fit, ok, top)
        if hoped := self._hoped_for(self.fit, ok):
            return hoped
        if careful := self._careful_size(self.fit, ok, top):
            return careful
        if self.ooms >= MOST_OOMS or (self.ooms and 2 * ok >= top):
            failed = self.fit.smallest_failed or "another size"
            return f"{failed} did not fit, and nothing between the two was tried"
        return self._bold_size(self.fit, ok, top)

    def top(self, fit: Fit) -> int:
        """Returns the largest batch that could run; if a larger one did run, anything below what failed."""
        if not fit.was_surprised:
            return fit.at_most(self.sizes.cap)
        return self.sizes.cap if fit.smallest_failed is None else min(self.sizes.cap, fit.smallest_failed - 1)

    def _first_size(self) -> int | str:
        """Returns a size while nothing fits: the own batch size, then one far below what did not fit."""
        failed = min((one.batch_size for one in self.seen if not one.fits(self.limit_mib)), default=None)
        wanted = self.own if failed is None or failed > self.own else max(1, failed // REACH**2)
        size = self.sizes.at_most(wanted) or self.sizes.at_least(1)
        if not size:
            return "there is no batch size to try"
        if failed is not None and size >= failed:
            return f"even a batch of {failed} does not fit"
        if self.ooms >= MOST_OOMS:
            return f"a batch of {failed} does not fit, and none below was tried"
        return size

    def _hoped_for(self, fit: Fit, ok: int) -> int:
        """Returns the size that would run if workspaces were released; 0 if they cannot be, or if that gains little."""
        is_near = fit.knows_its_slope and 2 * fit.anchor.batch_size >= fit.surely
        if self.ooms or self.left < 2 or not (fit.has_workspaces and is_near):
            return 0
        hoped = self.sizes.at_most(int(GOOD * fit.likely))
        return hoped if hoped > CLEARLY * max(fit.surely, ok) else 0

    def _careful_size(self, fit: Fit, ok: int, top: int) -> int:
        """Returns a size that should run; 0 if a bolder size, whose failure would do no harm, would gain as much."""
        careful = self.sizes.at_most(_careful(fit))
        may_be_last = self.ooms or careful >= GOOD * top
        worth = ok + 1 if may_be_last else _forgiven(ok)
        return careful if self.ooms < MOST_OOMS and careful >= worth else 0

    def _bold_size(self, fit: Fit, ok: int, top: int) -> int:
        """Returns a size that may not fit, so near that the answer is good if it fails; farther if few runs are left.

        Such steps should end at the likely size. If they cannot reach so far, the first step makes up the rest:
        there failing is least likely, and its result helps the steps that follow.
        """
        if fit.smallest_failed is not None:
            wanted = math.isqrt(max(1, ok) * top)
        elif fit.was_surprised:
            wanted = 2 * ok
        else:
            wanted = int(min(top, fit.likely) * GOOD ** (self.left - 1))
        size = self.sizes.at_most(min(top, max(_forgiven(ok), wanted)))
        return size if size > ok else self.sizes.at_least(ok + 1)

    def _last_size(self, fit: Fit, ok: int) -> int:
        """Returns one more size above the answer if nobody knows how much memory workspaces take; else 0."""
        settled = self.ooms or fit.smallest_failed is not None or not fit.may_give_more
        return 0 if settled else self.sizes.at_least(max(ok + 1, math.ceil(ok / GOOD)))

    def _why_nothing_larger(self, fit: Fit, ok: int, top: int) -> str:
        larger = self.sizes.at_least(ok + 1)
        if not larger:
            if self.sizes.is_all_data and 2 * ok > self.sizes.cap:
                return f"the data set has {self.sizes.cap} samples"
            on_cpu = f"on a CPU up to {MOST_TIMES_OWN_ON_CPU} times the own batch"
            few = f"none that is larger is tried: {on_cpu}, with --global-batch what divides it"
            return few if self.sizes.allowed else f"it is {MOST_TIMES_OWN} times the own batch"
        if fit.smallest_failed is not None and fit.smallest_failed <= max(larger, top + 1):
            return f"{fit.smallest_failed} did not fit"
        return f"more than {max(ok, top)} would not fit"


def _forgiven(ok: int) -> int:
    """Returns the largest size that may fail without harm: even if all smaller sizes run, `ok` is GOOD of them."""
    return math.floor(ok / GOOD) + 1


def _careful(fit: Fit) -> int:
    """Returns a size that should run even in the worst case; at most half way to one that failed unexpectedly."""
    if fit.smallest_failed is None or not fit.was_contradicted:
        return fit.surely
    half_way = math.isqrt(max(1, fit.largest_run) * fit.smallest_failed)
    return min(fit.surely, max(fit.largest_run, half_way))
