"""Runs batch sizes until the largest that fits is known; every answer is a size that ran."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from amptune.measure.results.outcome import Outcome
from amptune.search.batch_size.next_size import Question
from amptune.search.batch_size.probe import Probe
from amptune.search.plan.budget import Clock
from amptune.search.table.gains import counted

__all__ = ["LargestBatch", "find_largest"]

MOST_PROBES = 6


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

    @property
    def margin(self) -> float:
        """The share of the limit that is left free."""
        return 1 - self.peak_mib / self.limit_mib

    @property
    def ooms(self) -> int:
        return sum(probe.failure == "oom" for probe in self.probes)

    @property
    def smallest_too_large(self) -> int | None:
        """The smallest batch that ran out of memory or took more than the limit."""
        too_large = (
            probe for probe in self.probes if probe.failure in ("", "oom") and probe.reserved_mib > self.limit_mib
        )
        return min((probe.batch_size for probe in too_large), default=None)

    def __str__(self) -> str:
        runs = f"{counted(len(self.probes), 'run')}, {self.ooms} out of memory"
        if self.batch_size is None:
            return f"no batch size is known to fit into {self.limit_mib:.0f} MiB: {self.because} ({runs})"
        return (
            f"largest batch {self.batch_size}: {self.peak_mib:.0f} of {self.limit_mib:.0f} MiB, {self.margin:.1%} "
            f"left free; {self.because} ({runs})"
        )


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
    best = question.best(probes)
    answer = LargestBatch(batch_size=None, limit_mib=question.limit_mib, because=because, probes=tuple(probes))
    return answer if best is None else replace(answer, batch_size=best.batch_size, peak_mib=best.reserved_mib)
