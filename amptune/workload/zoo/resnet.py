"""ResNet (He et al., 2015, arXiv:1512.03385), and SE-ResNeXt, which is built of the same blocks.

ResNet is in its v1.5 form (Goyal et al., 2017, arXiv:1706.02677): a bottleneck has its stride in the 3x3 convolution.
SE-ResNeXt-50 32x4d, on CIFAR-10's image size, has grouped convolutions and a computed gate for each channel
(Xie et al., 2016, arXiv:1611.05431; Hu et al., 2017, arXiv:1709.01507).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional

from amptune.workload.zoo.layers import conv, conv_bn, he_normal, named
from amptune.workload.zoo.recipes import classification

if TYPE_CHECKING:
    from amptune.workload.workload import Workload

__all__ = [
    "Block",
    "Residual",
    "bottleneck",
    "residual_network",
    "resnet18",
    "resnet50",
    "seresnext50",
    "stages",
]

# block(inputs, width, *, stride=1, dilation=1)
Block = Callable[..., "Residual"]


def resnet18(*, classes: int = 1000, side: int = 224, batch_size: int = 64) -> Workload:
    model = partial(residual_network, _basic, (2, 2, 2, 2), features=512, classes=classes)
    return classification(name="resnet18", model=model, classes=classes, side=side, batch_size=batch_size)


def resnet50(*, classes: int = 1000, side: int = 224, batch_size: int = 128) -> Workload:
    model = partial(residual_network, bottleneck, (3, 4, 6, 3), features=2048, classes=classes)
    return classification(name="resnet50", model=model, classes=classes, side=side, batch_size=batch_size)


class Residual(nn.Module):
    """A residual block, relu(body(x) + x), with a 1x1 convolution on the shortcut if the shape changes."""

    def __init__(self, body: nn.Sequential, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__()
        self.outputs = outputs
        self.body = body
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same_shape else conv_bn(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x), inplace=True)


def _basic(inputs: int, width: int, *, stride: int = 1, dilation: int = 1) -> Residual:
    body = named(
        conv1=conv(inputs, width, 3, stride=stride, dilation=dilation),
        bn1=nn.BatchNorm2d(width),
        relu1=nn.ReLU(inplace=True),
        conv2=conv(width, width, 3, dilation=dilation),
        bn2=nn.BatchNorm2d(width),
    )
    return Residual(body, inputs, width, stride=stride)


def bottleneck(inputs: int, width: int, *, stride: int = 1, dilation: int = 1) -> Residual:
    outputs = 4 * width
    body = _bottleneck_body(inputs, width, outputs, stride=stride, dilation=dilation)
    return Residual(body, inputs, outputs, stride=stride)


def _bottleneck_body(
    inputs: int, width: int, outputs: int, *, stride: int = 1, dilation: int = 1, groups: int = 1
) -> nn.Sequential:
    return named(
        conv1=conv(inputs, width, 1),
        bn1=nn.BatchNorm2d(width),
        relu1=nn.ReLU(inplace=True),
        conv2=conv(width, width, 3, stride=stride, dilation=dilation, groups=groups),
        bn2=nn.BatchNorm2d(width),
        relu2=nn.ReLU(inplace=True),
        conv3=conv(width, outputs, 1),
        bn3=nn.BatchNorm2d(outputs),
    )


def stages(block: Block, depths: Sequence[int], *, last_dilations: Sequence[int] = ()) -> dict[str, nn.Module]:
    """Returns the stem and the stages `layer1` to `layer4`, by name.

    With `last_dilations`, one for each of its blocks, the last stage dilates instead of striding: output stride 16.
    """
    trunk: dict[str, nn.Module] = {"stem": _stem()}
    names = ("layer1", "layer2", "layer3", "layer4")
    widths = (64, 128, 256, 512)
    strides = (1, 2, 2, 1 if last_dilations else 2)
    inputs = 64
    for name, width, depth, stride in zip(names, widths, depths, strides, strict=True):
        dilations = last_dilations if last_dilations and name == "layer4" else (1,) * depth
        blocks = [block(inputs, width, stride=stride, dilation=dilations[0])]
        inputs = blocks[0].outputs
        blocks += (block(inputs, width, dilation=dilation) for dilation in dilations[1:])
        trunk[name] = nn.Sequential(*blocks)
    return trunk


def _stem() -> nn.Sequential:
    return named(
        conv=conv(3, 64, 7, stride=2),
        bn=nn.BatchNorm2d(64),
        relu=nn.ReLU(inplace=True),
        pool=nn.MaxPool2d(3, stride=2, padding=1),
    )


def residual_network(block: Block, depths: Sequence[int], *, features: int, classes: int) -> nn.Sequential:
    """Returns a classifier over `stages`, the last of which has `features` output channels."""
    return he_normal(
        named(
            **stages(block, depths),
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(features, classes),
        )
    )


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
    body = _bottleneck_body(inputs, 2 * width, outputs, stride=stride, dilation=dilation, groups=32)
    body.add_module("se", SqueezeExcitation(outputs))
    return Residual(body, inputs, outputs, stride=stride)
