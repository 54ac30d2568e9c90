"""Checks that a training loop applies its gradients correctly: once, unscaled, outside autocast, and to its model."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from amptune.changes.tensor_tree import tensors_in
from amptune.runtime.guard.gradient_marks import GradientMarks, rest, unwatch, watch
from amptune.runtime.guard.misuse import Misuse, Place, frames_above
from amptune.runtime.scaler import has_scaler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from amptune.policy.settings import Policy
    from amptune.runtime.guard.gradient_marks import Mark

__all__ = ["WATCHED_STEPS", "StepWatch"]

# Steps of the optimizer that steps most often.
WATCHED_STEPS = 20
_MOST_PASSES = 10 * WATCHED_STEPS


@dataclass(slots=True)
class _Steps:
    """The steps of one optimizer: their number, and what the last one applied, in the time of `GradientMarks`."""

    count: int = 0
    without_scaler: int = 0
    last_gradient: int = 0
    last_by_scaler: bool = False
    last_place: Place | None = None
    applied: list[tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=list)

    def note_applied(self, parameters: Sequence[torch.Tensor]) -> None:
        self.applied = [(weakref.ref(p.grad), p.grad._version) for p in parameters if p.grad is not None]

    def has_applied(self, parameters: Sequence[torch.Tensor], *, unscaled: bool) -> bool:
        """Returns True if no gradient was replaced since the last step, or written to, save by a scaler's unscaling."""
        now = [p.grad for p in parameters if p.grad is not None]
        return len(now) == len(self.applied) and all(
            ref() is grad and (unscaled or grad._version == version)
            for grad, (ref, version) in zip(now, self.applied, strict=True)
        )


