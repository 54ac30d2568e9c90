"""Marks on the gradients of a model's parameters: how new each gradient is, and whether it is scaled.

The hooks before every optimizer step, and before gradients are clipped, are shared by the guards of a process. They
exist while a guard watches; if a guard is dropped without undo, they stay, idle, until the next guard ends.
"""

from __future__ import annotations

import sys
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["GradientMarks", "Mark", "Watcher", "unwatch", "watch"]

Origin = Literal["none", "plain loss", "scaled loss", "unscaled"]


@dataclass(slots=True)
class Mark:
    """The mark of one parameter's gradient: when a backward last added to it, and the kind of loss it came from."""

    when: int = 0
    origin: Origin = "none"


class GradientMarks:
    """The marks of a model's gradients, kept up to date by a hook on each parameter, until `remove`.

    Time is counted in gradients: `now` grows by one with each gradient added to a parameter. Parameters are looked up
    by identity, since tensors cannot be compared; the caller keeps the model alive.
    """

    def __init__(self, model: nn.Module, after_each: Callable[[torch.Tensor], None]) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad and p.is_leaf and not nn.parameter.is_lazy(p)]
        self.now = 0
        self._after_each = after_each
        self._in_scaled_backward = False
        self._marks = {id(parameter): Mark() for parameter in parameters}
        self._handles = [p.register_post_accumulate_grad_hook(self._added) for p in parameters]  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def follow_scaled(self, loss: torch.Tensor) -> None:
        """Marks the gradients that a backward from this loss adds as scaled."""
        self._in_scaled_backward = False  # a backward that raised did not reset it
        if loss.requires_grad:
            loss.register_hook(self._scaled_backward_begins)  # type: ignore[no-untyped-call]

    def unscaled(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            mark = self._marks.get(id(parameter))
            if mark is not None and mark.origin == "scaled loss":
                mark.origin = "unscaled"

    def newest(self, parameters: Iterable[torch.Tensor]) -> Mark | None:
        """Returns the mark of the gradient of these parameters that a backward added to last, or None."""
        held = [self._marks.get(id(parameter)) for parameter in parameters if parameter.grad is not None]
        return max((mark for mark in held if mark and mark.when), key=lambda mark: mark.when, default=None)

    def _added(self, parameter: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            return
        self.now += 1
        mark = self._marks[id(parameter)]
        mark.when = self.now
        mark.origin = "scaled loss" if self._in_scaled_backward else "plain loss"
        self._after_each(parameter)

    def _scaled_backward_begins(self, _: torch.Tensor) -> None:
        """Notes that a scaled backward runs; the autograd engine calls back at the end of this backward.

        A nested backward, as in reentrant checkpointing, counts as scaled too.
        """
        if self._handles and not torch.compiler.is_compiling():
            self._in_scaled_backward = True
            torch.autograd.Variable._execution_engine.queue_callback(self._scaled_backward_ends)

    def _scaled_backward_ends(self) -> None:
        self._in_scaled_backward = False


class Watcher(Protocol):
    def before_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None: ...

    def before_clipping(self, gradients: Sequence[torch.Tensor]) -> None: ...


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
_removals: list[Callable[[], None]] = []

# `clip_grad_norm_` and `clip_grad_value_` look up `_LOOKED_UP` in their module when they run, so the hook sees them
# however a program imported them (torch/nn/utils/clip_grad.py, 2.9 to 2.13). Without that name clipping is not seen.
_CLIPPING = {"_clip_grads_with_norm_", "clip_grad_value_"}
_LOOKED_UP = "_group_tensors_by_device_and_dtype"


def watch(watcher: Watcher) -> None:
    _watchers.add(watcher)
    if not _removals:
        _removals.extend([register_optimizer_step_pre_hook(_before_step).remove, _hook_clipping()])


def unwatch(watcher: Watcher) -> None:
    """Ends a watch. Not to be called in a hook of an optimizer step: PyTorch is iterating over these hooks then."""
    _watchers.discard(watcher)
    while _removals and not _watchers:
        _removals.pop()()


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    if torch.compiler.is_compiling():
        return
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    for watcher in list(_watchers):
        watcher.before_step(optimizer, has_closure=closure is not None)


def _hook_clipping() -> Callable[[], None]:
    original = getattr(clip_grad, _LOOKED_UP, None)
    if original is None:
        return lambda: None

    def group(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and sys._getframe(1).f_code.co_name in _CLIPPING:
            for watcher in list(_watchers):
                watcher.before_clipping(tensors[0])
        return original(tensors, *args, **kwargs)

    def remove() -> None:
        if getattr(clip_grad, _LOOKED_UP) is group:  # else somebody replaced it since by a function that calls it
            setattr(clip_grad, _LOOKED_UP, original)

    setattr(clip_grad, _LOOKED_UP, group)
    return remove
