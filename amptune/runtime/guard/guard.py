"""The guard: finds mistakes of the training loop in its first steps that harm training and that PyTorch accepts.

It watches through hooks on parameters and optimizer steps, which go after `WATCHED_STEPS` steps. It puts no hook on the
model's forward, which TorchScript and `torch.cuda.make_graphed_callables` would refuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from amptune.runtime.guard.step_watch import WATCHED_STEPS, StepWatch
from amptune.runtime.scaler import PolicyScaler, scaler_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from amptune.policy.settings import Policy

__all__ = ["WATCHED_STEPS", "Guard", "WatchedScaler"]


class Guard:
    """The guard of one model under one policy. It calls `at_end` when its watch is over and its hooks are gone."""

    def __init__(self, policy: Policy, model: nn.Module) -> None:
        self.at_end: Callable[[], object] = lambda: None
        self._policy = policy
        self._scalers: list[WatchedScaler] = []
        self.step_watch = StepWatch(policy, model, self.end_when_due)
        self.findings = self.step_watch.misuse.findings

    def watched_scaler(self, device_type: str) -> PolicyScaler:
        """Returns the policy's loss scaler, which tells this guard what it does."""
        scaler = scaler_for(self._policy, device_type, WatchedScaler)
        if isinstance(scaler, WatchedScaler):
            scaler.guard = self
            self._scalers.append(scaler)
        return scaler

    def autocast_used(self) -> None:
        self.step_watch.autocast_was_used = True
        self.end_when_due()

    def end_when_due(self) -> None:
        if self.step_watch.is_over:
            self.end()

    def end(self) -> None:
        self.step_watch.remove()
        for scaler in self._scalers:
            scaler.guard = None
        self.at_end()


class WatchedScaler(PolicyScaler):
    """A `PolicyScaler` that reports to `guard` while it has one, save inside torch.compile; a copy has none."""

    guard: Guard | None = None

    def scale(self, outputs: Any) -> Any:
        scaled = super().scale(outputs)
        if (guard := _told_by(self)) is not None and self.is_enabled():
            guard.step_watch.after_scale(scaled)
        return scaled

    def get_scale(self) -> float:
        if (guard := _told_by(self)) is not None:
            guard.step_watch.scale_was_asked = True
        return super().get_scale()

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        if (guard := _told_by(self)) is not None:
            guard.step_watch.before_unscale(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if (guard := _told_by(self)) is not None:
            self.weights.require_masters(optimizer)  # an error says enough
            guard.step_watch.before_unscale(optimizer)
            guard.step_watch.before_scaler_step(optimizer, has_closure=bool(args or kwargs))
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)
        if (guard := _told_by(self)) is not None:
            guard.end_when_due()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "guard": None}


def _told_by(scaler: WatchedScaler) -> Guard | None:
    """Returns the scaler's guard. A compiled graph does not even read it, and so stays when the guard goes."""
    return None if torch.compiler.is_compiling() else scaler.guard
