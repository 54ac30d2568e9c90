"""The guard: finds mistakes of the training loop in its first steps that harm training and that PyTorch accepts.

It watches through hooks on parameters and optimizer steps, which go after `WATCHED_STEPS` steps. It puts no hook on the
model's forward, which TorchScript and `torch.cuda.make_graphed_callables` would refuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from amptune.runtime.guard.step_watch import WATCHED_STEPS, StepWatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from amptune.policy.settings import Policy
    from amptune.runtime.scaler import PolicyScaler

__all__ = ["WATCHED_STEPS", "Guard"]


class Guard:
    """The guard of one model under one policy. It calls `at_end` when its watch is over and its hooks are gone.

    `called` is what the loop is to call: the model, or what the policy put around it.
    """

    def __init__(self, policy: Policy, model: nn.Module, called: nn.Module) -> None:
        self.at_end: Callable[[], object] = lambda: None
        self._scalers: list[PolicyScaler] = []
        self.step_watch = StepWatch(policy, model, called, self.end_when_due)
        self.findings = self.step_watch.misuse.findings

    def follow(self, scaler: PolicyScaler) -> None:
        """Has the policy's loss scaler tell this guard what it does."""
        scaler.guard = self
        self._scalers.append(scaler)

    def end_when_due(self) -> None:
        if self.step_watch.is_over:
            self.end()

    def end(self) -> None:
        self.step_watch.remove()
        for scaler in self._scalers:
            scaler.guard = None
        self.at_end()
