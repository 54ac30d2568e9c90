"""PyTorch's AMP recipe in one call: the loop's step under a policy, from autocast to `zero_grad`."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from amptune.runtime.scaler import PolicyScaler

__all__ = ["Recipe", "RecipeStep"]


class Recipe(Protocol):
    """The parts of the recipe under a policy; `Tuned` has them."""

    model: nn.Module

    @property
    def guard(self) -> object | None: ...

    @property
    def accumulate(self) -> int: ...

    @property
    def scaler(self) -> PolicyScaler: ...

    def autocast(self) -> torch.amp.autocast: ...

    def batch(self, batch: Any) -> Any: ...

    def step(self, optimizer: torch.optim.Optimizer, *, clip: float | None = None) -> None: ...


class RecipeStep:
    """Trains on one micro-batch a call; each `accumulate`-th call, counted across epochs, updates the weights.

    `has_updated` is True after such a call, even if the loss scaler skipped the update: then a learning-rate schedule
    is due. `before_update` is called before each update, with gradients that are still scaled.
    """

    def __init__(
        self,
        recipe: Recipe,
        loss: Callable[[Any, Any], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        clip: float | None,
        model: nn.Module | None,
    ) -> None:
        self.has_updated = False
        self.before_update: Callable[[], object] | None = None
        self._recipe = recipe
        self._loss = loss
        self._optimizer = optimizer
        self._clip = clip
        self._model = model
        self._passes = 0

    def __call__(self, batch: Any) -> torch.Tensor:
        """Returns the batch's loss as `loss` gave it, neither scaled nor divided, without its autograd graph."""
        is_last = (self._passes + 1) % self._recipe.accumulate == 0
        loss = self._pass(batch, is_last=is_last)
        self._passes += 1
        if is_last:
            self._update()
        self.has_updated = is_last
        return loss.detach()

    def _pass(self, batch: Any, *, is_last: bool) -> torch.Tensor:
        """Returns the loss, with its gradients added to those of the weights."""
        recipe = self._recipe
        model = recipe.model if self._model is None else self._model
        with nullcontext() if is_last else _without_exchange(model):
            with recipe.autocast():
                loss = self._loss(model, recipe.batch(batch))
            self._backward(loss)
        return loss

    def _backward(self, loss: torch.Tensor) -> None:
        part = loss / self._recipe.accumulate
        self._recipe.scaler.scale(part).backward()

    def _update(self) -> None:
        if self.before_update is not None:
            self.before_update()
        self._recipe.step(self._optimizer, clip=self._clip)
        self._optimizer.zero_grad()


def _without_exchange(model: nn.Module) -> AbstractContextManager[None]:
    """Has DistributedDataParallel exchange gradients once a step, at its last micro-batch."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
