"""The networks of images in the published tables, from their papers at the sizes that were measured, as targets.

    amptune predict reports/published_models.py:ssd --gpu all

What is left out of a model or simplified is said at it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from amptune.workload.workload import Workload
from amptune.workload.zoo.layers import conv, conv_bn, conv_bn_relu, named
from amptune.workload.zoo.recipes import adamw, classification, sgd
from amptune.workload.zoo.resnet import Residual, SqueezeExcitation, bottleneck, residual_network, stages
from amptune.workload.zoo.resnet import resnet50 as zoo_resnet50


def as_workload(name: str, model: Callable[[], nn.Module], batch: Callable[[int], Any], **more: Any) -> Workload:
    """Returns a workload whose loss is the mean square of what the model returns: a cheap loss beside the model."""
    return Workload(**{"name": name, "model": model, "batch": batch, "loss": _mean_square, "optimizer": adamw, **more})


def _mean_square(model: nn.Module, batch: Any) -> Tensor:
    output: Tensor = model(*batch) if isinstance(batch, tuple) else model(batch)
    return output.float().square().mean()


def drawn(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape)


def resnet50() -> Workload:
    """ResNet-50 v1.5, 224²."""
    return zoo_resnet50()


def _resnext(inputs: int, width: int, *, stride: int = 1, dilation: int = 1, gate: bool = False) -> Residual:
    body = named(
        conv1=conv_bn_relu(inputs, 2 * width, 1),
        conv2=conv_bn_relu_grouped(2 * width, stride=stride, dilation=dilation),
        conv3=conv_bn(2 * width, 4 * width, 1),
    )
    if gate:
        body.add_module("se", SqueezeExcitation(4 * width))
    return Residual(body, inputs, 4 * width, stride=stride)


def conv_bn_relu_grouped(width: int, *, stride: int, dilation: int) -> nn.Sequential:
    """Returns a 3x3 convolution in 32 groups with its normalization."""
    grouped = conv(width, width, 3, stride=stride, dilation=dilation, groups=32)
    return named(conv=grouped, bn=nn.BatchNorm2d(width), relu=nn.ReLU(inplace=True))


def resnext101() -> Workload:
    """ResNeXt-101 32x4d, 224²."""
    model = partial(residual_network, _resnext, (3, 4, 23, 3), features=2048, classes=1000)
    return classification(name="resnext101", model=model, classes=1000, side=224, batch_size=128)


def se_resnext101() -> Workload:
    """SE-ResNeXt-101 32x4d, 224²."""
    model = partial(residual_network, partial(_resnext, gate=True), (3, 4, 23, 3), features=2048, classes=1000)
    return classification(name="se_resnext101", model=model, classes=1000, side=224, batch_size=128)


class InvertedResidual(nn.Module):
    """EfficientNet's block (Tan and Le, 2019, arXiv:1905.11946): widen, depthwise, gate, narrow."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, widening: int) -> None:
        super().__init__()
        width = inputs * widening
        widen = [conv(inputs, width, 1), nn.BatchNorm2d(width), nn.SiLU(inplace=True)] if widening > 1 else []
        depthwise = conv(width, width, kernel, stride=stride, groups=width)
        gate = SqueezeExcitation(width, reduction=4 * widening)
        narrow = [conv(width, outputs, 1), nn.BatchNorm2d(outputs)]
        self.body = nn.Sequential(*widen, depthwise, nn.BatchNorm2d(width), nn.SiLU(inplace=True), gate, *narrow)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.adds else y


def _efficientnet(wider: float, deeper: float) -> nn.Sequential:
    def channels(n: float) -> int:
        return max(8, int(n * wider + 4) // 8 * 8)

    parts: list[nn.Module] = [conv(3, channels(32), 3, stride=2), nn.BatchNorm2d(channels(32)), nn.SiLU(inplace=True)]
    inputs = channels(32)
    rows = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5),
            (6, 192, 4, 2, 5), (6, 320, 1, 1, 3))  # fmt: skip
    for widening, outputs, depth, stride, kernel in rows:
        for i in range(math.ceil(depth * deeper)):
            parts.append(InvertedResidual(inputs, channels(outputs), kernel, stride if i == 0 else 1, widening))
            inputs = channels(outputs)
    head = channels(1280)
    return nn.Sequential(
        *parts, conv(inputs, head, 1), nn.BatchNorm2d(head), nn.SiLU(inplace=True), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(head, 1000)
    )  # fmt: skip


def efficientnet_b0() -> Workload:
    """EfficientNet-B0, 224²."""
    model = partial(_efficientnet, 1.0, 1.0)
    return classification(name="efficientnet_b0", model=model, classes=1000, side=224, batch_size=256)


def efficientnet_b4() -> Workload:
    """EfficientNet-B4, 380²."""
    model = partial(_efficientnet, 1.4, 1.8)
    return classification(name="efficientnet_b4", model=model, classes=1000, side=380, batch_size=64)


class Ssd(nn.Module):
    """SSD300 (Liu et al., 2016, arXiv:1512.02325) over ResNet-50 to its third stage, which does not stride."""

    def __init__(self) -> None:
        super().__init__()
        trunk = stages(bottleneck, (3, 4, 6, 3))
        layer3 = [bottleneck(512 if i == 0 else 1024, 256) for i in range(6)]
        self.trunk = named(
            stem=trunk["stem"], layer1=trunk["layer1"], layer2=trunk["layer2"], layer3=nn.Sequential(*layer3)
        )
        widths = (1024, 512, 512, 256, 256, 256)
        middle = (256, 256, 128, 128, 128)
        self.extra = nn.ModuleList(
            nn.Sequential(
                conv_bn_relu(a, m, 1),
                nn.Conv2d(m, b, 3, 2 if i < 3 else 1, 1 if i < 3 else 0, bias=False),
                nn.BatchNorm2d(b),
                nn.ReLU(inplace=True),
            )
            for i, (a, m, b) in enumerate(zip(widths, middle, widths[1:], strict=False))
        )
        boxes = (4, 6, 6, 6, 4, 4)
        self.heads = nn.ModuleList(nn.Conv2d(w, n * 85, 3, padding=1) for w, n in zip(widths, boxes, strict=True))

    def forward(self, images: Tensor) -> Tensor:
        maps = [self.trunk(images)]
        for layer in self.extra:
            maps.append(layer(maps[-1]))
        return torch.cat([head(x).flatten(1) for head, x in zip(self.heads, maps, strict=True)], 1)


def ssd() -> Workload:
    return as_workload("ssd", Ssd, drawn(3, 300, 300), optimizer=sgd, batch_size=32)


class UNet(nn.Module):
    """nnU-Net's network (Isensee et al., 2021, doi:10.1038/s41592-020-01008-z) in 2 or 3 dimensions."""

    def __init__(self, dims: int, inputs: int, classes: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        self.conv = nn.Conv2d if dims == 2 else nn.Conv3d
        self.up = nn.ConvTranspose2d if dims == 2 else nn.ConvTranspose3d
        self.norm = nn.InstanceNorm2d if dims == 2 else nn.InstanceNorm3d
        self.downs = nn.ModuleList(
            self._pair(a, b, 1 if i == 0 else 2)
            for i, (a, b) in enumerate(zip((inputs, *widths), widths, strict=False))
        )
        pairs = list(zip(widths[::-1], widths[-2::-1], strict=False))
        self.ups = nn.ModuleList(self.up(a, b, 2, 2) for a, b in pairs)
        self.joins = nn.ModuleList(self._pair(2 * b, b, 1) for _, b in pairs)
        self.head = self.conv(widths[0], classes, 1)

    def _pair(self, inputs: int, outputs: int, stride: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for a, s in ((inputs, stride), (outputs, 1)):
            layers += [
                self.conv(a, outputs, 3, s, 1),
                self.norm(outputs, affine=True),
                nn.LeakyReLU(0.01, inplace=True),
            ]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        seen: list[Tensor] = []
        for down in self.downs:
            x = down(x)
            seen.append(x)
        for up, join, skip in zip(self.ups, self.joins, seen[-2::-1], strict=True):
            x = join(torch.cat([up(x), skip], 1))
        output: Tensor = self.head(x)
        return output


def nnunet_2d() -> Workload:
    """Brain tumours, slices of 192 x 160."""
    model = partial(UNet, 2, 5, 4, (32, 64, 128, 256, 512, 512))
    return as_workload("nnunet_2d", model, drawn(5, 192, 160), batch_size=64)


def nnunet_3d() -> Workload:
    """Brain tumours, volumes of 128³."""
    model = partial(UNet, 3, 5, 4, (32, 64, 128, 256, 320, 320))
    return as_workload("nnunet_3d", model, drawn(5, 128, 128, 128), batch_size=2)
