"""DeepLabV3+ over a ResNet-101 (Chen et al., 2018, arXiv:1802.02611), on street scenes with 19 classes.

Output stride 16, plain (not separable) convolutions, images of half Cityscapes' size cropped to 512x896.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from amptune.workload.workload import Workload
from amptune.workload.zoo.layers import conv_bn_relu, he_normal, named
from amptune.workload.zoo.recipes import in_memory, sgd
from amptune.workload.zoo.resnet import bottleneck, stages

__all__ = ["deeplabv3plus"]

_UNLABELLED = 255


def deeplabv3plus(*, classes: int = 19, height: int = 512, width: int = 896, batch_size: int = 4) -> Workload:
    scenes = partial(_scenes, height=height, width=width, classes=classes)
    return Workload(
        name="deeplabv3plus",
        model=partial(DeepLabV3Plus, classes),
        batch=scenes,
        loader=partial(in_memory, batch=scenes),
        loss=_pixel_cross_entropy,
        optimizer=sgd,
        batch_size=batch_size,
    )


class DeepLabV3Plus(nn.Module):
    """A network from images to logits per pixel: coarse context, refined by the first stage's features."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        backbone = stages(bottleneck, (3, 4, 23, 3), last_dilation=2)
        self.shallow = named(stem=backbone.pop("stem"), layer1=backbone.pop("layer1"))
        self.deep = named(**backbone)
        self.aspp = AtrousPyramid(2048, 256)
        self.sharpen = conv_bn_relu(256, 48, 1)
        self.decoder = named(
            conv1=conv_bn_relu(256 + 48, 256, 3), conv2=conv_bn_relu(256, 256, 3), classifier=nn.Conv2d(256, classes, 1)
        )
        he_normal(self)

    def forward(self, images: Tensor) -> Tensor:
        edges: Tensor = self.shallow(images)
        context = _resized(self.aspp(self.deep(edges)), like=edges)
        logits = self.decoder(torch.cat([context, self.sharpen(edges)], dim=1))
        return _resized(logits, like=images)


class AtrousPyramid(nn.Module):
    """Atrous spatial pyramid pooling: convolutions of the features at several dilations, and their average."""

    def __init__(self, inputs: int, outputs: int, *, rates: tuple[int, ...] = (6, 12, 18)) -> None:
        super().__init__()
        atrous = (conv_bn_relu(inputs, outputs, 3, dilation=rate) for rate in rates)
        self.branches = nn.ModuleList([conv_bn_relu(inputs, outputs, 1), *atrous])
        self.average = named(pool=nn.AdaptiveAvgPool2d(1), project=conv_bn_relu(inputs, outputs, 1))
        self.project = conv_bn_relu(outputs * (len(rates) + 2), outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = [branch(x) for branch in self.branches]
        seen.append(_resized(self.average(x), like=x))
        projected: Tensor = self.project(torch.cat(seen, dim=1))
        return projected


def _resized(x: Tensor, *, like: Tensor) -> Tensor:
    return functional.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)


def _scenes(n: int, *, height: int, width: int, classes: int) -> tuple[Tensor, Tensor]:
    """Returns images (n, 3, height, width) and a label per pixel; about 1 / (classes + 1) are unlabelled."""
    labels = torch.randint(classes + 1, (n, height, width))
    return torch.randn(n, 3, height, width), labels.masked_fill(labels == classes, _UNLABELLED)


def _pixel_cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return functional.cross_entropy(model(images), labels, ignore_index=_UNLABELLED)
