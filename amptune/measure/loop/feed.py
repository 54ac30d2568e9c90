"""Feeding of batches as in training: from the user's loader, epoch after epoch, onto the device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from amptune.changes.tensor_tree import map_tensors, moved_to, tensors_in
from amptune.errors import TargetError
from amptune.measure.bench.clocks import Stopwatch
from amptune.policy.settings import Loader
from amptune.runtime.script.loaders import LikeDataLoader, data_loader_in, end_workers, like
from amptune.workload.user_errors import user_code
from amptune.workload.workload import Workload

__all__ = ["Epochs", "LoaderFeed", "require_size"]

_END = object()


class Epochs(Iterator[Any]):
    """An endless iterator over the loader's batches on the host; a loader that ends is started again.

    A workload without a loader gets the batches that were `drawn` ahead, or new ones from its `batch`.
    A DataLoader gets these `settings`, if given. Raises `TargetError` if there is nothing to iterate over,
    `UserCodeError` if the user's code raises. `failed` tells if it raised, or gave nothing.
    """

    def __init__(
        self,
        workload: Workload,
        batch_size: int,
        device: torch.device,
        drawn: Sequence[Any] | None = None,
        settings: Loader | None = None,
    ) -> None:
        self.failed = False
        self._settings = settings
        self._call = f"{'batch' if workload.loader is None else 'loader'}({batch_size})"
        self._build: Callable[[], Iterable[Any]] = partial(
            _fresh_batches, workload, batch_size, pinned=device.type == "cuda"
        )
        if workload.loader is not None:
            self._build = partial(workload.loader, batch_size)
        elif drawn is not None:
            ahead = [_pinned(batch) for batch in drawn] if device.type == "cuda" else drawn
            self._build = lambda: ahead
        self._loader: Iterable[Any] | None = None
        self._iterator: Iterator[Any] = iter(())
        self._given = 0

    def __next__(self) -> Any:
        try:
            batch = self._next()
            if batch is _END:
                self._begin_epoch()
                batch = self._next()
            if batch is _END:
                raise TargetError(self._nothing_left())
        except BaseException:
            self.failed = True
            raise
        self._given += 1
        return batch

    def _next(self) -> Any:
        with user_code(self._call):
            return next(self._iterator, _END)

    def _begin_epoch(self) -> None:
        loader = self._built()
        with user_code(self._call):
            self._iterator = iter(loader)

    def _built(self) -> Iterable[Any]:
        with user_code(self._call):
            if self._loader is None or isinstance(self._loader, Iterator):  # an iterator is spent after one pass
                self._loader = self._build()
                if self._settings is not None:
                    self._loader = like(self._loader, self._settings)
        if not isinstance(self._loader, Iterable):
            kind = type(self._loader).__name__
            raise TargetError(f"{self._call} returned {kind}, not what training iterates over, such as a DataLoader")
        return self._loader

    @property
    def data_loader(self) -> DataLoader[Any] | None:
        """The DataLoader that it iterates over; None for anything else."""
        return data_loader_in(self._built())

    def _nothing_left(self) -> str:
        if self._given == 0:
            return f"{self._call} yields no batch: is its dataset empty, or smaller than one batch with drop_last=True?"
        return (
            f"{self._call} yields no batch after the first {self._given}: it is spent after one epoch; "
            "return a DataLoader, or a new iterator at each call"
        )

    @property
    def samples(self) -> int | None:
        """The number of samples that the loader draws from, once it has given a batch; None if it does not tell."""
        sampler = getattr(getattr(self._loader, "batch_sampler", None), "sampler", None)
        return len(sampler) if isinstance(sampler, Sized) else None

    def close(self) -> None:
        """Ends the loader's worker processes, even if another reference would keep them alive."""
        iterator, self._iterator = self._iterator, iter(())
        loader, self._loader = self._loader, None
        if isinstance(loader, LikeDataLoader):
            loader.close()
        elif isinstance(loader, DataLoader):
            end_workers(loader, iterator)


class LoaderFeed(Iterator[Any]):
    """An iterator over batches on the device, with two laps each: one for waiting, one for its copy and the step."""

    def __init__(
        self,
        workload: Workload,
        batch_size: int,
        device: torch.device,
        stopwatch: Stopwatch,
        drawn: Sequence[Any],
        settings: Loader | None = None,
    ) -> None:
        """`drawn` are batches from `batch`: those to give if there is no loader, else one of the size to expect."""
        self.epochs = Epochs(workload, batch_size, device, drawn, settings)
        self._batch_size = batch_size
        self._expected = None if workload.loader is None else drawn[0]
        self._device = device
        self._stopwatch = stopwatch

    def begin_block(self) -> None:
        """Begins to count the time that the device waits for batches."""
        self._stopwatch.reset()

    def wait_share(self) -> float:
        """Returns the share of the time since `begin_block` for which the device waited for batches."""
        totals_ms = self._stopwatch.totals_ms()
        return totals_ms["wait"] / max(sum(totals_ms.values()), sys.float_info.min)

    def __next__(self) -> Any:
        self._stopwatch.mark("step")
        batch = next(self.epochs)
        self._stopwatch.mark("wait")
        if self._expected is not None:
            require_size(self._batch_size, batch, self._expected)
            self._expected = None
        return moved_to(self._device, batch, self._to_device)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._device.type == "cpu" or tensor.device.type != "cpu":
            return tensor.to(self._device)
        return tensor.to(self._device, non_blocking=tensor.is_pinned())

    def close(self) -> None:
        """Ends the loader's worker processes."""
        self.epochs.close()


def require_size(n: int, batch: Any, expected: Any) -> None:
    """Raises `TargetError` if a loader's first batch is not of the size n that it was called with.

    Its samples per second could not be compared with a policy's. `expected` from `batch(n)` tells which axes hold the
    samples; if fewer than half of its tensors have an axis of length n (packed sequences, graphs, lists of samples,
    in which one may have that length by chance), any batch will do.
    """
    whole, there = [axis for axis, length in _lengths(expected).items() if length == n], _lengths(batch)
    if 2 * len({number for number, _ in whole}) < len(_shapes(expected)):
        return
    if whole and all(there.get(axis) != n for axis in whole):
        raise TargetError(
            f"loader({n}) begins with a batch of tensors of shape {_shapes(batch)}, none of {n} samples: "
            "its batches must be as from batch(n), and of the size it is called with"
        )


def _lengths(batch: Any) -> dict[tuple[int, int], int]:
    return {(i, axis): length for i, shape in enumerate(_shapes(batch)) for axis, length in enumerate(shape)}


def _shapes(batch: Any) -> list[tuple[int, ...]]:
    return [() if tensor.is_nested else tuple(tensor.shape) for tensor in tensors_in(batch)]


def _fresh_batches(workload: Workload, batch_size: int, *, pinned: bool) -> Iterator[Any]:
    """Yields batches without end, as a loader without worker processes makes them."""
    while True:
        batch = workload.batch(batch_size)
        yield _pinned(batch) if pinned else batch


def _pinned(batch: Any) -> Any:
    return map_tensors(lambda tensor: tensor.pin_memory() if tensor.device.type == "cpu" else tensor, batch)
