"""The dtype of a half weight's gradient: PyTorch 2.10 and later let it differ from the weight's own.

Autograd casts what it adds to such a gradient (https://github.com/pytorch/pytorch/pull/162815), so it is summed,
unscaled and clipped in FP32, and a plain `torch.amp.GradScaler` accepts it. torch.compile does not support this yet:
anything new that comes while such gradients exist (another shape between two micro-batches) runs uncompiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CAN_DIFFER", "take_gradients_as", "take_gradients_as_they_come", "take_gradients_in"]

CAN_DIFFER = hasattr(torch.Tensor, "grad_dtype")


def take_gradients_in(dtype: torch.dtype, parameter: nn.Parameter) -> None:
    """Makes autograd cast the parameter's gradients to `dtype`."""
    if CAN_DIFFER and parameter.grad_dtype is not dtype:
        parameter.grad_dtype = dtype


def take_gradients_as(one: nn.Parameter, other: nn.Parameter) -> None:
    """Makes autograd cast the gradients of `other` to the dtype that it casts those of `one` to."""
    if CAN_DIFFER:
        other.grad_dtype = one.grad_dtype


def take_gradients_as_they_come(module: nn.Module) -> None:
    """Leaves the gradients of a module's half weights in half; code that needs FP32 widens them later."""
    if not CAN_DIFFER:
        return
    for parameter in module.parameters():
        if parameter.dtype is torch.float16:
            if parameter.grad_dtype is None:  # then all the others are set too
                return
            parameter.grad_dtype = None
