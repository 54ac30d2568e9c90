"""One strided convolution with 3 input channels, from a question on PyTorch's forum.

Half precision and channels_last make it faster on some GPUs and slower on others.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from amptune.workload.workload import Workload
from amptune.workload.zoo.layers import named
from amptune.workload.zoo.recipes import in_memory, sgd

__all__ = ["conv1"]


def conv1(*, side: int = 224, batch_size: int = 64) -> Workload:
    images = partial(_images, side=side)
    return Workload(
        name="conv1",
        model=_model,
        batch=images,
        loader=partial(in_memory, batch=images),
        loss=_mean_square,
        optimizer=sgd,
        batch_size=batch_size,
    )


def _model() -> nn.Sequential:
    return named(conv=nn.Conv2d(3, 64, kernel_size=3, stride=2, padding=1))


def _images(n: int, *, side: int) -> Tensor:
    return torch.randn(n, 3, side, side)


def _mean_square(model: nn.Module, images: Tensor) -> Tensor:
    output: Tensor = model(images)
    return output.square().mean()
