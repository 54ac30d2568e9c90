"""The guard: notices in the first steps what a training loop does that harms it and that PyTorch says nothing of.

It watches through hooks on parameters, optimizer steps and the model's forward, and takes them away after
`WATCHED_STEPS` steps. What can only show later (a checkpoint, the loss scale, BatchNorm's statistics) it looks at when
a checkpoint is made, and once in `UPDATES_BETWEEN_LOOKS` updates of the loss scaler.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from amptune.runtime.batch_statistics import poisoned
from amptune.runtime.batch_watch import BatchWatch
from amptune.runtime.checkpoint_watch import CheckpointWatch
from amptune.runtime.gradient_marks import GradientMarks
from amptune.runtime.misuse import Misuse, Place, frames_above
from amptune.runtime.nested import tensors_in
from amptune.runtime.process_hooks import unwatch, watch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from amptune.policy.findings import Finding
    from amptune.policy.settings import Policy
    from amptune.runtime.gradient_marks import Mark

__all__ = ["UPDATES_BETWEEN_LOOKS", "WATCHED_STEPS", "Guard"]

# Of the optimizer that steps most often.
WATCHED_STEPS = 20

# A look waits for the device, which takes about as long as launching a few kernels.
UPDATES_BETWEEN_LOOKS = 100

_RECIPE = "tuned.scaler.scale(loss).backward(); tuned.scaler.step(optimizer); tuned.scaler.update()"


@dataclass(slots=True)
class _Steps:
    """Of one optimizer: how many there were, and what the last one applied, in the time of `GradientMarks`."""

    count: int = 0
    without_scaler: int = 0
    last_gradient: int = 0
    last_by_scaler: bool = False
    last_place: Place | None = None


class Guard:
    """Guards the training of one model under one policy. `called` is what the loop calls: `model`, or it compiled."""

    def __init__(self, policy: Policy, model: nn.Module, called: nn.Module) -> None:
        self._policy = policy
        self._model = weakref.ref(model)  # whose hooks lead here
        self._misuse = Misuse()
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()
        self._steps = 0
        self._updates = 0
        self._autocast_was_used = False
        self._scale_was_used = False
        self._is_watching = True
        self._is_on = True
        self.checkpoints = CheckpointWatch(self._misuse)
        self._gradients = GradientMarks(model, self._after_gradient)
        self._batches = BatchWatch(policy, called, self._misuse, self._end_when_due)
        watch(self)

    @property
    def findings(self) -> Sequence[Finding]:
        return self._misuse.findings

    def undo(self) -> None:
        if self._is_on:
            self._is_on = False
            self._end_watch()
            self._batches.remove(for_good=True)
            self.checkpoints.remove()
            self.checkpoints.look(training_began=self._updates > 0)

    # What the user's loop asks of `Tuned`.

    def autocast_used(self) -> None:
        self._autocast_was_used = True

    def batch_size_asked(self) -> None:
        self._batches.batch_size = None

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        if self._scales and self._is_on:
            self.checkpoints.follow(optimizer)

    # What the loss scaler does.

    def after_scale(self, scaled: Any) -> None:
        if self._is_watching and not torch.compiler.is_compiling():
            self._scale_was_used = True
            for loss in tensors_in(scaled):
                self._gradients.follow_scaled(loss)

    def after_unscale(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_watching:
            self._gradients.unscaled(_parameters(optimizer))

    def before_scaler_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self.follow(optimizer)
        self._before_step(optimizer, by_scaler=True, is_scaled=True, has_closure=has_closure)

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

    # What happens to optimizers and gradients, whoever does it.

    def before_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        from amptune.runtime.watched_scaler import WatchedScaler

        is_nested, scaler = _stepping()
        if is_nested or (isinstance(scaler, WatchedScaler) and scaler.guard is self):
            return
        is_scaled = scaler is not None and scaler.is_enabled()
        self._before_step(optimizer, by_scaler=scaler is not None, is_scaled=is_scaled, has_closure=has_closure)

    def before_clipping(self, gradients: Sequence[torch.Tensor]) -> None:
        model = self._model()
        if model is None:
            return
        clipped = {id(gradient) for gradient in gradients}
        newest = self._gradients.newest(p for p in model.parameters() if id(p.grad) in clipped)
        if newest is not None and newest.origin == "scaled loss":
            self._misuse.say(
                "clipped-before-unscale",
                "gradients are clipped at {here} while they are still multiplied by the loss scale, so nearly all of "
                "them is cut off: call tuned.scaler.unscale_(optimizer) before",
            )

    def _after_gradient(self, parameter: torch.Tensor) -> None:
        if _is_inside_autocast(parameter.device):
            self._misuse.say(
                "backward-inside-autocast",
                "backward() at {here} runs inside autocast, which casts operations of the backward anew, to other "
                "dtypes than the forward had: leave the `with tuned.autocast():` block before it",
            )
        self._end_when_due()

    def _before_step(
        self, optimizer: torch.optim.Optimizer, *, by_scaler: bool, is_scaled: bool, has_closure: bool
    ) -> None:
        model = self._model()
        if model is None or not self._is_watching:
            return
        parameters = _parameters(optimizer)
        if not {id(parameter) for parameter in parameters} & {id(parameter) for parameter in model.parameters()}:
            self._look_at_stranger(parameters, model)
            return
        steps = self._optimizers.setdefault(optimizer, _Steps())
        steps.count += 1
        self._steps = max(self._steps, steps.count)
        self._look_at_autocast(parameters[0].device)
        newest = self._gradients.newest(parameters)
        if has_closure or newest is None:  # a closure's gradients are yet to come
            return
        if newest.when <= steps.last_gradient:
            self._look_at_repetition(steps, by_scaler=by_scaler)
        elif self._scales and not is_scaled:
            self._look_at_origin(newest, steps)
        if is_scaled:
            self._gradients.unscaled(parameters)
        steps.last_gradient, steps.last_by_scaler, steps.last_place = newest.when, by_scaler, self._misuse.here()

    def _look_at_repetition(self, steps: _Steps, *, by_scaler: bool) -> None:
        if by_scaler or steps.last_by_scaler:
            self._misuse.say(
                "stepped-twice",
                f"the optimizer steps again at {{here}} on gradients that were already applied at {steps.last_place}, "
                "so every update is taken twice: tuned.scaler.step(optimizer) calls optimizer.step(), leave the other "
                "out",
            )

    def _look_at_origin(self, gradient: Mark, steps: _Steps) -> None:
        if gradient.origin == "scaled loss":
            self._misuse.say(
                "stepped-on-scaled-gradients",
                "optimizer.step() at {here} applies gradients that are still multiplied by the loss scale, overflowed "
                "ones too: call tuned.scaler.step(optimizer) instead",
            )
        elif gradient.origin == "plain loss" and self._autocast_was_used and not self._scale_was_used:
            # Twice, as another loss of the same iteration may be the one that is scaled, and this one needs no scale.
            steps.without_scaler += 1
            if steps.without_scaler == 2:
                self._misuse.say(
                    "stepped-without-scaler",
                    "optimizer.step() at {here} trains under autocast fp16 without a loss scaler, so small gradients "
                    f"become zero: write {_RECIPE}",
                )

    def _look_at_autocast(self, device: torch.device) -> None:
        if _is_inside_autocast(device) and torch.is_autocast_cache_enabled():
            self._misuse.say(
                "stepped-inside-autocast",
                "the optimizer steps at {here} inside autocast, which keeps its casts of the old weights for what "
                "follows in the block: leave the `with tuned.autocast():` block before it",
            )

    def _look_at_stranger(self, parameters: Sequence[torch.Tensor], model: nn.Module) -> None:
        """An optimizer without a parameter of the model's: another model's, most likely, and none of our business."""
        if not self._gradients.now or any(parameter.grad is not None for parameter in parameters):
            return
        shapes = Counter(parameter.shape for parameter in parameters)
        every = Counter(parameter.shape for parameter in model.parameters())
        trained = Counter(parameter.shape for parameter in model.parameters() if parameter.requires_grad)
        if shapes in (every, trained):
            self._misuse.say(
                "optimizer-of-other-parameters",
                "the optimizer that steps at {here} holds parameters like the model's, but none of the model's own, "
                "and none with a gradient, so the model is not trained: build it from tuned.model.parameters(), "
                "after amptune.apply",
            )

    # What can only show later.

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

    @property
    def _scales(self) -> bool:
        return self._policy.autocast == "fp16"

    def _end_when_due(self) -> None:
        """Not from within the hook of a step: PyTorch is iterating over those then."""
        if self._steps >= WATCHED_STEPS:
            self._end_watch()

    def _end_watch(self) -> None:
        if self._is_watching:
            self._is_watching = False
            self._gradients.remove()
            self._batches.remove()
            unwatch(self)


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """A disabled loss scaler steps whatever has a `step`."""
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def _is_inside_autocast(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def _is_capturing() -> bool:
    """Whether a CUDA graph is being recorded, in which nothing may wait for the device."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _stepping() -> tuple[bool, torch.amp.GradScaler | None]:
    """Of the optimizer step that is running: whether it runs within another's, and the loss scaler that called it."""
    steps, scaler = 0, None
    for frame in frames_above(sys._getframe(1)):
        if frame.f_code.co_qualname == "Optimizer.profile_hook_step.<locals>.wrapper":
            steps += 1
        elif frame.f_code is torch.amp.GradScaler.step.__code__:
            scaler = cast("torch.amp.GradScaler", frame.f_locals["self"])
    return steps > 1, scaler
