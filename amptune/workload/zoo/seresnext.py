"""SE-ResNeXt-50 32x4d on CIFAR-10's image size: grouped convolutions, and a computed gate for each channel.

Xie et al., 2016 (arXiv:1611.05431) and Hu et al., 2017 (arXiv:1709.01507).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from amptune.workload.zoo.layers import named
from amptune.workload.zoo.recipes import classification
from amptune.workload.zoo.resnet import Residual, bottleneck_body, residual_network

if TYPE_CHECKING:
    from amptune.workload.protocol import Workload

__all__ = ["seresnext50"]


def seresnext50(*, classes: int = 10, side: int = 32, batch_size: int = 256) -> Workload:
    model = partial(residual_network, _block, (3, 4, 6, 3), features=2048, classes=classes)
    return classification(name="seresnext50", model=model, classes=classes, side=side, batch_size=batch_size)


class SqueezeExcitation(nn.Module):
    """A layer that scales each channel by a gate between 0 and 1, computed from the whole image."""

    def __init__(self, channels: int, *, reduction: int = 16) -> None:
        super().__init__()
        self.gate = named(
            pool=nn.AdaptiveAvgPool2d(1),
            reduce=nn.Conv2d(channels, channels // reduction, 1),
            relu=nn.ReLU(inplace=True),
            expand=nn.Conv2d(channels // reduction, channels, 1),
            sigmoid=nn.Sigmoid(),
        )

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.gate(x)
        return x * gate


def _block(inputs: int, width: int, *, stride: int = 1, dilation: int = 1) -> Residual:
    outputs = 4 * width
    body = bottleneck_body(inputs, 2 * width, outputs, stride=stride, dilation=dilation, groups=32)
    body.add_module("se", SqueezeExcitation(outputs))
    return Residual(body, inputs, outputs, stride=stride)
