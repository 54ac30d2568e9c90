"""The guard: finds mistakes of the training loop in its first steps that harm training and that PyTorch accepts.

It watches through hooks on parameters, optimizer steps and the model's forward, and removes them after
`WATCHED_STEPS` steps. A brief guard, which `apply` gives every loop, is then dropped. It leaves out what a correct loop
may have reasons for: its batches and checkpoints. So the model has no hook, which TorchScript and
`torch.cuda.make_graphed_callables` would refuse.

Some mistakes show only later. A guard that is not brief checks checkpoints when they are made, and the loss scale and
BatchNorm's statistics once in `UPDATES_BETWEEN_LOOKS` updates of the loss scaler, which reports its calls to it.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, cast

import torch

from amptune.runtime.batch_norm import poisoned
from amptune.runtime.guard.batch_watch import BatchWatch
from amptune.runtime.guard.checkpoint_watch import CheckpointWatch
from amptune.runtime.guard.gradient_marks import forget_traced, is_traced, note_traced
from amptune.runtime.guard.misuse import Misuse
from amptune.runtime.guard.step_watch import WATCHED_STEPS, StepWatch
from amptune.runtime.scaler import PolicyScaler, scaler_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from amptune.policy.findings import Finding
    from amptune.policy.settings import Policy

__all__ = ["UPDATES_BETWEEN_LOOKS", "WATCHED_STEPS", "Guard", "WatchedScaler"]

# A check waits for the device, which takes about as long as launching a few kernels.
UPDATES_BETWEEN_LOOKS = 100


class Guard:
    """The guard of one model under one policy. `called` is `model`, or its compiled form if the loop calls that.

    A `brief` one calls `at_end` when its watch is over and the model's hooks are gone; its owner then drops it, and
    calls `remove_idle_hooks` when the policy goes.
    """

    def __init__(self, policy: Policy, model: nn.Module, called: nn.Module, *, brief: bool = False) -> None:
        self.at_end: Callable[[], object] = lambda: None
        self._is_brief = brief
        self._policy = policy
        self._model = weakref.ref(model)  # weak, since the model's hooks refer to this guard
        self._misuse = Misuse()
        self._scalers: list[WatchedScaler] = []
        self._updates = 0
        self._is_watching = True
        self._is_on = True
        self.checkpoints = CheckpointWatch(self._misuse)
        self.step_watch = StepWatch(policy, model, self._misuse, self._end_when_due)
        self._batches = None if brief else BatchWatch(policy, called, self._misuse, self._end_when_due)

    @property
    def findings(self) -> Sequence[Finding]:
        return self._misuse.findings

    def watched_scaler(self, device_type: str) -> PolicyScaler:
        """Returns the policy's loss scaler, which tells this guard what it does."""
        scaler = scaler_for(self._policy, device_type, WatchedScaler)
        if isinstance(scaler, WatchedScaler):
            scaler.guard, scaler.name = self, f"scaler {id(scaler)}"
            forget_traced(scaler.name)
            self._scalers.append(scaler)
        return scaler

    def undo(self) -> None:
        if self._is_on:
            self._is_on = False
            self._end_watch(for_good=True)
            self.checkpoints.remove()
            self.checkpoints.look(training_began=self._updates > 0)

    # Called by `Tuned` for the user's loop.

    def autocast_used(self) -> None:
        self.step_watch.autocast_was_used = True
        self._end_when_due()

    def batch_size_asked(self) -> None:
        if self._batches is not None:
            self._batches.batch_size = None

    def handed_out(self, optimizer: torch.optim.Optimizer) -> None:
        self.step_watch.handed_out(optimizer)
        self._follow(optimizer)

    def _follow(self, optimizer: torch.optim.Optimizer) -> None:
        if self._policy.scales_loss and self._is_on and not self._is_brief:
            self.checkpoints.follow(optimizer)

    # Called by the loss scaler.

    def after_scale(self, scaled: Any) -> None:
        if self._is_watching:
            self.step_watch.after_scale(scaled)

    def scale_asked(self) -> None:
        self.step_watch.scale_asked()

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
        is_due = self._is_watching or (not self._is_brief and self._updates % UPDATES_BETWEEN_LOOKS == 0)
        if is_due and not _is_capturing():
            self._look_at_scale(PolicyScaler.get_scale(scaler))
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
        if self._is_watching and self.step_watch.is_over:
            self._end_watch(for_good=False)

    def _end_watch(self, *, for_good: bool) -> None:
        """Removes the hooks. Those that torch.compile may have traced stay until `for_good`."""
        self._is_watching = False
        gone = self.step_watch.remove(for_good=for_good)
        if self._batches is not None:
            gone = self._batches.remove(for_good=for_good) and gone
        if self._is_brief:
            while self._scalers:
                self._scalers.pop().be_plain()
            if gone:
                self.at_end()


def _is_capturing() -> bool:
    """Returns True while a CUDA graph is being recorded: nothing may wait for the device then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class WatchedScaler(PolicyScaler):
    """A `PolicyScaler` that reports to `guard`, if it has one, save inside torch.compile; a copy has none.

    `be_plain` makes it a `PolicyScaler`. The methods do not use super(): a loop may hold them beyond that.
    """

    guard: Guard | None = None
    name: str = ""

    def scale(self, outputs: Any) -> Any:
        guard = _told_by(self)
        if guard is None or not self.is_enabled():  # nothing after the call: torch.compile would make a graph of it
            return PolicyScaler.scale(self, outputs)
        scaled = PolicyScaler.scale(self, outputs)
        guard.after_scale(scaled)
        return scaled

    def get_scale(self) -> float:
        if (guard := _told_by(self)) is not None:
            guard.scale_asked()
        return PolicyScaler.get_scale(self)

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        PolicyScaler.unscale_(self, optimizer)
        if (guard := _told_by(self)) is not None and self.is_enabled():
            guard.after_unscale(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if (guard := _told_by(self)) is not None:
            self.weights.require_masters(optimizer)  # an error says enough
            guard.before_scaler_step(optimizer, has_closure=bool(args or kwargs))
        return PolicyScaler.step(self, optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        PolicyScaler.update(self, new_scale)
        if (guard := _told_by(self)) is not None and self.is_enabled():
            guard.after_update(self)

    def state_dict(self) -> dict[str, Any]:
        if (guard := _told_by(self)) is not None:
            guard.checkpoints.scaler_saved()
        return PolicyScaler.state_dict(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        PolicyScaler.load_state_dict(self, state_dict)
        if (guard := _told_by(self)) is not None:
            guard.checkpoints.scaler_loaded()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "guard": None, "name": ""}

    def be_plain(self) -> None:
        """Forgets the guard, and all that this class adds; a graph that torch.compile made of it needs its class."""
        self.guard = None
        if not is_traced(self.name):
            del self.guard, self.name
            self.__class__ = PolicyScaler  # type: ignore[assignment]  # which has the same attributes


def _told_by(scaler: PolicyScaler) -> Guard | None:
    """Returns the scaler's guard. A compiled graph does not even read it, and so stays when the guard goes."""
    if torch.compiler.is_compiling():
        note_traced(getattr(scaler, "name", ""))
        return None
    return cast("Guard | None", getattr(scaler, "guard", None))
