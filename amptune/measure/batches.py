"""The batches that numerics are judged on: the same for every policy, one handed out at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from amptune.measure.bench import Bench, bytes_of
from amptune.measure.numerics import Spread
from amptune.runtime.nested import map_tensors, tensors_in

__all__ = ["Feed", "batches_of", "fingerprint_of"]

# So many batches are drawn, and fewer used where a step is slow.
MOST_BATCHES = 8
# A part of a batch has at least so many samples: BatchNorm takes no fewer than two.
SMALLEST_PART = 4
# Batches up to this many bytes in all stay on the device, once they were used.
RESIDENT_BYTES = 2**30


@dataclass
class Feed:
    """Hands out copies of one batch at a time, the one at `at`; made of a workload's batches or the parts of one."""

    batches: list[Any]
    spread: Spread
    device: torch.device
    at: int = 0
    _resident: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stay = bytes_of(self.batches) <= RESIDENT_BYTES

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if not self._stay:
            return self._moved(self.batches[self.at])
        if self.at not in self._resident:
            self._resident[self.at] = self._moved(self.batches[self.at])
        return map_tensors(torch.Tensor.clone, self._resident[self.at])

    def keep(self, count: int) -> None:
        """Forgets all but the first `count` batches."""
        self.batches = self.batches[:count]

    def forget(self) -> None:
        """Gives the device's memory back."""
        self._resident.clear()

    def _moved(self, batch: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self.device, copy=True), batch)


def fingerprint_of(bench: Bench) -> tuple[float, ...]:
    """What tells whether another process would train from the same weights on the same data."""
    batches, _ = batches_of(bench, divided=False)
    return bench.fingerprint(batches[:1])


def batches_of(bench: Bench, *, divided: bool) -> tuple[list[Any], Spread]:
    """(batches to train on, what gives them their spread): the workload's, or a constant one or its parts."""
    samples = bench.workload.batch_size
    batches = bench.batches(samples, MOST_BATCHES)
    if any(not _same(batch, batches[0]) for batch in batches[1:]):
        return batches, "batches"
    parts = min(MOST_BATCHES, samples // SMALLEST_PART)
    if not divided or parts < 2 or not _is_divisible(batches[0], samples):
        return batches[:1], "none"
    return [_part(batches[0], samples, parts, which) for which in range(parts)], "parts"


def _same(a: Any, b: Any) -> bool:
    ours, theirs = tensors_in(a), tensors_in(b)
    return len(ours) == len(theirs) and all(
        x.shape == y.shape and torch.equal(x, y) for x, y in zip(ours, theirs, strict=True)
    )


def _is_divisible(batch: Any, samples: int) -> bool:
    return any(tensor.dim() and tensor.size(0) == samples for tensor in tensors_in(batch))


def _part(batch: Any, samples: int, parts: int, which: int) -> Any:
    """One of `parts` parts of a batch along its first dimension."""
    size = samples // parts

    def narrowed(tensor: torch.Tensor) -> torch.Tensor:
        of_samples = tensor.dim() and tensor.size(0) == samples
        return tensor.narrow(0, which * size, size) if of_samples else tensor

    return map_tensors(narrowed, batch)
