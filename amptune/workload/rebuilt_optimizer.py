"""An optimizer of the user's, built again over a copy of the model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from amptune.errors import TargetError
from amptune.workload.copied_model import plain_model

__all__ = ["RebuiltOptimizer", "without_schedule"]


class RebuiltOptimizer:
    """A function that builds an optimizer like the user's: its class, its arguments, its groups of parameters.

    The optimizer's state is not copied: amptune measures from a fresh one, at the learning rate before any schedule.
    Raises `TargetError` if the optimizer holds parameters that the model does not have.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
        optimizer = getattr(optimizer, "optimizer", optimizer)  # Accelerate wraps it
        if isinstance(optimizer, torch.optim.LBFGS):
            raise TargetError("LBFGS takes a closure that computes the loss again: write it as Workload(step=…)")
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        foreign = sum(id(parameter) not in names for parameter in held)
        if foreign:
            raise TargetError(
                f"{foreign} of the optimizer's {len(held)} parameters are not the model's: build the optimizer over "
                "model.parameters() of this model; parameters of a loss belong into the model"
            )
        self.kind = type(optimizer)
        known = {**_plain_attributes(optimizer), **optimizer.defaults}
        self.arguments = {name: known[name] for name in _accepted(self.kind, optimizer.defaults, known)}
        self.groups = [
            {**_settings(group), "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = dict(plain_model(model).named_parameters())
        groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in self.groups]
        try:
            return self.kind(groups, **self.arguments)
        except TypeError as error:
            raise TargetError(
                f"{self.kind.__name__} cannot be built again from its groups and defaults ({error}): give a function "
                "in its place, optimizer=lambda model: …"
            ) from error


def _accepted(kind: type, defaults: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """Returns the names of what is known that the class takes as arguments; groups have all the defaults anyway."""
    taken = inspect.signature(kind).parameters.values()
    named = [parameter.name for parameter in taken if parameter.name in known]
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
        return list(dict.fromkeys([*defaults, *named]))
    return named


def _plain_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Returns the numbers and texts that the object has as attributes: arguments of its class, if that keeps some so.

    What else it holds may belong to the user's model.
    """
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, bool | int | float | str)}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the group's settings; without its parameters' names, which are for parameters that have some."""
    return {name: value for name, value in _unscheduled(group).items() if name not in ("params", "param_names")}


def without_schedule(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns the optimizer with its learning rates before any schedule: a warm-up begins at 0, and trains nothing."""
    for group in optimizer.param_groups:
        group |= _unscheduled(group)
        group.pop("initial_lr", None)
    return optimizer


def _unscheduled(group: dict[str, Any]) -> dict[str, Any]:
    rate = {"lr": group["initial_lr"]} if "initial_lr" in group else {}
    return {name: value for name, value in {**group, **rate}.items() if name != "initial_lr"}
