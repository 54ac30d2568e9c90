"""The dtype of a half weight's gradient: PyTorch 2.10 and later let it differ from the weight's own.

Autograd then casts what it adds to the gradient (https://github.com/pytorch/pytorch/pull/162815), so that it is summed,
unscaled and clipped in FP32, and a plain `torch.amp.GradScaler` takes it. torch.compile does not know that yet: what it
meets anew while such gradients are there (another shape between two micro-batches) it runs without compiling.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import nn

__all__ = ["CAN_DIFFER", "take_gradients_as", "take_gradients_as_they_come", "take_gradients_in"]

CAN_DIFFER = hasattr(torch.Tensor, "grad_dtype")


def take_gradients_in(dtype: torch.dtype, parameter: nn.Parameter) -> None:
    """Has autograd cast the parameter's gradients to `dtype`."""
    if CAN_DIFFER and parameter.grad_dtype is not dtype:
        parameter.grad_dtype = dtype


def take_gradients_as(one: nn.Parameter, other: nn.Parameter) -> None:
    """Has autograd cast the gradients of the other parameter as those of the one."""
    if CAN_DIFFER:
        other.grad_dtype = one.grad_dtype


def take_gradients_as_they_come(module: nn.Module) -> None:
    """Leaves the gradients of a module's half weights in half, until they are widened by who needs that."""
    if not CAN_DIFFER:
        return
    for parameter in module.parameters():
        if parameter.dtype is torch.float16:
            if parameter.grad_dtype is None:  # so are all the others
                return
            parameter.grad_dtype = None
