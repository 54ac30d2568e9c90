"""Data, losses and optimizers that several bundled workloads share.

Synthetic data is drawn on the CPU from PyTorch's global generator, anew at each call: `torch.manual_seed`
makes it reproducible.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset

from amptune.changes.tensor_tree import map_tensors
from amptune.workload.workload import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["adamw", "classification", "cross_entropy", "in_memory", "labelled_images", "sgd"]

# Number of batches a loader holds in memory: pinned memory is scarce, and 128 images of 224² take 77 MB.
_BATCHES_HELD = 4


def classification(*, name: str, model: Callable[[], nn.Module], classes: int, side: int, batch_size: int) -> Workload:
    """Returns a workload: an image classifier trained by SGD on random square images of `side` pixels."""
    images = partial(labelled_images, side=side, classes=classes)
    return Workload(
        name=name,
        model=model,
        batch=images,
        loader=partial(in_memory, batch=images),
        loss=cross_entropy,
        optimizer=sgd,
        batch_size=batch_size,
    )


def labelled_images(n: int, *, side: int, classes: int) -> tuple[Tensor, Tensor]:
    """Returns images of shape (n, 3, side, side) and labels of shape (n,)."""
    return torch.randn(n, 3, side, side), torch.randint(classes, (n,))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def sgd(model: nn.Module) -> torch.optim.SGD:
    """Returns SGD with a tenth of the usual rate of 0.1: only a run's first steps are taken, which need a warm-up."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def in_memory(batch_size: int, *, batch: Callable[[int], Any]) -> DataLoader[Any]:
    """Returns a DataLoader over samples that `batch` drew once: an input pipeline that is never the bottleneck.

    Only copying to the device remains, from pinned memory if there is a GPU. Loading and collating cost nothing,
    so worker processes could not make it faster.
    """
    samples = batch(_BATCHES_HELD * batch_size)
    if torch.cuda.is_available():
        samples = map_tensors(Tensor.pin_memory, samples)
    return DataLoader(_Windows(samples, batch_size), batch_size=None, collate_fn=_as_they_are)


class _Windows(IterableDataset[Any]):
    """Batches of neighbouring samples with random starts, given as views, so that nothing is copied."""

    def __init__(self, samples: Any, batch_size: int) -> None:
        self._samples = samples
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:
        for start in torch.randperm((_BATCHES_HELD - 1) * self._batch_size + 1).tolist():
            window = slice(start, start + self._batch_size)
            yield map_tensors(lambda samples, window=window: samples[window], self._samples)  # type: ignore[misc]


def _as_they_are(batch: Any) -> Any:
    """Replaces DataLoader's own conversion, which turns tuples into lists."""
    return batch
