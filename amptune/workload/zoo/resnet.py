"""ResNet-50 (He et al., 2015, arXiv:1512.03385).

In its v1.5 form (Goyal et al., 2017, arXiv:1706.02677): a bottleneck has its stride in the 3x3 convolution.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional

from amptune.workload.zoo.layers import conv, conv_bn, he_normal, named
from amptune.workload.zoo.recipes import classification

if TYPE_CHECKING:
    from amptune.workload.workload import Workload

__all__ = ["resnet50"]

# Of each stage: its number of blocks, the width of their 3x3 convolutions, the stride of the first.
_STAGES = {"layer1": (3, 64, 1), "layer2": (4, 128, 2), "layer3": (6, 256, 2), "layer4": (3, 512, 2)}
_STEM_CHANNELS, _EXPANSION = 64, 4


def resnet50(*, classes: int = 1000, side: int = 224, batch_size: int = 128) -> Workload:
    model = partial(_model, classes)
    return classification(name="resnet50", model=model, classes=classes, side=side, batch_size=batch_size)


def _model(classes: int) -> nn.Sequential:
    stages: dict[str, nn.Module] = {}
    channels = _STEM_CHANNELS
    for name, (blocks, width, stride) in _STAGES.items():
        first = Residual(channels, width, stride=stride)
        channels = _EXPANSION * width
        stages[name] = nn.Sequential(first, *(Residual(channels, width) for _ in range(blocks - 1)))
    return he_normal(
        named(
            stem=_stem(),
            **stages,
            pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),
            fc=nn.Linear(channels, classes),
        )
    )


def _stem() -> nn.Sequential:
    return named(
        conv=conv(3, _STEM_CHANNELS, 7, stride=2),
        bn=nn.BatchNorm2d(_STEM_CHANNELS),
        relu=nn.ReLU(inplace=True),
        pool=nn.MaxPool2d(3, stride=2, padding=1),
    )


class Residual(nn.Module):
    """A residual block, relu(body(x) + x), with a 1x1 convolution on the shortcut if the shape changes."""

    def __init__(self, inputs: int, width: int, *, stride: int = 1) -> None:
        super().__init__()
        outputs = _EXPANSION * width
        self.body = named(
            conv1=conv(inputs, width, 1),
            bn1=nn.BatchNorm2d(width),
            relu1=nn.ReLU(inplace=True),
            conv2=conv(width, width, 3, stride=stride),
            bn2=nn.BatchNorm2d(width),
            relu2=nn.ReLU(inplace=True),
            conv3=conv(width, outputs, 1),
            bn3=nn.BatchNorm2d(outputs),
        )
        same_shape = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same_shape else conv_bn(inputs, outputs, 1, stride=stride)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.body(x) + self.shortcut(x), inplace=True)
