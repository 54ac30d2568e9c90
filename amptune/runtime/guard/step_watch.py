"""Checks that a training loop applies its gradients correctly: once, unscaled, and computed outside autocast."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from amptune.changes.tensor_tree import tensors_in
from amptune.runtime.guard.gradient_marks import GradientBefore, GradientMarks
from amptune.runtime.guard.misuse import Misuse
from amptune.runtime.optimizer import is_fusable
from amptune.runtime.scaler import has_scaler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from amptune.policy.settings import Policy
    from amptune.runtime.guard.gradient_marks import Mark

__all__ = ["WATCHED_STEPS", "StepWatch"]

WATCHED_STEPS = 20  # of the optimizer that steps most often
_MOST_PASSES = 10 * WATCHED_STEPS

# The hook serves all watches. If a model is dropped without undo, it stays, idle, until the next watch ends.
_watches: weakref.WeakSet[StepWatch] = weakref.WeakSet()
_hooks: list[torch.utils.hooks.RemovableHandle] = []


@dataclass(slots=True)
class _Steps:
    """The steps of one optimizer; when the last began and ended, in `GradientMarks`' time, and what it applied."""

    count: int = 0
    begun: int = 0
    ended: int = 0
    by_scaler: bool = False
    scaler_calls: bool = False
    applied: list[GradientBefore] = field(default_factory=list)


