"""The guard: finds mistakes of the training loop in its first steps that harm training and that PyTorch accepts.

It watches through hooks on parameters, optimizer steps and the model's forward, and removes them after
`WATCHED_STEPS` steps. Some mistakes show only later: it checks checkpoints when they are made, and the loss scale and
BatchNorm's statistics once in `UPDATES_BETWEEN_LOOKS` updates of the loss scaler, which reports its calls to it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from amptune.runtime.batch_norm import poisoned
from amptune.runtime.guard.batch_watch import BatchWatch
from amptune.runtime.guard.checkpoint_watch import CheckpointWatch
from amptune.runtime.guard.misuse import Misuse
from amptune.runtime.guard.step_watch import StepWatch
from amptune.runtime.scaler import PolicyScaler, scaler_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from amptune.policy.findings import Finding
    from amptune.policy.settings import Policy

__all__ = ["UPDATES_BETWEEN_LOOKS", "WATCHED_STEPS", "Guard", "WatchedScaler"]

# Steps of the optimizer that steps most often.
WATCHED_STEPS = 20

# A check waits for the device, which takes about as long as launching a few kernels.
UPDATES_BETWEEN_LOOKS = 100


class Guard:
    """The guard of one model under one policy. `called` is `model`, or its compiled form if the loop calls that."""

    def __init__(self, policy: Policy, model: nn.Module, called: nn.Module) -> None:
        self._policy = policy
        self._model = weakref.ref(model)  # weak, since the model's hooks refer to this guard
        self._misuse = Misuse()
        self._updates = 0
        self._is_watching = True
        self._is_on = True
        self.checkpoints = CheckpointWatch(self._misuse)
        self.step_watch = StepWatch(policy, model, self._misuse, self._end_when_due)
        self._batches = BatchWatch(policy, called, self._misuse, self._end_when_due)

    @property
    def findings(self) -> Sequence[Finding]:
        return self._misuse.findings

    def watched_scaler(self, device_type: str) -> PolicyScaler:
        """Returns the policy's loss scaler, which tells this guard what it does."""
        scaler = scaler_for(self._policy, device_type, WatchedScaler)
        if isinstance(scaler, WatchedScaler):
            scaler.guard = self
        return scaler

    def undo(self) -> None:
        if self._is_on:
            self._is_on = False
            self._end_watch()
            self._batches.remove(for_good=True)
            self.checkpoints.remove()
            self.checkpoints.look(training_began=self._updates > 0)

    # Called by `Tuned` for the user's loop.

    def autocast_used(self) -> None:
        self.step_watch.autocast_was_used = True

    def batch_size_asked(self) -> None:
        self._batches.batch_size = None

    def handed_out(self, optimizer: torch.optim.Optimizer) -> None:
        self.step_watch.handed_out(optimizer)
        self._follow(optimizer)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        if self._policy.scales_loss and self._is_on:
            self.checkpoints.follow(optimizer)

    # Called by the loss scaler.

    def after_scale(self, scaled: Any) -> None:
        if self._is_watching and not torch.compiler.is_compiling():
            self.step_watch.after_scale(scaled)

    def after_unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_watching:
            self.step_watch.after_unscale(optimizer)

    def before_scaler_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self._follow(optimizer)
        if self._is_watching:
            self.step_watch.before_scaler_step(optimizer, has_closure=has_closure)

    def after_update(self, scaler: torch.amp.GradScaler) -> None:
        if not self._is_on:
            return
        self.checkpoints.look(training_began=self._updates > 0)
        self._updates += 1
        is_due = self._is_watching or self._updates % UPDATES_BETWEEN_LOOKS == 0
        if is_due and not _is_capturing():
            self._look_at_scale(scaler.get_scale())
            self._look_at_statistics()
        self._end_when_due()

    # Checks for mistakes that show only later.

    def _look_at_scale(self, scale: float) -> None:
        init = 1.0 if self._policy.loss_scale is None else self._policy.loss_scale.init
        if scale < min(1.0, init):
            self._misuse.say(
                "loss-scale-collapsed",
                f"the loss scale has fallen to {scale:g} at {{here}}: gradients overflow fp16 whatever the scale, and "
                "steps in which they do are skipped. `amptune diagnose` names the modules to keep in FP32; bf16 needs "
                "no scale",
                scale=scale,
            )

    def _look_at_statistics(self) -> None:
        model = self._model()
        paths = poisoned(model) if model is not None else []
        if paths:
            more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
            self._misuse.say(
                "batch-norm-poisoned",
                f"the running statistics of {paths[0] or 'the model'}{more} are not finite at {{here}}: a forward that "
                "overflowed updated them although the scaler skipped its step, and evaluation gives NaN. Use "
                "amptune.apply(..., protect_batch_norm=True), or keep in FP32 what overflows before it",
                modules=paths,
            )

    def _end_when_due(self) -> None:
        if self.step_watch.most_steps >= WATCHED_STEPS:
            self._end_watch()

    def _end_watch(self) -> None:
        if self._is_watching:
            self._is_watching = False
            self.step_watch.remove()
            self._batches.remove()


def _is_capturing() -> bool:
    """Returns True while a CUDA graph is being recorded: nothing may wait for the device then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class WatchedScaler(PolicyScaler):
    """A `PolicyScaler` that reports to `guard`, if it has one; a copy has none."""

    guard: Guard | None = None

    def scale(self, outputs: Any) -> Any:
        scaled = super().scale(outputs)
        if self.guard is not None and self.is_enabled():
            self.guard.after_scale(scaled)
        return scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        super().unscale_(optimizer)
        if self.guard is not None and self.is_enabled():
            self.guard.after_unscale(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if self.guard is not None:
            self.guard.before_scaler_step(optimizer, has_closure=bool(args or kwargs))
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        super().update(new_scale)
        if self.guard is not None and self.is_enabled():
            self.guard.after_update(self)

    def state_dict(self) -> dict[str, Any]:
        if self.guard is not None:
            self.guard.checkpoints.scaler_saved()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if self.guard is not None:
            self.guard.checkpoints.scaler_loaded()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "guard": None}
