"""DataLoaders with other settings: in place of those that they are built with, or of one that is built."""

from __future__ import annotations

import copy
from collections.abc import Sized
from contextlib import suppress
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch.utils.data import DataLoader, IterableDataset

from amptune.policy.knobs.loader import Loader

__all__ = [
    "DatasetMark",
    "LikeDataLoader",
    "are_alike",
    "data_loader_in",
    "end_workers",
    "like",
    "options_of",
    "settings_of",
]


T = TypeVar("T")


@runtime_checkable
class LikeDataLoader(Protocol):
    """An iterable over a `data_loader`; `like` returns one with other settings of that."""

    data_loader: DataLoader[Any]

    def like(self, settings: Loader) -> LikeDataLoader: ...

    def close(self) -> None:
        """Ends worker processes that nothing else uses."""


def data_loader_in(loader: object) -> DataLoader[Any] | None:
    """Returns the DataLoader that is iterated over; None if it is something else."""
    found = loader.data_loader if isinstance(loader, LikeDataLoader) else loader
    return found if isinstance(found, DataLoader) else None


def are_alike(loader: DataLoader[Any], other: DataLoader[Any]) -> bool:
    """Returns True for loaders of one dataset that a script builds anew for each epoch."""
    same = loader.dataset is other.dataset and loader.batch_size == other.batch_size
    return same and type(loader) is type(other) and type(loader.sampler) is type(other.sampler)


def settings_of(loader: DataLoader[Any]) -> Loader:
    """Returns the settings that a loader has."""
    workers = loader.num_workers
    return Loader(
        num_workers=workers,
        pin_memory=bool(loader.pin_memory),
        persistent_workers=bool(workers and loader.persistent_workers),
        prefetch_factor=loader.prefetch_factor if workers else None,
    )


def options_of(settings: Loader, dataset: Any, own_workers: int) -> dict[str, Any]:
    """Returns the options with which a DataLoader of this dataset is built, in place of its own.

    The number of workers of an `IterableDataset` stays: each of them iterates over all that the dataset does not share
    out by itself (https://docs.pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset).
    """
    workers = own_workers if isinstance(dataset, IterableDataset) else settings.num_workers
    return {
        "num_workers": workers,
        "pin_memory": settings.pin_memory,
        "persistent_workers": settings.persistent_workers and workers > 0,
        "prefetch_factor": (settings.prefetch_factor or 2) if workers else None,
    }


def like(loader: T, settings: Loader) -> T:
    """Returns a loader of the same class, dataset and samplers, with these settings; anything else as it is."""
    if isinstance(loader, LikeDataLoader):
        return loader.like(settings)  # type: ignore[return-value]
    if not isinstance(loader, DataLoader):
        return loader
    other = copy.copy(loader)
    vars(other).update(options_of(settings, loader.dataset, loader.num_workers), _iterator=None)
    return other


def end_workers(loader: DataLoader[Any], iterator: Any) -> None:
    """Ends the worker processes of a loader's iterator; the next epoch begins with new ones."""
    shut_down = getattr(iterator, "_shutdown_workers", lambda: None)  # torch has no public way
    shut_down()
    if loader._iterator is iterator:
        loader._iterator = None  # persistent workers: the next epoch would wait for the ended ones


class DatasetMark:
    """A mark of a dataset at one moment. One that changes between two cannot be read by processes with copies of it."""

    def __init__(self, dataset: Any) -> None:
        self._held = _held_by(dataset)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DatasetMark) and self._held == other._held

    __hash__ = None  # type: ignore[assignment]


def _held_by(dataset: Any) -> list[tuple[Any, ...]]:
    """Returns each attribute of a dataset, and of one within it, with its length and how often it was written to."""
    held: list[tuple[Any, ...]] = []
    while dataset is not None:
        for name, value in getattr(dataset, "__dict__", {}).items():
            held.append((name, value if isinstance(value, bool | int | float | str) else id(value)))
            with suppress(Exception):  # lengths of some raise, and so do the versions of inference tensors
                held.append((len(value) if isinstance(value, Sized) else 0, getattr(value, "_version", 0)))
        dataset = getattr(dataset, "dataset", None)
    return held
