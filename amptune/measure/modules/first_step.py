"""The first step of a workload, which tells whether its steps train its model at all."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from amptune.errors import TargetError
from amptune.measure.bench.step import Stepper

__all__ = ["require_training"]

# A step of the user's own may be one of so many micro-batches before the optimizer's step.
MOST_MICRO_BATCHES = 16


def require_training(stepper: Stepper, model: nn.Module, *, own_step: bool) -> None:
    """Runs a step, or several of the user's own until one trains. Raises `TargetError` if the model is not trained."""
    held = [parameter for optimizer in stepper.optimizers for parameter in _require_own(optimizer, model)]
    reached: list[bool] = []

    def note(*_: Any) -> None:
        reached.append(any(parameter.grad is not None for parameter in held))

    versions = _versions(model)
    with ExitStack() as hooks:
        for optimizer in stepper.optimizers:
            hooks.enter_context(optimizer.register_step_pre_hook(note))
        for _ in range(MOST_MICRO_BATCHES if own_step else 1):
            stepper()
            if reached or _versions(model) != versions:
                break
        else:
            raise TargetError(
                f"step(…) ran {MOST_MICRO_BATCHES} times, and neither did the optimizer step nor a weight change: call "
                "tuned.scaler.step(optimizer) and tuned.scaler.update()"
            )
    if not own_step and not any(reached):
        if not any(parameter.requires_grad for parameter in held):
            raise TargetError("the optimizer's parameters are all frozen: they have requires_grad=False")
        raise TargetError("no gradient reaches the optimizer's parameters: loss(model, batch) is to use its model")


def _require_own(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[nn.Parameter]:
    """Returns the optimizer's parameters. Raises `TargetError` if none is the model's."""
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not {id(parameter) for parameter in held} & {id(parameter) for parameter in model.parameters()}:
        raise TargetError(
            f"optimizer(model) holds {len(held)} parameters, and none is the model's: build it over the parameters of "
            "the model that it is given, as in lambda model: SGD(model.parameters(), lr=0.1)"
        )
    return held


def _versions(model: nn.Module) -> list[int]:
    """Returns how often each weight was written to."""
    return [parameter._version for parameter in model.parameters()]
