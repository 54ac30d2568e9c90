"""Batches from a loader of the user's: as it makes them, and of other sizes by its collator."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from amptune.changes.tensor_tree import stored_in, tensors_in
from amptune.errors import TargetError
from amptune.hardware.machine import MIB

__all__ = ["LARGE_BYTES", "MOST_KEPT", "LoaderBatches"]

# So many batches are kept, or fewer if these are large: of a loader that decides itself which samples go together, and
# of what steps are timed on.
MOST_KEPT, LARGE_BYTES = 32, 256 * MIB
# So many batches are looked at to tell which axis holds the samples.
MOST_SEEN = 3


class LoaderBatches:
    """Batches of a loader: `batch(n)` draws one, and `at(batch_size)` is to iterate over.

    Random samples are collated. If the loader chooses samples itself (a sampler of its own, an `IterableDataset`, no
    DataLoader at all), its first batches are taken as they come, because their shapes may depend on that choice.
    Raises `TargetError` if `batch_size` is neither given nor known from the loader, or if its batches do not show
    along which axis samples are counted (`batch_dim`): of a model that `is_time_major` it may be the second.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        batch_size: int | None = None,
        batch_dim: int | None = None,
        *,
        is_time_major: bool = False,
    ) -> None:
        if isinstance(loader, Iterator) or not isinstance(loader, Iterable):
            raise TargetError(
                f"loader is {type(loader).__name__}, which cannot be iterated over again for each epoch: give a "
                "DataLoader, a list of batches, or an object whose __iter__ begins anew"
            )
        self.loader = loader
        if batch_dim is not None and (not isinstance(batch_dim, int) or isinstance(batch_dim, bool) or batch_dim < 0):
            raise TargetError(f"batch_dim must be an axis, 0 or 1 as a rule, not {batch_dim!r}")
        shapes = [] if isinstance(loader, DataLoader) else _shapes_in(loader)  # those of a DataLoader are not needed
        self.batch_size = batch_size or _size_of(loader, shapes, batch_dim, is_time_major=is_time_major)
        self.batch_dim = _axis_of(shapes, self.batch_size) if batch_dim is None else batch_dim
        self._kept: list[Any] = []

    @property
    def parts(self) -> dict[str, Any]:
        """The parts of a `Workload` that come from the loader, by name."""
        own = {"batch_size": self.batch_size, "batch_dim": self.batch_dim}
        return {"batch": self.batch, "loader": self.at, **own}

    def batch(self, n: int) -> Any:
        """Returns n samples, drawn by torch's global generator."""
        if isinstance(self.loader, DataLoader) and (n != self.batch_size or _is_plain(self.loader)):
            return _collated(self.loader, n)
        if n != self.batch_size:
            raise self._no_other_size(n)
        if not self._kept:
            self._kept = _first_of(self.loader)
        return self._kept[int(torch.randint(len(self._kept), ()))]

    def at(self, batch_size: int) -> Iterable[Any]:
        """Returns the loader, or one like it that makes batches of another size."""
        if batch_size == self.batch_size:
            return self.loader
        if not isinstance(self.loader, DataLoader) or type(self.loader.batch_sampler) is not BatchSampler:
            raise self._no_other_size(batch_size)
        return _resized(self.loader, batch_size)

    def _no_other_size(self, n: int) -> TargetError:
        kind = type(self.loader).__name__
        return TargetError(f"no batches of {n} can be made of this {kind}: it decides itself what is in a batch")

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the batches, which each process draws anew, and the loader's running worker processes."""
        loader: Any = self.loader
        if isinstance(loader, DataLoader):
            loader = copy.copy(loader)
            loader._iterator = None
            if loader.num_workers and _is_of_main(loader):
                loader.multiprocessing_context = "fork"  # other kinds of processes cannot import what came by value
        own = {"batch_size": self.batch_size, "batch_dim": self.batch_dim}
        return {"loader": loader, **own, "_kept": []}