class StepWatch:
    """A watch on gradients from backward to the optimizer's step, whoever calls the step, until `remove`.

    The loss scaler reports by the methods with `scale` in their names, and `Tuned` by `served` and `calls`; hooks see
    everything else. If `scale_was_asked`, the loop may unscale by hand until the next step.
    """

    def __init__(self, policy: Policy, model: nn.Module, called: nn.Module, after_gradient: Callable[[], None]) -> None:
        self.served: set[int] = set()  # the parameters of optimizers that passed `tuned.optimizer`
        self.calls: list[bool] = []  # of what the policy put around the model, and whether gradients were on
        self.most_steps = self._steps_of_any = 0
        self.autocast_was_used = self.scale_was_asked = self._scale_was_used = False
        self.misuse = Misuse()
        self._policy, self._scales = policy, has_scaler(policy)
        self._has_half_weights = policy.weights == "half"
        self._model = weakref.ref(model)  # weak, since the model's hooks refer to this watch
        self._after_gradient = after_gradient
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Steps] = weakref.WeakKeyDictionary()
        self._gradients = GradientMarks(model, policy, self._look_at_backward)
        note = lambda *_: self.calls.append(torch.is_grad_enabled())  # noqa: E731
        self._handle = None if called is model else called.register_forward_pre_hook(note)
        _watches.add(self)
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))

    def remove(self) -> None:
        """Removes the hooks. Not to be called in a hook of a step: PyTorch is iterating over these hooks then."""
        self._gradients.remove()
        if self._handle is not None:
            self._handle.remove()
        _watches.discard(self)
        while _hooks and not _watches:
            _hooks[-1].remove()
            _hooks.pop()

    @property
    def is_over(self) -> bool:
        """True after `WATCHED_STEPS`, and after many steps of another model or passes without a step that is seen."""
        unseen = not self.most_steps and self._gradients.passes >= _MOST_PASSES
        return unseen or self.most_steps >= WATCHED_STEPS or self._steps_of_any >= _MOST_PASSES

    def autocast_is_used(self) -> None:
        self.autocast_was_used, self._gradients.autocast = True, None

    def after_scale(self, scaled: Any) -> None:
        self._scale_was_used = True
        for loss in tensors_in(scaled):
            self._gradients.follow_scaled(loss)

    def before_unscale(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = _parameters(optimizer)
        if not self.scale_was_asked and self._gradients.are_cut(parameters):
            self.misuse.note(
                "clipped-before-unscale",
                "gradients were clipped while they were still multiplied by the loss scale, so nearly all of them was "
                "cut off: call tuned.scaler.unscale_(optimizer) before",
            )
        self._gradients.unscaled(parameters)
        self.misuse.tell(3)  # the caller of the scaler's method

    def before_scaler_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self._look_at_step(optimizer, by_scaler=True, has_closure=has_closure)
        self.misuse.tell(3)

    def before_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None:
        self._steps_of_any += 1
        steps = self._optimizers.get(optimizer)
        if steps is not None and steps.scaler_calls:  # seen by `before_scaler_step`
            steps.scaler_calls = False
        elif not self.is_over:
            self._look_at_step(optimizer, by_scaler=False, has_closure=has_closure)
            self.misuse.tell(4)  # the caller of optimizer.step()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Notes what was applied. A step that raised, and a subclass's that goes on to its class's, have not ended."""
        steps, parameters = self._optimizers.get(optimizer), _parameters(optimizer)
        newest = self._gradients.newest(parameters)
        if steps is not None and newest is not None:
            steps.ended = newest.when
            steps.applied = [GradientBefore(one.grad) for one in parameters if one.grad is not None]

    def _look_at_backward(self, parameter: torch.Tensor) -> None:
        # Without a cache it is Lightning's, which runs the whole training_step in autocast in manual optimization.
        has_autocast = torch.amp.is_autocast_available(parameter.device.type) and torch.is_autocast_cache_enabled()
        if has_autocast and torch.is_autocast_enabled(parameter.device.type):
            self.misuse.note(
                "backward-inside-autocast",
                "backward() runs inside autocast, which casts operations of the backward anew, to other dtypes than "
                "the forward had: leave the `with tuned.autocast():` block before it",
            )
            self.misuse.tell(6)  # the caller of Tensor.backward; autograd's thread for a GPU has no caller
        self._after_gradient()

    def _look_at_step(self, optimizer: torch.optim.Optimizer, *, by_scaler: bool, has_closure: bool) -> None:
        model, parameters = self._model(), _parameters(optimizer)
        if model is None or not {id(one) for one in parameters} & {id(one) for one in model.parameters()}:
            return
        steps = self._optimizers.setdefault(optimizer, _Steps())
        knows_scale, self.scale_was_asked = self.scale_was_asked, False
        newest = self._gradients.newest(parameters)
        when = 0 if newest is None else newest.when
        if steps.ended < when == steps.begun:
            return
        steps.count, steps.begun, steps.scaler_calls = steps.count + 1, when, by_scaler
        self.most_steps = max(self.most_steps, steps.count)
        self._look_at_what_is_left_out(optimizer, parameters, steps.count)
        if newest is not None and not has_closure:  # which computes its gradients later
            if when <= steps.ended:
                self._look_at_repetition(steps, parameters, by_scaler=by_scaler or steps.by_scaler)
            # A GradScaler of the loop's own sets `found_inf` while a fused optimizer steps, and has it unscale.
            elif self._scales and not by_scaler and not knows_scale and getattr(optimizer, "found_inf", None) is None:
                self._look_at_origin(newest, parameters, is_first=steps.count == 1)
        steps.by_scaler = by_scaler

    def _look_at_what_is_left_out(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], count: int
    ) -> None:
        """Looks for what the policy has and the loop does not use. Its second step shows what it calls."""
        is_known = self.served.issuperset(map(id, parameters)) or not isinstance(optimizer, torch.optim.Optimizer)
        if count == 1 and self._policy.fused_optimizer and not is_known and is_fusable(optimizer):
            self.misuse.note(
                "optimizer-not-passed",
                f"the policy fuses the optimizer, and {type(optimizer).__name__} was never passed to "
                "tuned.optimizer(optimizer)",
            )
        if count == 2 and self._handle is not None and not any(self.calls):
            self.misuse.note(
                "model-not-called",
                "tuned.model, which the policy compiles or records, is never called: call it, not the model below it",
            )
        if count == 2 and self._gradients.autocast is not None and self._gradients.are_uncast():
            self.misuse.note(
                "autocast-unused",
                f"training never enters the policy's autocast {self._policy.autocast}, and so runs in FP32: run the "
                "forward pass and the loss in `with tuned.autocast():`",
            )

    def _look_at_repetition(self, steps: _Steps, parameters: Sequence[torch.Tensor], *, by_scaler: bool) -> None:
        """Gradients that the loop set or wrote to since the last step are new, though no backward gave them."""
        now = [parameter.grad for parameter in parameters if parameter.grad is not None]
        if len(now) == len(steps.applied) and all(map(GradientBefore.is_as, steps.applied, now)):
            calls = "tuned.scaler.step(optimizer) calls optimizer.step(), leave the other out"
            self.misuse.note(
                "stepped-twice",
                "the optimizer steps again on gradients that were already applied, so every update is taken twice: "
                f"{calls if by_scaler else 'leave one of the two steps out'}",
            )

    def _look_at_origin(self, gradient: Mark, parameters: Sequence[torch.Tensor], *, is_first: bool) -> None:
        needs_scaler = (self.autocast_was_used or self._has_half_weights) and not self._scale_was_used
        if gradient.origin == "scaled loss":
            self.misuse.note(
                "stepped-on-scaled-gradients",
                "optimizer.step() applies gradients that are still multiplied by the loss scale, overflowed ones too: "
                "call tuned.scaler.step(optimizer) instead",
            )
        # In the first iteration another loss may come that is scaled. A scaler of the loop's own changes the gradients.
        elif needs_scaler and not is_first and self._gradients.are_as_added(parameters):
            how = "with half weights" if self._has_half_weights else "under autocast fp16"
            self.misuse.note(
                "stepped-without-scaler",
                f"optimizer.step() trains {how} without a loss scaler, so small gradients become zero: write "
                "tuned.scaler.scale(loss).backward(); tuned.scaler.step(optimizer); tuned.scaler.update()",
            )


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Returns [] for an object without groups: a disabled scaler steps whatever has a `step`."""
    return [parameter for group in getattr(optimizer, "param_groups", ()) for parameter in group["params"]]


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    if not torch.compiler.is_compiling():
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        for watch in list(_watches):
            watch.before_step(optimizer, has_closure=closure is not None)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for watch in list(_watches):
            watch.after_step(optimizer)
