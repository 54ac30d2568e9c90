"""A training step under a policy in one call: PyTorch's AMP recipe, from autocast to `zero_grad`, or one's own."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    import torch
    from torch import nn

    from amptune.runtime.scaler import PolicyScaler

__all__ = ["OwnStep", "Recipe", "RecipeStep"]


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


class RecordedRun(Protocol):
    """A runner of steps, by a replay if one does the same; `part` tells steps apart."""

    def run(self, step: Callable[[Any], Any], batch: Any, part: object = None) -> Any: ...


class RecipeStep:
    """Trains on one micro-batch a call; each `accumulate`-th call, counted across epochs, updates the weights.

    `has_updated` is True after such a call, even if the loss scaler skipped the update: then a learning-rate schedule
    is due. `before_update` is called before each update, with gradients that are still scaled. With `recordings` a call
    may be a replay.
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
        self.recordings: RecordedRun | None = None
        self._recipe = recipe
        self._loss = loss
        self._optimizer = optimizer
        self._clip = clip
        self._model = model
        self._passes = 0

    def __call__(self, batch: Any) -> torch.Tensor:
        """Returns the batch's loss as `loss` gave it, neither scaled nor divided, without its autograd graph."""
        is_last = (self._passes + 1) % self._recipe.accumulate == 0
        step, batch = partial(self._trained, is_last=is_last), self._recipe.batch(batch)
        runs = self.recordings if self.before_update is None else None
        loss: torch.Tensor = step(batch) if runs is None else runs.run(step, batch, is_last)
        self._passes += 1
        self.has_updated = is_last
        return loss

    def _trained(self, batch: Any, *, is_last: bool) -> torch.Tensor:
        """Returns the loss, with its gradients added to those of the weights, or these updated."""
        recipe = self._recipe
        model = recipe.model if self._model is None else self._model
        with nullcontext() if is_last else _without_exchange(model):
            with recipe.autocast():
                loss = self._loss(model, batch)
            recipe.scaler.scale(loss / recipe.accumulate).backward()
        if is_last:
            if self.before_update is not None:
                self.before_update()
            recipe.step(self._optimizer, clip=self._clip)
            self._optimizer.zero_grad()
        return loss.detach()


class OwnStep:
    """Trains on a batch by a step of the user's own; with `recordings` a call may be a replay."""

    def __init__(self, recipe: Recipe, step: Callable[[Any, Any, Any, Any], Any], optimizers: Any, model: Any) -> None:
        self.recordings: RecordedRun | None = None
        self._recipe, self._step, self._optimizers, self._model = recipe, step, optimizers, model

    def __call__(self, batch: Any) -> Any:
        """Returns what the step returns: of a replay copies, without their autograd graph."""
        return self._trained(batch) if self.recordings is None else self.recordings.run(self._trained, batch)

    def _trained(self, batch: Any) -> Any:
        model = self._recipe.model if self._model is None else self._model
        return self._step(self._recipe, model, self._optimizers, batch)


def _without_exchange(model: nn.Module) -> AbstractContextManager[None]:
    """Has DistributedDataParallel exchange gradients once a step, at its last micro-batch."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
