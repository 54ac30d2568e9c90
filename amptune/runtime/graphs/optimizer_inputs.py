"""Optimizers and loss scaler of a recorded training step: settings that are baked in, and rates that may change."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import chain
from operator import is_
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from amptune.runtime.graphs.host_effects import NotRecordableError
from amptune.runtime.graphs.model_state import are_same

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from amptune.runtime.scaler import PolicyScaler

__all__ = ["OptimizerInputs"]

_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
_GLOBAL_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")
# What GradScaler hands to an optimizer for one step, and what a recording holds of the scaler.
_OF_SCALER = ("grad_scale", "found_inf")
_BAKED_OF_SCALER = (
    "_scale",
    "_growth_tracker",
    "_growth_factor",
    "_backoff_factor",
    "_growth_interval",
    "policy_scale",
)


class OptimizerInputs:
    """The learning rates of a recording, which are read from the parameter groups at each replay; all else is baked.

    Raises `NotRecordableError`, in words that follow the step's name, if these optimizers cannot be recorded.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], scaler: PolicyScaler, device: torch.device) -> None:
        self._optimizers, self._scaler, self._device = optimizers, scaler, device
        self._groups = [group for one in optimizers for group in one.param_groups]
        if any(group.get("differentiable") for group in self._groups):
            raise NotRecordableError("has an optimizer that is differentiable")
        if scaler.is_enabled() and scaler.statistics is not None:
            raise NotRecordableError("has protect_batch_norm beside it, which keeps statistics from update to update")
        if any(group.get("capturable") is False and not group.get("fused") for group in self._groups):
            raise NotRecordableError(
                "has an optimizer that is neither fused (fused_optimizer: true, or fused=True) nor capturable=True"
            )
        self._rates = [self._rate_of(group) for group in self._groups]
        self._filled = [group["lr"] for group in self._groups]
        self._known: list[Any] = []

    def _rate_of(self, group: dict[str, Any]) -> torch.Tensor | None:
        """Returns the tensor that holds a group's learning rate in replays; None if it is the loop's, or baked."""
        if isinstance(group["lr"], torch.Tensor):
            if group["lr"].device != self._device:
                raise NotRecordableError("has a learning rate that is a tensor on another device")
            return None
        if not (group.get("fused") or group.get("capturable")):
            return None
        return torch.full((), float(group["lr"]), dtype=torch.float32, device=self._device)  # as kernels take it

    def _baked(self) -> list[Any]:
        """Returns all that a replay takes for unchanged."""
        found: list[Any] = []
        for one in self._optimizers:
            tables = [*(getattr(one, name) for name in _HOOKS), *(getattr(torch_optimizer, n) for n in _GLOBAL_HOOKS)]
            found += [one.state, one.param_groups, *one.param_groups, vars(one).get("step")]
            found += chain.from_iterable(table.values() for table in tables if not _is_own(table))
            found += chain.from_iterable(state.values() for state in one.state.values())
        for group, rate in zip(self._groups, self._rates, strict=True):
            found += [*group["params"], type(group["lr"]) if rate is not None else group["lr"]]
            found += [value for name, value in group.items() if name not in ("params", "lr")]
        return [*found, *(getattr(self._scaler, name, None) for name in _BAKED_OF_SCALER)]

    @property
    def is_valid(self) -> bool:
        """True if a replay would do what the optimizers do now."""
        now = self._baked()
        if len(now) != len(self._known):
            return False
        return all(map(is_, now, self._known)) or all(map(are_same, now, self._known))

    @contextmanager
    def may_be_captured(self) -> Iterator[None]:
        """Gives fused optimizers leave to step while a step is captured, or looks as if it were."""
        able = [group for group in self._groups if group.get("capturable") is False]
        try:
            for group in able:
                group["capturable"] = True
            yield
        finally:
            for group in able:
                group["capturable"] = False

    @contextmanager
    def as_recorded(self) -> Iterator[None]:
        """Gives the optimizers what a recording needs: learning rates as tensors, and leave to be captured."""
        self._known = self._baked()
        try:
            with self.may_be_captured():
                for group, rate in zip(self._groups, self._rates, strict=True):
                    group["lr"] = group["lr"] if rate is None else rate
                yield
        finally:
            for group, own in zip(self._groups, self._filled, strict=True):
                group["lr"] = own
            for optimizer in self._optimizers:
                for name in _OF_SCALER:
                    vars(optimizer).pop(name, None)
                if self._scaler.is_enabled():
                    self._scaler._per_optimizer_states.pop(id(optimizer), None)
        if not self.is_valid:
            raise NotRecordableError("makes the state of its optimizer anew")

    def fill(self) -> None:
        """Fills in the learning rates for a replay."""
        for place, (group, rate) in enumerate(zip(self._groups, self._rates, strict=True)):
            if rate is not None and group["lr"] != self._filled[place]:
                rate.fill_(group["lr"])
                self._filled[place] = group["lr"]

    @contextmanager
    def told(self) -> Iterator[None]:
        """Tells amptune's own hooks, and schedulers, of the steps in a replay."""
        self._call_own(_HOOKS[0])
        yield
        self._call_own(_HOOKS[1])
        for optimizer in self._optimizers:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # as a scheduler expects of a step

    def _call_own(self, name: str) -> None:
        for optimizer in self._optimizers:
            for hook in [*getattr(optimizer, name).values()]:
                if _of_amptune(hook):
                    hook(optimizer, (), {})


def _is_own(table: dict[int, Any]) -> bool:
    return all(map(_of_amptune, table.values()))


def _of_amptune(hook: Any) -> bool:
    owner = getattr(hook, "__self__", hook)
    kind = owner if isinstance(owner, FunctionType) else type(owner)
    return bool(kind.__module__.startswith("amptune.runtime."))
