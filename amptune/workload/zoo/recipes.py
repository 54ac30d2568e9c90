"""Data, losses and optimizers that several bundled workloads share.

Synthetic data is drawn on the CPU from PyTorch's global generator, anew at each call: `torch.manual_seed`
makes it reproducible.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from amptune.workload.protocol import Workload

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["adamw", "classification", "cross_entropy", "labelled_images", "sgd"]


def classification(*, name: str, model: Callable[[], nn.Module], classes: int, side: int, batch_size: int) -> Workload:
    """An image classifier trained by SGD on random square images of `side` pixels."""
    return Workload(
        name=name,
        model=model,
        batch=partial(labelled_images, side=side, classes=classes),
        loss=cross_entropy,
        optimizer=sgd,
        batch_size=batch_size,
    )


def labelled_images(n: int, *, side: int, classes: int) -> tuple[Tensor, Tensor]:
    """Images of shape (n, 3, side, side) and labels of shape (n,)."""
    return torch.randn(n, 3, side, side), torch.randint(classes, (n,))


def cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels)


def sgd(model: nn.Module) -> torch.optim.SGD:
    """A tenth of the usual rate of 0.1: only a run's first steps are taken here, and those need a warm-up."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)
