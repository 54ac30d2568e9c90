"""Layers that several of the bundled networks share.

BERT and GPT-2 share multi-head self-attention (Vaswani et al., 2017, arXiv:1706.03762).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

from torch import Tensor, nn
from torch.nn import functional

__all__ = ["SelfAttention", "conv", "conv_bn", "conv_bn_relu", "he_normal", "named"]

Network = TypeVar("Network", bound=nn.Module)


def named(**children: nn.Module) -> nn.Sequential:
    """Returns a Sequential whose children have names, so that a policy can name `layer1.0.body.conv2`."""
    return nn.Sequential(OrderedDict(children))


def conv(inputs: int, outputs: int, kernel: int, *, stride: int = 1, dilation: int = 1, groups: int = 1) -> nn.Conv2d:
    """Returns a convolution padded to keep the image size (before its stride); no bias, as a BatchNorm is adjacent."""
    padding = dilation * (kernel // 2)
    return nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, groups, bias=False)


def conv_bn(inputs: int, outputs: int, kernel: int, *, stride: int = 1) -> nn.Sequential:
    return named(conv=conv(inputs, outputs, kernel, stride=stride), bn=nn.BatchNorm2d(outputs))


def conv_bn_relu(inputs: int, outputs: int, kernel: int, *, stride: int = 1, dilation: int = 1) -> nn.Sequential:
    return named(
        conv=conv(inputs, outputs, kernel, stride=stride, dilation=dilation),
        bn=nn.BatchNorm2d(outputs),
        relu=nn.ReLU(inplace=True),
    )


def he_normal(network: Network) -> Network:
    """Redraws the network's convolutions as in He et al., 2015 (arXiv:1502.01852), and returns the network."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return network


class SelfAttention(nn.Module):
    """Self-attention from (batch, tokens, width) to the same shape; one projection gives query, key and value."""

    def __init__(self, width: int, heads: int, *, dropout: float, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.causal = causal
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        joint: Tensor = self.query_key_value(x)
        query, key, value = (
            joint.view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind()
        )
        dropout = self.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=self.causal)
        output: Tensor = self.output(mixed.transpose(1, 2).flatten(2))
        return output