def _size_of(loader: Iterable[Any], shapes: Sequence[torch.Size], batch_dim: int | None, *, is_time_major: bool) -> int:
    kind = type(loader).__name__
    if isinstance(loader, DataLoader):
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
        if not isinstance(size, int):
            raise TargetError(f"the {kind} does not tell its batch size: pass batch_size=…")
        return size
    if not shapes or max(map(len, shapes)) <= (batch_dim or 0):
        lacking = f": no tensor of its batches has an axis {batch_dim}" if shapes else ""
        raise TargetError(f"the {kind} does not tell its batch size{lacking}: pass batch_size=…")
    first = {shape[min(batch_dim or 0, len(shape) - 1)] for shape in shapes}
    if len(first) == 1 and (batch_dim is not None or not is_time_major):
        return first.pop()
    common = set.intersection(*map(set, shapes))
    if len(common) == 1 and (len(first) > 1 or not is_time_major):
        return common.pop()
    raise TargetError(
        f"the batches of this {kind} do not show which axis holds the samples: write batch_dim=1 if it is the second "
        "(time, samples, …), as in Workload(batch_dim=1), batch_dim=0 if it is the first, or pass batch_size=…"
    )


def _axis_of(shapes: Sequence[torch.Size], batch_size: int) -> int:
    """Returns 1 if that axis has the batch size as its length where tensors have two, and the first has not; else 0."""
    wide = [shape for shape in shapes if len(shape) > 1]
    return int(bool(wide) and all(shape[1] == batch_size != shape[0] for shape in wide))


def _shapes_in(loader: Iterable[Any]) -> list[torch.Size]:
    """Returns the shapes of the tensors in the first batches but the last of them, which may be smaller."""
    with _own_randomness():
        first = list(islice(loader, MOST_SEEN))
    return [tensor.shape for batch in first[:-1] or first for tensor in tensors_in(batch) if tensor.ndim]


def _is_of_main(loader: DataLoader[Any]) -> bool:
    parts = (type(loader.dataset), loader.collate_fn, loader.worker_init_fn)
    return any(getattr(part, "__module__", None) == "__main__" for part in parts)


def _is_plain(loader: DataLoader[Any]) -> bool:
    """Returns True if any samples may go together in a batch."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler or isinstance(loader.dataset, IterableDataset):
        return False
    return isinstance(batches.sampler, RandomSampler | SequentialSampler)


def _collated(loader: DataLoader[Any], n: int) -> Any:
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        samples: list[Any] = []
        while len(samples) < n and (more := list(islice(dataset, n - len(samples)))):
            samples += more
    else:
        if len(dataset) == 0:
            raise TargetError("the loader's dataset is empty")
        indices = torch.randint(len(dataset), (n,)).tolist()
        many = getattr(dataset, "__getitems__", None)
        samples = [dataset[index] for index in indices] if many is None else many(indices)
    return loader.collate_fn(samples)


def _first_of(loader: Iterable[Any]) -> list[Any]:
    """Returns the first batches, the same in each process; without the last of an epoch, which may be smaller."""
    batches: list[Any] = []
    with _own_randomness():
        for batch in islice(loader, MOST_KEPT + 1):
            batches.append(batch)
            if sum(part.nbytes for tensor in tensors_in(batches) for part in stored_in(tensor)) > LARGE_BYTES:
                break
    if not batches:
        raise TargetError("the loader yields no batch: is its dataset empty?")
    return batches[:-1] or batches


@contextmanager
def _own_randomness() -> Iterator[None]:
    """Seeds the global generators, and puts them back: other draws must not depend on when this one took place."""
    import numpy as np

    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def _resized(loader: DataLoader[Any], batch_size: int) -> DataLoader[Any]:
    batches: Any = loader.batch_sampler
    return DataLoader(
        loader.dataset,
        batch_size,
        sampler=None if isinstance(loader.dataset, IterableDataset) else batches.sampler,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        drop_last=batches.drop_last,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
        persistent_workers=loader.persistent_workers,
    )
