"""A workload from what a training loop of one's own has: model, loader, loss and optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from amptune.changes.tensor_tree import tensors_in
from amptune.errors import TargetError
from amptune.workload.copied_model import CopiedModel
from amptune.workload.loader_batches import LoaderBatches
from amptune.workload.rebuilt_optimizer import RebuiltOptimizer

__all__ = ["parts_of_loop"]


def parts_of_loop(
    model: nn.Module,
    loader: Iterable[Any],
    loss: Callable[..., Any],
    optimizer: Any,
    batch_size: int | None,
    batch_dim: int | None = None,
) -> dict[str, Any]:
    """Returns the parts of a `Workload` by name. Raises `TargetError` for what cannot be one."""
    if not isinstance(model, nn.Module):
        raise TargetError(f"model is {type(model).__name__}, not a torch.nn.Module")
    if not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        raise TargetError(
            f"optimizer is {type(optimizer).__name__}: give a torch.optim.Optimizer, or a function of model"
        )
    return {
        "model": CopiedModel(model),
        **LoaderBatches(loader, batch_size, batch_dim, is_time_major=is_time_major(model)).parts,
        "loss": Criterion(loss) if is_criterion(loss) else LossOfModel(loss),
        "optimizer": RebuiltOptimizer(optimizer, model) if isinstance(optimizer, torch.optim.Optimizer) else optimizer,
    }


def is_time_major(model: nn.Module) -> bool:
    """Returns True if a module of the model takes (time, samples, …), as PyTorch's recurrent ones do by default."""
    return any(getattr(module, "batch_first", True) is False for module in model.modules())


def is_criterion(loss: Any) -> bool:
    """Returns True for PyTorch's own kind of loss, which takes (output, target), not (model, batch)."""
    inner = loss.func if isinstance(loss, partial) else loss
    return isinstance(inner, nn.Module) or getattr(inner, "__module__", None) == nn.functional.__name__


class LossOfModel:
    """The user's `loss(model, batch)`. If it takes the model for an output, its error says how it is called."""

    def __init__(self, loss: Callable[..., torch.Tensor]) -> None:
        self.function = loss

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        try:
            return self.function(model, batch)
        except (TypeError, AttributeError) as error:
            if type(model).__name__ not in str(error):
                raise
            raise TargetError(
                f"loss raised {type(error).__name__}: {error}. It is called as loss(model, batch); one of (output, "
                "target) goes into lambda model, batch: loss_fn(model(batch[0]), batch[1])"
            ) from error


class Criterion:
    """The loss of a model whose batches are pairs (input, target): `criterion(model(input), target)`."""

    def __init__(self, criterion: Callable[[Any, Any], torch.Tensor]) -> None:
        self._criterion = criterion
        self._device: torch.device | None = None

    def __call__(self, model: nn.Module, batch: Any) -> torch.Tensor:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            kind = type(batch).__name__
            example = f"lambda model, batch: {self._name}()(model(…), …)"
            if isinstance(batch, Mapping):
                kind = f"{kind} of {', '.join(map(str, batch))}"
            raise TargetError(
                f"{self._name} takes (output, target), but the loader's batches are {kind}, not pairs (input, target): "
                f"give a function as loss, such as {example}"
            )
        inputs, targets = batch
        device = next((tensor.device for tensor in tensors_in(batch)), None)
        if isinstance(self._criterion, nn.Module) and device is not None and self._device != device:
            self._criterion.to(device)  # weights of classes are no part of the model
            self._device = device
        return self._criterion(model(inputs), targets)

    @property
    def _name(self) -> str:
        return getattr(self._criterion, "__name__", type(self._criterion).__name__)
