"""Marks on the gradients of a model's parameters: how new each gradient is, and whether it is scaled.

The hooks before every optimizer step, and before gradients are clipped, are shared by the guards of a process. They
exist while a guard watches; if a guard is dropped without undo, they stay, idle, until the next guard ends.

A hook that torch.compile traced is in the graph's guards, so removing it would compile the graph anew. Such a hook does
nothing in the graph. It stays until its guard is undone.
"""

from __future__ import annotations

import math
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
    from types import FrameType

__all__ = [
    "GradientMarks",
    "Mark",
    "Watcher",
    "forget_traced",
    "is_traced",
    "note_traced",
    "remove_idle_hooks",
    "rest",
    "unwatch",
    "watch",
]

_traced: set[str] = set()


def note_traced(hook: str) -> None:
    """Notes that torch.compile traced a hook. It calls this when it traces, and never in the graph."""
    _traced.add(hook)


note_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # assume_constant_result, without importing it


def forget_traced(hook: str) -> None:
    _traced.discard(hook)


def is_traced(hook: str) -> bool:
    return hook in _traced


Origin = Literal["none", "plain loss", "scaled loss", "unscaled"]


@dataclass(slots=True)
class Mark:
    """The mark of one parameter's gradient: when a backward last added to it, and the kind of loss it came from."""

    when: int = 0
    origin: Origin = "none"
    added: int = 0


class GradientMarks:
    """The marks of a model's gradients, kept up to date by a hook on each parameter, until `remove`.

    Time is counted in gradients: `now` grows by one with each gradient added to a parameter. `passes` is the number of
    gradients of the parameter that has got the most. Parameters are looked up by identity, since tensors cannot be
    compared; the caller keeps the model alive.
    """

    def __init__(self, model: nn.Module, after_each: Callable[[torch.Tensor], None]) -> None:
        parameters = [p for p in model.parameters() if p.requires_grad and p.is_leaf and not nn.parameter.is_lazy(p)]
        self.now = self.passes = 0
        self._name = f"gradients of {id(model)}"
        forget_traced(self._name)
        _marks_by_name[self._name] = self
        self._after_each = after_each
        self._in_scaled_backward = False
        self._marks = {id(parameter): Mark() for parameter in parameters}
        self._handles = [p.register_post_accumulate_grad_hook(self._added) for p in parameters]  # type: ignore[no-untyped-call]

    def remove(self, *, for_good: bool) -> bool:
        """Removes the hooks, unless compiled autograd has traced them; returns True if they are gone."""
        if for_good or not is_traced(self._name):
            for handle in self._handles:
                handle.remove()
            self._handles = []
        return not self._handles

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
            _gradient_traced(self._name)
            return
        mark = self._marks.get(id(parameter))
        if mark is None:  # what another hook returned, which autograd passes on before it raises its error
            return
        self.now += 1
        mark.when = self.now
        mark.added += 1
        self.passes = max(self.passes, mark.added)
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


_marks_by_name: weakref.WeakValueDictionary[str, GradientMarks] = weakref.WeakValueDictionary()


def _gradient_traced(name: str) -> None:
    """Removes hooks that torch.compile compiles one by one, as it does in a backward pass that a compiled function
    calls on its own thread: they see nothing, and each costs a call. Compiled autograd has them in its graph.
    """
    dynamo = sys.modules.get("torch._dynamo.compiled_autograd")
    marks = _marks_by_name.get(name)
    if any(getattr(dynamo, flag, True) for flag in ("compiled_autograd_enabled", "in_compiled_autograd_region")):
        note_traced(name)
    elif marks is not None:
        marks.remove(for_good=True)


_gradient_traced._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as above


class Watcher(Protocol):
    def before_step(self, optimizer: torch.optim.Optimizer, *, has_closure: bool) -> None: ...

    def before_clipping(self, gradients: Sequence[torch.Tensor]) -> None: ...


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
_removals: dict[str, Callable[[], None]] = {}

# `clip_grad_norm_` and `clip_grad_value_` look up `_LOOKED_UP` in their module when they run, so the hook sees them
# however a program imported them (torch/nn/utils/clip_grad.py, 2.9 to 2.13). Without that name clipping is not seen.
# Each function's limit is in an argument of this name.
_CLIPPING = {"_clip_grads_with_norm_": "max_norm", "clip_grad_value_": "clip_value"}
_LOOKED_UP = "_group_tensors_by_device_and_dtype"


def watch(watcher: Watcher) -> None:
    _watchers.add(watcher)
    if "step" not in _removals:
        _removals["step"] = register_optimizer_step_pre_hook(_before_step).remove
    if "clipping" not in _removals:
        _removals["clipping"] = _hook_clipping()


def rest(watcher: Watcher) -> None:
    """Ends the calls of a watch from within a hook, where `unwatch` cannot be called."""
    _watchers.discard(watcher)


def unwatch(watcher: Watcher, *, for_good: bool) -> None:
    """Ends a watch, and removes the hooks if it was the last one.

    Not to be called in a hook of an optimizer step: PyTorch is iterating over these hooks then.
    """
    _watchers.discard(watcher)
    remove_idle_hooks(for_good=for_good)


def remove_idle_hooks(*, for_good: bool) -> None:
    """Removes the hooks if there is no watch; those that were traced only `for_good`."""
    for hook in [] if _watchers else [*_removals]:
        if for_good or not is_traced(hook):
            _removals.pop(hook)()
            forget_traced(hook)


def _before_step(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[Any, Any]) -> None:
    if torch.compiler.is_compiling():
        note_traced("step")
        return
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    for watcher in list(_watchers):
        watcher.before_step(optimizer, has_closure=closure is not None)


def _hook_clipping() -> Callable[[], None]:
    original = getattr(clip_grad, _LOOKED_UP, None)
    if original is None:
        return lambda: None

    def group(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            note_traced("clipping")
        else:
            _look_at_clipping(sys._getframe(1), tensors)
        return original(tensors, *args, **kwargs)

    def remove() -> None:
        if getattr(clip_grad, _LOOKED_UP) is group:  # else somebody replaced it since by a function that calls it
            setattr(clip_grad, _LOOKED_UP, original)

    setattr(clip_grad, _LOOKED_UP, group)
    return remove


def _look_at_clipping(frame: FrameType, tensors: Any) -> None:
    """Leaves out a limit that is infinite: it clips nothing, and the loop asks for the norm alone."""
    limit = _CLIPPING.get(frame.f_code.co_name)
    if limit is not None and not math.isinf(frame.f_locals.get(limit, 0.0)):
        for watcher in list(_watchers):
            watcher.before_clipping(tensors[0])
