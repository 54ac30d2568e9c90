"""DenseNet-161 (Huang et al., 2016, arXiv:1608.06993) on CIFAR-10's image size, with the ImageNet stem.

Its many small kernels make the step launch-bound, which gives noisy timings: a hard test for measuring.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from amptune.workload.zoo.layers import conv, he_normal, named
from amptune.workload.zoo.recipes import classification

if TYPE_CHECKING:
    from amptune.workload.workload import Workload

__all__ = ["densenet161"]

_GROWTH = 48
_DEPTHS = (6, 12, 36, 24)


def densenet161(*, classes: int = 10, side: int = 32, batch_size: int = 256) -> Workload:
    model = partial(_model, classes)
    return classification(name="densenet161", model=model, classes=classes, side=side, batch_size=batch_size)


class DenseLayer(nn.Module):
    """A layer that appends `_GROWTH` new channels to its input."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        width = 4 * _GROWTH
        self.growth = named(
            norm1=nn.BatchNorm2d(inputs),
            relu1=nn.ReLU(inplace=True),
            conv1=conv(inputs, width, 1),
            norm2=nn.BatchNorm2d(width),
            relu2=nn.ReLU(inplace=True),
            conv2=conv(width, _GROWTH, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.growth(x)], dim=1)


def _model(classes: int) -> nn.Sequential:
    channels = 2 * _GROWTH
    parts: dict[str, nn.Module] = {"stem": _stem(channels)}
    for i, depth in enumerate(_DEPTHS, start=1):
        if i > 1:
            parts[f"transition{i - 1}"] = _transition(channels)
            channels //= 2
        parts[f"denseblock{i}"] = nn.Sequential(*(DenseLayer(channels + j * _GROWTH) for j in range(depth)))
        channels += depth * _GROWTH
    features = named(**parts, norm=nn.BatchNorm2d(channels), relu=nn.ReLU(inplace=True))
    head = {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "classifier": nn.Linear(channels, classes)}
    return he_normal(named(features=features, **head))


def _stem(channels: int) -> nn.Sequential:
    return named(
        conv=conv(3, channels, 7, stride=2),
        norm=nn.BatchNorm2d(channels),
        relu=nn.ReLU(inplace=True),
        pool=nn.MaxPool2d(3, stride=2, padding=1),
    )


def _transition(channels: int) -> nn.Sequential:
    return named(
        norm=nn.BatchNorm2d(channels),
        relu=nn.ReLU(inplace=True),
        conv=conv(channels, channels // 2, 1),
        pool=nn.AvgPool2d(2),
    )
