"""The batch sizes to search: up to the largest that fits, which is confirmed by running it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from amptune.measure.results.outcome import Effort, Outcome
from amptune.measure.results.subject import Prepared
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.batch_size.largest_batch import GOOD, LargestBatch, Question, find_largest
from amptune.search.space.global_batch import GlobalBatch, accumulated

__all__ = ["NO_SIZES", "BatchSizes", "Runner", "batch_sizes_for", "rounded_sizes"]

# A few steps are enough: the optimizer's state exists from the second one on.
PROBE = Effort(warmup_s=0.0, measure_s=0.0, min_steps=1, max_steps=1)
# Besides the largest sizes, at most about this many are searched, evenly spread.
MOST_SIZES = 8
# Bounds the search for a model that takes almost no memory, if the loader does not tell how many samples there are.
MOST_TIMES_OWN = 4096
# A CPU is kept busy by batches far below what fits into its memory.
MOST_TIMES_OWN_ON_CPU = 16
# Matrix units are fastest on multiples of 8 (NVIDIA, "Tensor Core requirements").
GRAINS = (8, 4, 2, 1)


class Runner(Protocol):
    """An object that measures a policy while nothing else uses the device's memory."""

    def measure_alone(self, policy: Policy, effort: Effort) -> Outcome: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The sizes to search, and the largest that fits under the policy that was tried."""

    sizes: tuple[int, ...]
    largest: tuple[Policy, LargestBatch] | None = None

    @property
    def findings(self) -> Iterator[Finding]:
        if self.largest is not None:
            policy, found = self.largest
            figures = {"batch_size": found.batch_size, "peak_mib": found.peak_mib, "limit_mib": found.limit_mib}
            words = replace(policy, batch_size=None, accumulate=1)
            yield Finding(code="largest-batch", message=f"{words}: {found}", figures=figures)


# Used if the batch size is not searched.
NO_SIZES = BatchSizes(sizes=())


def batch_sizes_for(
    runner: Runner,
    policy: Policy,
    prepared: Prepared,
    whole: GlobalBatch | None,
    *,
    left_s: Callable[[], float],
) -> BatchSizes:
    """Finds the largest batch under a policy, and the sizes between it and the workload's own."""
    if prepared.memory_mib is None:
        return NO_SIZES

    def run(batch_size: int) -> Outcome:
        # Accumulated gradients take memory too, from the second batch on.
        probed = replace(policy, batch_size=batch_size, accumulate=min(2, accumulated(batch_size, whole)))
        limit_s = min(PROBE.time_limit_s, max(1.0, left_s()))
        return runner.measure_alone(probed, replace(PROBE, time_limit_s=limit_s))

    own = prepared.subject.batch_size
    sizes, ends = _allowed(prepared, whole)
    question = Question(sizes=sizes, ends=ends, own=own, limit_mib=prepared.memory_mib)
    found = find_largest(run, question, left_s=left_s)
    return BatchSizes(sizes=_between(own, found.batch_size or own, whole), largest=(policy, found))


def _allowed(prepared: Prepared, whole: GlobalBatch | None) -> tuple[Sequence[int], str]:
    """Returns the sizes that may be tried, ascending, and in words why there is none beyond."""
    own, most = prepared.subject.batch_size, prepared.most_samples
    if whole is not None:
        sizes, ends = whole.batch_sizes, "no larger size divides the global batch"
    elif prepared.hardware.device == "cpu":
        sizes = tuple(own * factor for factor in range(1, MOST_TIMES_OWN_ON_CPU + 1))
        ends = f"on a CPU none beyond {MOST_TIMES_OWN_ON_CPU} times the own batch is tried"
    else:
        sizes, ends = rounded_sizes(own), f"it is {MOST_TIMES_OWN} times the own batch"
    if most is None or sizes[-1] <= most:
        return sizes, ends
    return [size for size in sizes if size <= most] or [own], f"the data set has {most} samples"


def rounded_sizes(own: int) -> tuple[int, ...]:
    """Returns sizes up to 4096 times the own one, both among them, each at most 1.5 % below the next.

    They are multiples of 8; of 4, 2 or 1 where multiples of 8 are further apart.
    """
    sizes, size = {own, MOST_TIMES_OWN * own}, 1
    while size < MOST_TIMES_OWN * own:
        sizes.add(size)
        grain = next(grain for grain in GRAINS if grain <= max(1, (1 - GOOD) / 2 * size))
        size += max(grain, size // 256 // grain * grain)
        size -= size % grain
    return tuple(sorted(sizes))


def _between(own: int, largest: int, whole: GlobalBatch | None) -> tuple[int, ...]:
    """Returns some sizes from half the own one on, and the largest.

    They are the own size times powers of two; with a global batch, its divisors.
    """
    least, highest = max(1, own // 2), max(own, largest)
    powers = [least * 2**power for power in range((highest // least).bit_length())]
    sizes = powers if whole is None else [n for n in whole.batch_sizes if least <= n <= highest]
    step = math.ceil(len(sizes) / MOST_SIZES)
    return tuple(sorted({*sizes[::-step], largest}))
