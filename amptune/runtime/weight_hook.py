"""The hook through which the way weights are held serves optimizers and the loss scaler; gradient dtypes.

PyTorch 2.10 and later let the dtype of a gradient differ from that of its weight. Autograd casts what it adds to such a
gradient (https://github.com/pytorch/pytorch/pull/162815), so it is summed, unscaled and clipped in FP32, and a plain
`torch.amp.GradScaler` accepts it. torch.compile does not support this yet: anything new that comes while such gradients
exist (another shape between two micro-batches) runs uncompiled.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

    from amptune.policy.findings import Finding

__all__ = [
    "CAN_DIFFER",
    "PLAIN_WEIGHTS",
    "WeightHook",
    "take_gradients_as",
    "take_gradients_as_they_come",
    "take_gradients_in",
]


class WeightHook:
    """Weights as PyTorch holds them: every method does nothing. `HalfTraining` overrides them for half weights."""

    in_half = False

    def convert(self) -> None:
        """Converts the model's weights; `undo` takes that back."""

    def undo(self) -> None:
        """Restores the weights, and the optimizers that were served."""

    def findings(self) -> Iterator[Finding]:
        """Yields what a user should know of the conversion."""
        yield from ()

    def serve(self, optimizer: torch.optim.Optimizer) -> None:
        """Prepares a built optimizer for the weights. Raises `PolicyApplyError` if it cannot update them."""

    def lent_to(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:  # noqa: ARG002
        """Returns a context in which the optimizer holds the parameters that it is going to update."""
        return nullcontext()

    def stepping(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:  # noqa: ARG002
        """Returns a context for one step: behind it, the optimizer holds the model's own parameters."""
        return nullcontext()

    def widen_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Casts the gradients of half weights to FP32, so that unscaling them does not overflow."""

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Sets a parameter or buffer of the model to an FP32 value."""
        with torch.no_grad():
            tensor.copy_(value)


PLAIN_WEIGHTS = WeightHook()


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
