"""Hooks that the guards of a process share: one before every optimizer step, and one before gradients are clipped.

Both exist while a guard watches. If a guard is dropped without undo, they stay, idle, until the next guard ends.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Watcher", "unwatch", "watch"]


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
