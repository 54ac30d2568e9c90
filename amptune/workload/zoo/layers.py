"""Layers that the bundled networks of images share."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from torch import nn

__all__ = ["conv", "conv_bn", "conv_bn_relu", "he_normal", "named"]

Network = TypeVar("Network", bound=nn.Module)


def named(**children: nn.Module) -> nn.Sequential:
    """Returns a Sequential whose children have names, so that a policy can name `layer1.0.body.conv2`."""
    return nn.Sequential(OrderedDict(children))


def conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> nn.Conv2d:
    """Returns a convolution padded to keep the image size (before its stride); no bias, as a BatchNorm is adjacent."""
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)


def conv_bn(inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> nn.Sequential:
    return named(conv=conv(inputs, outputs, kernel, stride=stride), bn=nn.BatchNorm2d(outputs))


def conv_bn_relu(inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> nn.Sequential:
    return named(
        conv=conv(inputs, outputs, kernel, stride=stride),
        bn=nn.BatchNorm2d(outputs),
        relu=nn.ReLU(inplace=True),
    )


def he_normal(network: Network) -> Network:
    """Redraws the network's convolutions as in He et al., 2015 (arXiv:1502.01852), and returns the network."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return network
