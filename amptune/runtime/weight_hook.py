"""The hook that a training loop's optimizers and loss scaler call, so that a policy may hold weights in its own way."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from amptune.policy.findings import Finding

__all__ = ["PLAIN_WEIGHTS", "WeightHook"]


class WeightHook:
    """Weights as PyTorch holds them: nothing is converted, lent or widened. `HalfTraining` is the other kind."""

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

    def require_masters(self, optimizer: torch.optim.Optimizer) -> None:
        """Raises `PolicyApplyError` for an optimizer that would update half weights in place of their masters."""

    def widen_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Casts the gradients of half weights to FP32, so that unscaling them does not overflow."""

    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Sets a parameter or buffer of the model to an FP32 value."""
        with torch.no_grad():
            tensor.copy_(value)


PLAIN_WEIGHTS = WeightHook()
