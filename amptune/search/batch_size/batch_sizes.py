"""The batch sizes to search: up to the largest that fits, which is confirmed by running it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

from amptune.measure.results.outcome import Effort, Outcome
from amptune.measure.results.subject import Prepared
from amptune.policy.findings import Finding
from amptune.policy.setting_effects import memory_of
from amptune.policy.settings import Policy
from amptune.search.batch_size.largest_size import MOST_TIMES_OWN_ON_CPU
from amptune.search.batch_size.memory_model import MemoryModel
from amptune.search.batch_size.memory_runs import FixedPart
from amptune.search.batch_size.probing import LargestBatch, Sizer
from amptune.search.space.global_batch import GlobalBatch, accumulated

__all__ = ["NO_SIZES", "BatchSizes", "Runner", "batch_sizes_for"]

# A few steps are enough: the optimizer's state exists from the second one on.
PROBE = Effort(warmup_s=0.0, measure_s=0.0, min_steps=1, max_steps=1)
# Besides the largest sizes, at most about this many are searched, evenly spread.
MOST_SIZES = 8


class Runner(Protocol):
    """An object that measures a policy while nothing else uses the device's memory."""

    def measure_alone(self, policy: Policy, effort: Effort) -> Outcome: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSizes:
    """The sizes to search, the largest that fits, under the policy that was tried, and the fitted memory model."""

    sizes: tuple[int, ...]
    largest: tuple[Policy, LargestBatch] | None = None
    model: MemoryModel = field(default_factory=lambda: MemoryModel(limit_mib=float("inf")))

    @property
    def fits(self) -> Callable[[Policy], bool]:
        """A function that returns False if a policy, which names its batch size, clearly does not fit into memory."""
        known: dict[tuple[Policy, int], bool] = {}

        def fits(policy: Policy) -> bool:
            if policy.batch_size is None:
                return True
            key = memory_of(policy), policy.batch_size
            if key not in known:
                known[key] = not self.model.predicts_oom(policy, policy.batch_size)
            return known[key]

        return fits

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
    sizer = _sizer(runner, prepared, whole, left_s=left_s)
    if sizer is None:
        return NO_SIZES
    found, own = sizer.largest(policy), prepared.subject.batch_size
    sizes = _between(own, found.batch_size or own, whole)
    return BatchSizes(sizes=sizes, largest=(policy, found), model=sizer.model)


def _sizer(
    runner: Runner, prepared: Prepared, whole: GlobalBatch | None, *, left_s: Callable[[], float]
) -> Sizer | None:
    """Returns an object that finds the largest batch sizes; None if the size of the memory is unknown."""
    own, on_gpu = prepared.subject.batch_size, prepared.hardware.device != "cpu"
    if prepared.memory_mib is None:
        return None
    fixed = FixedPart.of_weights(prepared.subject.parameters) if on_gpu else FixedPart()

    def run(policy: Policy) -> Outcome:
        # Accumulated gradients take memory too, from the second batch on.
        together = min(2, accumulated(policy.batch_size, whole))
        limit_s = min(PROBE.time_limit_s, max(1.0, left_s()))
        return runner.measure_alone(replace(policy, accumulate=together), replace(PROBE, time_limit_s=limit_s))

    return Sizer(
        run=run,
        model=MemoryModel(limit_mib=prepared.memory_mib, fixed=fixed),
        own_batch_size=own,
        allowed=_allowed(prepared, whole),
        most=prepared.most_samples,
        left_s=left_s,
    )


def _allowed(prepared: Prepared, whole: GlobalBatch | None) -> tuple[int, ...] | None:
    """Returns the only sizes to try; None if any size may be tried."""
    if whole is not None:
        return whole.batch_sizes
    if prepared.hardware.device == "cpu":
        own, most = prepared.subject.batch_size, MOST_TIMES_OWN_ON_CPU
        return tuple(own * factor for factor in range(1, most + 1))
    return None


def _between(own: int, largest: int, whole: GlobalBatch | None) -> tuple[int, ...]:
    """Returns some sizes from half the own one on, and the largest.

    They are the own size times powers of two; with a global batch, its divisors.
    """
    least, highest = max(1, own // 2), max(own, largest)
    powers = [least * 2**power for power in range((highest // least).bit_length())]
    sizes = powers if whole is None else [n for n in whole.batch_sizes if least <= n <= highest]
    step = math.ceil(len(sizes) / MOST_SIZES)
    return tuple(sorted({*sizes[::-step], largest}))
