"""The workload's model, built and ready to train."""

from __future__ import annotations

import torch
from torch.nn.parameter import is_lazy

from amptune.errors import TargetError
from amptune.measure.bench.drawn_batches import seed_everything
from amptune.measure.bench.plain_attributes import PlainAttributes
from amptune.workload.copied_model import plain_model
from amptune.workload.user_errors import user_code
from amptune.workload.workload import Workload

__all__ = ["built"]


def built(workload: Workload, seed: int) -> torch.nn.Module:
    """Builds the workload's model and initialises lazy modules. Raises `TargetError`, `UserCodeError`."""
    seed_everything(seed)
    with user_code("model()"):
        model = workload.model()
    if not isinstance(model, torch.nn.Module):
        raise TargetError(f"{workload.name}: model() returned {type(model).__name__}, not a torch.nn.Module")
    is_compiled = plain_model(model) is not model
    if is_compiled:
        raise TargetError(
            f"{workload.name}: model() returned a compiled model: give it before torch.compile, which amptune tries by "
            "itself"
        )
    _set_modes(model)
    if any(is_lazy(parameter) for parameter in (*model.parameters(), *model.buffers())):
        _initialise_lazy(model, workload)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TargetError(f"{workload.name}: the model has no parameters that require a gradient; nothing to train")
    return model


def _set_modes(model: torch.nn.Module) -> None:
    """Lets the user's own `train()` set the modes, as a loop does before it trains: it may keep BatchNorm frozen.

    Modes that were set by hand stay, but for those of a module with such a method, and of what is inside it.
    """
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        if module not in inside and type(module).train is not torch.nn.Module.train:
            inside.update(module.modules())
            with user_code(f"{type(module).__name__}.train()"):
                module.train(module.training)


def _initialise_lazy(model: torch.nn.Module, workload: Workload) -> None:
    """Runs one forward pass, which gives lazy modules their shapes, and leaves plain attributes as they were."""
    if workload.loss is None:
        raise TargetError(f"{workload.name}: its lazy modules have no shapes yet; run one forward pass in model()")
    attributes = PlainAttributes(model)
    with torch.no_grad(), user_code("the first forward pass, for lazy modules"):
        workload.loss(model, workload.batch(workload.batch_size))
    attributes.put_back()
