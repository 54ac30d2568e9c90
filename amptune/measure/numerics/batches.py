"""Batches on which numerics are judged: the same for every policy, handed out one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from amptune.changes.tensor_tree import map_tensors, moved_to, stored_in, tensors_in
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.drawn_batches import KEPT_BYTES, bytes_of
from amptune.measure.results.training_runs import THOROUGHNESS, Spread

__all__ = ["Feed", "batches_of", "fingerprint_of"]

# Number of batches drawn; fewer are used if a step is slow.
MOST_COMPARED = THOROUGHNESS[0].batches
# Minimum number of samples in a part of a batch: BatchNorm needs at least two.
SMALLEST_PART = 4


@dataclass
class Feed(Iterator[Any]):
    """An iterator over copies of the batch at `at`; `batches` are a workload's batches or the parts of one.

    Batches up to `KEPT_BYTES` in total stay on the device after their first use.
    """

    batches: list[Any]
    spread: Spread
    device: torch.device
    at: int = 0
    _resident: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._stay = bytes_of(self.batches) <= KEPT_BYTES

    def __len__(self) -> int:
        return len(self.batches)

    def __next__(self) -> Any:
        if not self._stay:
            return self._moved(self.batches[self.at])
        if self.at not in self._resident:
            self._resident[self.at] = self._moved(self.batches[self.at])
        return map_tensors(torch.Tensor.clone, self._resident[self.at])

    def keep(self, count: int) -> None:
        """Drops all but the first `count` batches."""
        self.batches = self.batches[:count]

    def forget(self) -> None:
        """Frees the device's memory."""
        self._resident.clear()

    def _moved(self, batch: Any) -> Any:
        return moved_to(self.device, batch, lambda tensor: tensor.to(self.device, copy=True, non_blocking=True))


def fingerprint_of(bench: Bench) -> tuple[float, ...]:
    """Returns a fingerprint; two processes with equal ones train from the same weights on the same data."""
    batches, _ = batches_of(bench, divided=False)
    return bench.fingerprint(batches[:1])


def batches_of(bench: Bench, *, divided: bool) -> tuple[list[Any], Spread]:
    """Returns (batches to train on, source of their spread): the workload's batches, or a constant one or its parts."""
    samples = bench.workload.batch_size
    batches = bench.drawn.batches(samples, MOST_COMPARED)
    if any(not _same(batch, batches[0]) for batch in batches[1:]):
        return batches, "batches"
    parts = min(MOST_COMPARED, samples // SMALLEST_PART)
    axis = bench.workload.batch_dim
    if not divided or parts < 2 or not _is_divisible(batches[0], samples, axis):
        return batches[:1], "none"
    return [_part(batches[0], samples, axis, parts, which) for which in range(parts)], "parts"


def _same(a: Any, b: Any) -> bool:
    ours, theirs = tensors_in(a), tensors_in(b)
    if not ours and not theirs:
        return a is b  # what an object of one's own holds is not known
    return len(ours) == len(theirs) and all(map(_equal, ours, theirs))


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout is not b.layout or a.shape != b.shape:
        return False
    return all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(stored_in(a), stored_in(b), strict=True))


def _holds(tensor: torch.Tensor, samples: int, axis: int) -> bool:
    """Returns True if samples lie along this axis, or the last of a tensor with fewer."""
    return tensor.dim() > 0 and tensor.size(min(axis, tensor.dim() - 1)) == samples


def _is_divisible(batch: Any, samples: int, axis: int) -> bool:
    return any(_holds(tensor, samples, axis) for tensor in tensors_in(batch))


def _part(batch: Any, samples: int, axis: int, parts: int, which: int) -> Any:
    """Returns part `which` of `parts` of a batch along its axis of samples."""
    size = samples // parts

    def narrowed(tensor: torch.Tensor) -> torch.Tensor:
        if not _holds(tensor, samples, axis):
            return tensor
        return tensor.narrow(min(axis, tensor.dim() - 1), which * size, size)

    return map_tensors(narrowed, batch)