class StepWatch:
    """A watch on gradients from backward to the optimizer's step, whoever calls the step, until `remove`.

    The loss scaler reports by the methods with `scale` in their names; hooks see everything else. `most_steps` is the
    number of steps of the optimizer that stepped most often.
    """

    def __init__(self, policy: Policy, model: nn.Module, misuse: Misuse, after_gradient: Callable[[], None]) -> None:
        self.most_steps = 0
        self.autocast_was_used = False
        self._scale_was_used = False
        self._scale_was_asked = False
        self._steps_of_any = 0
        self._scales = has_scaler(policy)
        self._needs_masters = policy.master_weights
        self._handed_out: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._in_half = "with half weights" if policy.weights == "half" else "under autocast fp16"
        self._model = weakref.ref(model)  # weak, since the model's hooks refer to this watch
        self._misuse = misuse
        self._after_gradient = after_gradient
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()
        self._gradients = GradientMarks(model, self._look_at_backward)
        watch(self)

    def remove(self, *, for_good: bool) -> bool:
        """Removes the hooks; returns False if some of the model's stay because torch.compile has traced them.

        Not to be called in a hook of a step: PyTorch is iterating over these hooks then.
        """
        unwatch(self, for_good=for_good)
        return self._gradients.remove(for_good=for_good)

    @property
    def is_over(self) -> bool:
        """True after `WATCHED_STEPS`; for a model that does not train, after many steps of others; and after many
        backward passes if no step is seen, as where torch.compile traced it.
        """
        unseen = not self.most_steps and self._gradients.passes >= _MOST_PASSES
        return unseen or self.most_steps >= WATCHED_STEPS or self._steps_of_any >= _MOST_PASSES

    def handed_out(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes that the optimizer went through `tuned.optimizer`."""
        self._handed_out.add(optimizer)

    def after_scale(self, scaled: Any) -> None:
        self._scale_was_used = True
        for loss in tensors_in(scaled):
            self._gradients.follow_scaled(loss)

    def scale_asked(self) -> None:
        """Notes that the loop knows the scale, and may unscale by hand until the next step."""
        self._scale_was_asked = True

    def after_unscale(self, optimizer: torch.optim.Optimizer) -> None:
        self._gradients.unscaled(_parameters(optimizer))

    def before_scaler_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self._look_at_step(optimizer, by_scaler=True, is_scaled=True, has_closure=has_closure)

    def before_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self._steps_of_any += 1
        if self.is_over:  # of a model that does not train: nothing else may tell
            rest(self)
            return
        is_nested, scaler = _stepping()
        guard = getattr(scaler, "guard", None)
        if is_nested or (guard is not None and guard.step_watch is self):  # seen by `before_scaler_step` already
            return
        is_scaled = scaler is not None and scaler.is_enabled()
        self._look_at_step(optimizer, by_scaler=scaler is not None, is_scaled=is_scaled, has_closure=has_closure)

    def before_clipping(self, gradients: Sequence[torch.Tensor]) -> None:
        model = self._model()
        if model is None:
            return
        clipped = {id(gradient) for gradient in gradients}
        newest = self._gradients.newest(p for p in model.parameters() if id(p.grad) in clipped)
        if newest is not None and newest.origin == "scaled loss" and not self._scale_was_asked:
            self._misuse.say(
                "clipped-before-unscale",
                "gradients are clipped at {here} while they are still multiplied by the loss scale, so nearly all of "
                "them is cut off: call tuned.scaler.unscale_(optimizer) before",
            )

    def _look_at_backward(self, parameter: torch.Tensor) -> None:
        # Without a cache it is Lightning's, which runs the whole training_step in autocast in manual optimization.
        if _is_inside_autocast(parameter.device) and torch.is_autocast_cache_enabled():
            self._misuse.say(
                "backward-inside-autocast",
                "backward() at {here} runs inside autocast, which casts operations of the backward anew, to other "
                "dtypes than the forward had: leave the `with tuned.autocast():` block before it",
            )
        self._after_gradient()

    def _look_at_step(
        self, optimizer: torch.optim.Optimizer, *, by_scaler: bool, is_scaled: bool, has_closure: bool
    ) -> None:
        model = self._model()
        if model is None:
            return
        parameters = _parameters(optimizer)
        if not {id(parameter) for parameter in parameters} & {id(parameter) for parameter in model.parameters()}:
            self._look_at_stranger(parameters, model)
            return
        steps = self._optimizers.setdefault(optimizer, _Steps())
        steps.count += 1
        self.most_steps = max(self.most_steps, steps.count)
        self._look_at_autocast(parameters[0].device)
        self._look_at_masters(optimizer, parameters)
        is_scaled_by_hand, self._scale_was_asked = self._scale_was_asked, False
        newest = self._gradients.newest(parameters)
        if has_closure or newest is None:  # a closure computes its gradients later
            return
        if newest.when <= steps.last_gradient:
            self._look_at_repetition(steps, parameters, by_scaler=by_scaler)
        elif self._scales and not is_scaled and not is_scaled_by_hand:
            self._look_at_origin(newest, steps)
        if is_scaled:
            self._gradients.unscaled(parameters)
        steps.last_gradient, steps.last_by_scaler, steps.last_place = newest.when, by_scaler, self._misuse.here()
        steps.note_applied(parameters)

    def _look_at_repetition(self, steps: _Steps, parameters: Sequence[torch.Tensor], *, by_scaler: bool) -> None:
        """Gradients that the loop set itself since the last step are new, though no backward gave them."""
        scaled = by_scaler or steps.last_by_scaler
        if steps.has_applied(parameters, unscaled=scaled):
            calls = "tuned.scaler.step(optimizer) calls optimizer.step(), leave the other out"
            self._misuse.say(
                "stepped-twice",
                f"the optimizer steps again at {{here}} on gradients that were already applied at {steps.last_place}, "
                f"so every update is taken twice: {calls if scaled else 'leave one of the two steps out'}",
            )

    def _look_at_origin(self, gradient: Mark, steps: _Steps) -> None:
        if gradient.origin == "scaled loss":
            self._misuse.say(
                "stepped-on-scaled-gradients",
                "optimizer.step() at {here} applies gradients that are still multiplied by the loss scale, overflowed "
                "ones too: call tuned.scaler.step(optimizer) instead",
            )
        elif gradient.origin == "plain loss" and self._computes_in_half and not self._scale_was_used:
            # Said at the second time only: another loss of the iteration may be scaled, and this one need no scale.
            steps.without_scaler += 1
            if steps.without_scaler == 2:
                self._misuse.say(
                    "stepped-without-scaler",
                    f"optimizer.step() at {{here}} trains {self._in_half} without a loss scaler, so small gradients "
                    "become zero: write tuned.scaler.scale(loss).backward(); tuned.scaler.step(optimizer); "
                    "tuned.scaler.update()",
                )

    @property
    def _computes_in_half(self) -> bool:
        return self.autocast_was_used or self._in_half == "with half weights"

    def _look_at_autocast(self, device: torch.device) -> None:
        if _is_inside_autocast(device) and torch.is_autocast_cache_enabled():
            self._misuse.say(
                "stepped-inside-autocast",
                "the optimizer steps at {here} inside autocast, which keeps its casts of the old weights for what "
                "follows in the block: leave the `with tuned.autocast():` block before it",
            )

    def _look_at_masters(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        in_half = any(parameter.dtype is torch.float16 for parameter in parameters)
        if self._needs_masters and in_half and optimizer not in self._handed_out:
            self._misuse.say(
                "stepped-without-masters",
                "optimizer.step() at {here} updates weights in half, and small updates are lost, as this optimizer has "
                "no master weights: write optimizer = tuned.optimizer(optimizer) before",
            )

    def _look_at_stranger(self, parameters: Sequence[torch.Tensor], model: nn.Module) -> None:
        """Checks an optimizer that has no parameter of the model; most likely it rightly belongs to another model."""
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


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns [] for an object without groups, since a disabled loss scaler steps any object that has a `step`."""
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def _is_inside_autocast(device: torch.device) -> bool:
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


def _stepping() -> tuple[bool, torch.amp.GradScaler | None]:
    """Returns (whether the running optimizer step is inside another one's, the loss scaler that called it or None)."""
    steps, scaler = 0, None
    for frame in frames_above(sys._getframe(1)):
        if frame.f_code.co_qualname == "Optimizer.profile_hook_step.<locals>.wrapper":
            steps += 1
        elif frame.f_code.co_name == "step" and isinstance(caller := frame.f_locals.get("self"), torch.amp.GradScaler):
            scaler = caller
    return steps > 1, scaler
