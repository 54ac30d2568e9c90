"""Batches that are drawn ahead of what is timed, under a fixed seed, and the order in which steps take them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from amptune.changes.tensor_tree import stored_in, tensors_in
from amptune.errors import TargetError, UserCodeError
from amptune.hardware.machine import MIB
from amptune.measure.bench.failures import failure_of
from amptune.workload.loader_batches import LARGE_BYTES, MOST_KEPT
from amptune.workload.user_errors import user_code
from amptune.workload.workload import Workload

__all__ = ["KEPT_BYTES", "BatchSequence", "Batches", "DrawnBatches", "bytes_of", "seed_everything", "sums_of"]

# All policies are timed on one sequence of batches that lie on the device: at most `MOST_KEPT`, drawn in about so many
# seconds, of at most `LARGE_BYTES`. Batches larger than that: two, as in training that copies the next batch while it
# works on the current one.
DRAWING_S, LARGE_BATCHES = 1.0, 2
# Batches are kept for later while their total size is below this: a GiB.
KEPT_BYTES = 1024 * MIB
# The steps before a timed block see at least so many batches: a graph is compiled anew for the first other shape.
FEWEST_WARM = 2

_Key = tuple[str, int, int | None]  # what is asked for: its name, the samples, the number


class DrawnBatches:
    """The batches of one workload, drawn by its `batch` and kept on the CPU.

    The same question has the same answer in every process.
    """

    def __init__(self, workload: Workload, seed: int) -> None:
        self._workload = workload
        self._seed = seed
        self._kept: dict[_Key, list[Any]] = {}

    def batches(self, samples: int, count: int) -> list[Any]:
        """Returns so many batches, each of `samples`."""
        return self._known(("batches", samples, count), lambda: [self._workload.batch(samples) for _ in range(count)])

    def sequence(self, samples: int, count: int | None = None) -> list[Any]:
        """Returns the batches that all policies are timed on.

        There are `count`, or fewer if these are large; by default as many as are drawn within `DRAWING_S`.
        """
        found = self._known(("sequence", samples, count), lambda: self._some(samples, count))
        return self._kept.setdefault(("sequence", samples, len(found)), found)

    def sequence_in_time(self) -> tuple[int, float]:
        """Returns how many batches of the workload's own size all policies are timed on, and the seconds to draw them.

        There are none if memory is short for one, which the first trial says.
        """
        began_s = time.monotonic()
        try:
            return len(self.sequence(self._workload.batch_size)), time.monotonic() - began_s
        except UserCodeError as error:
            if failure_of(error).kind == "oom":
                return 0, 0.0
            raise

    def fresh_sequence(self, samples: int, count: int | None = None) -> list[Any]:
        """Returns batches like those of `sequence` that are others."""
        return self._known(("fresh", samples, count), lambda: self._some(samples, count), self._seed + 1)

    def _known(self, key: _Key, draw: Callable[[], list[Any]], seed: int | None = None) -> list[Any]:
        samples = key[1]
        if key not in self._kept:
            self._make_room()
            seed_everything(self._seed if seed is None else seed)
            with user_code(f"batch({samples})"):
                drawn = draw()
            self._require_another_size(samples, drawn[0])
            self._kept[key] = drawn
        return self._kept[key]

    def _some(self, samples: int, count: int | None) -> list[Any]:
        """Draws `count` batches, or as many as there is time for; two at least, and no more than `LARGE_BYTES`."""
        until_s = math.inf if count else time.monotonic() + DRAWING_S
        batches = [self._workload.batch(samples)]
        if bytes_of(batches) >= LARGE_BYTES:
            return batches * LARGE_BATCHES  # one batch twice: drawing large batches takes seconds
        most = min(count or MOST_KEPT, LARGE_BYTES // max(1, bytes_of(batches)))
        while len(batches) < LARGE_BATCHES or (len(batches) < most and time.monotonic() < until_s):
            batches.append(self._workload.batch(samples))
        return batches

    def _require_another_size(self, samples: int, batch: Any) -> None:
        """Raises `TargetError` if `batch(n)` ignores n: large batches would look fast."""
        own = self._workload.batch_size
        known = next((drawn[0] for (_, size, _), drawn in self._kept.items() if size == own), None)
        if samples == own or known is None:
            return
        shapes, own_shapes = ([tensor.shape for tensor in tensors_in(one)] for one in (batch, known))
        if shapes and shapes == own_shapes:  # an object of the user's own shows no tensors
            raise TargetError(
                f"batch({samples}) gives tensors of the same shapes as batch({own}): it is to give n samples"
            )

    def _make_room(self) -> None:
        """Drops batches of other sizes than the workload's own if they have grown large in total."""
        others = [key for key in self._kept if key[1] != self._workload.batch_size]
        if bytes_of([self._kept[key] for key in others]) > KEPT_BYTES:
            for key in others:
                del self._kept[key]


class Batches(Iterator[Any], Protocol):
    """An endless iterator of batches on the device."""

    def begin_block(self) -> None:
        """Is called before each block of steps that is timed."""
        ...


class BatchSequence(Iterator[Any]):
    """An endless cycle of batches. Each block begins with the second half of them, after `begin`.

    The steps before the first block get the first half alone. What a policy pays for a batch that it has not seen, as
    graphs recorded for its shapes, is thus in its block, as training pays for it.
    """

    def __init__(self, batches: Sequence[Any], begin: Callable[[], None]) -> None:
        self._batches, self._begin = batches, begin
        self._at, self._count = 0, max(min(len(batches), FEWEST_WARM), len(batches) // 2)

    def __next__(self) -> Any:
        self._at += 1
        return self._batches[(self._at - 1) % self._count]

    def begin_block(self) -> None:
        self._at, self._count = len(self._batches) // 2, len(self._batches)
        self._begin()


def bytes_of(batches: Sequence[Any]) -> int:
    """Returns the size in bytes of the tensors in them, at any depth."""
    return sum(part.nbytes for tensor in tensors_in(list(batches)) for part in stored_in(tensor))


def seed_everything(seed: int) -> None:
    """Seeds the global generators that users draw from."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def sums_of(tensors: Sequence[Any]) -> tuple[float, ...]:
    """Returns the sum of the magnitudes in each tensor, at any depth."""
    return tuple(
        float((tensor.byte() if tensor.dtype is torch.bool else tensor.detach().abs()).sum(dtype=torch.float64))
        for whole in tensors_in(list(tensors))
        for tensor in stored_in(whole)
    )
