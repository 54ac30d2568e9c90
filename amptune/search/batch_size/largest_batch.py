"""The largest batch that fits, found by a line through the peaks of memory; the answer is a size that ran.

Peak memory is nearly a line in the batch size. What the allocator *reserved* includes memory that it only caches, so a
line through it is careful; a line through what was *allocated* is hopeful. Runs follow the careful line while it
gains much, then go half way to the hopeful one, in ratio.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from amptune.measure.results.outcome import Measurement, Outcome
from amptune.search.plan.budget import Clock
from amptune.search.table.gains import counted

__all__ = ["LargestBatch", "Probe", "Question", "find_largest"]

MOST_PROBES, MOST_OOMS = 6, 2
# An answer is good if it is at least this share of the largest that may run: a smaller step is not worth a run.
GOOD = 0.97
# A line may be this much steeper beyond its peaks: another convolution algorithm moves peaks by up to 6 % even
# without cudnn.benchmark.
STEEPER = 1.1
# A line predicts at most this many times the size that memory in proportion to the batch allows: small batches have
# their peak in the optimizer step, so that a line through them is flat.
BEYOND_PROPORTION = 2
# If not even the first size fits, the next one is this many times smaller.
SMALLER = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One run at one batch size, and the seconds it cost."""

    batch_size: int
    outcome: Outcome
    seconds: float = 0.0

    @property
    def failure(self) -> str:
        """The kind of its failure; "" if it ran."""
        return "" if isinstance(self.outcome, Measurement) else self.outcome.kind

    @property
    def allocated_mib(self) -> float:
        """The peak of the memory in use; infinite if it failed."""
        return self.outcome.peak_allocated_mib if isinstance(self.outcome, Measurement) else math.inf

    @property
    def reserved_mib(self) -> float:
        """The peak of the memory that the allocator held; infinite if it failed."""
        return self.outcome.peak_reserved_mib if isinstance(self.outcome, Measurement) else math.inf

    @property
    def why(self) -> str:
        """Says in words why it is not the answer."""
        if self.failure in ("", "oom"):
            return f"{self.batch_size} did not fit"
        return f"a batch of {self.batch_size} fails: {self.outcome}"

    def seconds_for(self, batch_size: int) -> float:
        """Returns the seconds of a probe of another size: its steps take longer in proportion, the rest does not."""
        if not isinstance(self.outcome, Measurement):
            return 0.0
        steps = self.outcome.warmup_steps + len(self.outcome.step_ms)
        steps_s = min(self.seconds, steps * self.outcome.mean_ms / 1000)
        return self.seconds - steps_s + steps_s * batch_size / self.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch that ran within the limit, None if none did, and why no larger one was tried.

    `peak_mib` is what the allocator reserved in that run. `probes` are the runs in order.
    """

    batch_size: int | None
    limit_mib: float
    because: str
    peak_mib: float = 0.0
    probes: tuple[Probe, ...] = ()

    def __str__(self) -> str:
        runs = f"{counted(len(self.probes), 'run')}, {_ooms(self.probes)} out of memory"
        if self.batch_size is None:
            return f"no batch size is known to fit into {self.limit_mib:.0f} MiB: {self.because} ({runs})"
        free = 1 - self.peak_mib / self.limit_mib
        return (
            f"largest batch {self.batch_size}: {self.peak_mib:.0f} of {self.limit_mib:.0f} MiB, {free:.1%} "
            f"left free; {self.because} ({runs})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The ascending `sizes` of which the largest that fits is sought; `ends` says in words why there is none beyond."""

    sizes: Sequence[int]
    ends: str
    own: int
    limit_mib: float

    def fitting(self, probes: Sequence[Probe]) -> list[Probe]:
        """Returns the runs within the limit, the smallest first. If nothing enforces the limit, a run may exceed it."""
        return sorted((one for one in probes if one.reserved_mib <= self.limit_mib), key=attrgetter("batch_size"))

    def next_size(self, probes: Sequence[Probe]) -> int | str:
        """Returns the size to run next, or in words why there is none."""
        fitting = self.fitting(probes)
        ok = fitting[-1].batch_size if fitting else 0
        beyond = [probe for probe in probes if probe.batch_size > ok]
        failed = min(beyond, key=attrgetter("batch_size"), default=None)
        if failed is not None and (failed.failure == "timeout" or _ooms(probes) >= MOST_OOMS):
            return failed.why  # another one may take as long
        if not fitting:
            return self._first_size(failed)
        larger = self.sizes[bisect_right(self.sizes, ok) :]
        if not larger:
            return self.ends
        careful, hopeful = (self._reach(fitting, name) for name in ("reserved_mib", "allocated_mib"))
        top = int(min(self.sizes[-1] if failed is None else failed.batch_size - 1, max(careful, hopeful)))
        if larger[0] > top or ok >= GOOD * top:
            return failed.why if failed is not None else f"more than {top} would not fit"
        is_foreseen = failed is None or failed.batch_size > hopeful
        wanted = careful if is_foreseen and careful >= STEEPER * ok else math.isqrt(ok * top)
        return max(larger[0], self._at_most(min(wanted, top)))

    def _first_size(self, failed: Probe | None) -> int | str:
        """Returns a size while nothing ran: the own batch size, then one far below what failed."""
        if failed is None:
            return self._at_most(self.own)
        size = self._at_most(failed.batch_size // SMALLER)
        return failed.why if size >= failed.batch_size else size

    def _at_most(self, n: float) -> int:
        """Returns the largest size up to `n`, or the smallest size of all."""
        return self.sizes[max(0, bisect_right(self.sizes, n) - 1)]

    def _reach(self, fitting: Sequence[Probe], peak: str) -> float:
        """Returns the size at which a line through the two largest runs' peaks reaches the limit.

        With a single run, memory is in proportion to the batch.
        """
        last, last_mib = fitting[-1], float(getattr(fitting[-1], peak))
        free_mib, in_proportion = self.limit_mib - last_mib, last_mib / last.batch_size
        proportional = last.batch_size + free_mib / (STEEPER * in_proportion)
        if len(fitting) == 1:
            return proportional
        before = fitting[-2]
        before_mib = float(getattr(before, peak))
        slope = STEEPER * (last_mib - before_mib) / (last.batch_size - before.batch_size)
        return min(last.batch_size + free_mib / max(slope, 1e-9), BEYOND_PROPORTION * proportional)


def find_largest(
    run: Callable[[int], Outcome],
    question: Question,
    *,
    left_s: Callable[[], float] = lambda: math.inf,
    clock: Clock = time.monotonic,
) -> LargestBatch:
    """Answers the question. `run` measures a batch size briefly and may take `left_s()` seconds, which it enforces."""
    probes: list[Probe] = []
    while isinstance(because := question.next_size(probes), int):
        size, ran = because, [probe for probe in probes if not probe.failure]
        if len(probes) >= MOST_PROBES:
            because = f"{len(probes)} runs are enough"
            break
        if ran and left_s() < ran[-1].seconds_for(size):
            because = f"there is no time to try {size}"
            break
        began_s = clock()
        outcome = run(size)
        probes.append(Probe(batch_size=size, outcome=outcome, seconds=clock() - began_s))
    fitting = question.fitting(probes)
    answer = LargestBatch(batch_size=None, limit_mib=question.limit_mib, because=because, probes=tuple(probes))
    return replace(answer, batch_size=fitting[-1].batch_size, peak_mib=fitting[-1].reserved_mib) if fitting else answer


def _ooms(probes: Sequence[Probe]) -> int:
    return sum(probe.failure == "oom" for probe in probes)
