"""VGG-16 with batch normalization (Simonyan & Zisserman, 2014, arXiv:1409.1556) on CIFAR-10's image size.

It keeps the paper's classifier of three Linear layers, which has 119 million of the 134 million weights. On
small images, casting these weights at each step can cost more time than half precision saves.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from amptune.workload.zoo.layers import he_normal, named
from amptune.workload.zoo.recipes import classification

if TYPE_CHECKING:
    from amptune.workload.workload import Workload

__all__ = ["vgg16"]

# Configuration D of the paper: the widths of the convolutions between the poolings.
_STAGES = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


def vgg16(*, classes: int = 10, side: int = 32, hidden: int = 4096, batch_size: int = 128) -> Workload:
    model = partial(_model, classes, hidden)
    return classification(name="vgg16", model=model, classes=classes, side=side, batch_size=batch_size)


def _model(classes: int, hidden: int) -> nn.Sequential:
    network = named(
        features=_features(),
        avgpool=nn.AdaptiveAvgPool2d(7),
        flatten=nn.Flatten(),
        classifier=_classifier(classes, hidden),
    )
    return he_normal(network)


def _features() -> nn.Sequential:
    layers: list[nn.Module] = []
    inputs = 3
    for widths in _STAGES:
        for width in widths:
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


def _classifier(classes: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(
        _linear(512 * 7 * 7, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        _linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(0.5),
        _linear(hidden, classes),
    )


def _linear(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.normal_(layer.weight, std=0.01)
    nn.init.zeros_(layer.bias)
    return layer
