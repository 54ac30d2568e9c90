"""Autocast as CUDA has it, on tensors of the CPU, whose own autocast leaves other operations in half."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from amptune.changes.tensor_tree import HALF_DTYPES

__all__ = ["CudaAutocast"]

# The operations that autocast computes in FP32 on CUDA and not on the CPU: torch/include/ATen/autocast_mode.h.
_IN_FP32 = frozenset(
    [
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "reciprocal",
        "rsqrt",
        "sinh",
        "tan",
        "pow",
        "softplus",
        "layer_norm",
        "group_norm",
        "norm",
        "cosine_similarity",
        "cosine_embedding_loss",
        "nll_loss",
        "cross_entropy",
        "l1_loss",
        "smooth_l1_loss",
        "mse_loss",
        "huber_loss",
        "kl_div",
        "cumprod",
        "cumsum",
        "dist",
        "prod",
        "sum",
        "softmax",
        "log_softmax",
        "softmin",
    ]
)
_CAST_WITHIN = frozenset(["softmax", "log_softmax", "softmin", "sum", "prod", "cumsum", "cumprod", "cross_entropy"])
# Autocast on CUDA refuses this one with an error, and on the CPU it does not (PyTorch's "Autocast Op Reference").
_REFUSED = "binary_cross_entropy"
_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


class CudaAutocast(TorchFunctionMode):
    """Casts the inputs of CUDA's FP32 operations; `half` turns it on.

    `casting` is True during a cast that CUDA's kernel does by itself, `refuses` from the moment on at which CUDA would
    have raised an error. Attention's dropout is left out in both: with it the CPU has no fused attention, which CUDA
    has.
    """

    def __init__(self, *, half: bool) -> None:
        super().__init__()
        self.casting = self.refuses = False
        self._half = half

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "scaled_dot_product_attention":
            args, kwargs = args[:4], {**kwargs, "dropout_p": 0.0}
        if not self._half or not torch.is_autocast_enabled("cpu"):
            return func(*args, **kwargs)
        self.refuses |= name == _REFUSED
        if name in _IN_FP32:
            self.casting = name in _CAST_WITHIN
            args, kwargs = tree_map_only(torch.Tensor, _in_fp32, (args, kwargs))
            self.casting = False
        if name in _RECURRENT:  # whether a CPU has kernels for them in half depends on the CPU
            args, kwargs = tree_map_only(torch.Tensor, _in_fp32, (args, kwargs))
            with torch.autocast("cpu", enabled=False):
                return tree_map_only(torch.Tensor, torch.Tensor.bfloat16, func(*args, **kwargs))
        return func(*args, **kwargs)


def _in_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor
