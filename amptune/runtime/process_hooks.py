"""What the guards of a process share: a hook before every optimizer step, and one before gradients are clipped.

Both stand while a guard watches. Where one was dropped instead of undone, they stay, idle, until the next one ends.
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

# `clip_grad_norm_` and `clip_grad_value_` look this up in their module when they run, so it is seen whichever way
# a program imported them (torch/nn/utils/clip_grad.py, 2.9 to 2.13). In a PyTorch without it clipping goes unseen.
_CLIPPING = {"_clip_grads_with_norm_", "clip_grad_value_"}
_LOOKED_UP = "_group_tensors_by_device_and_dtype"


def watch(watcher: Watcher) -> None:
    _watchers.add(watcher)
    if not _removals:
        _removals.extend([register_optimizer_step_pre_hook(_before_step).remove, _hook_clipping()])


def unwatch(watcher: Watcher) -> None:
    """Not to be called from within a hook of an optimizer step, which PyTorch is iterating over then."""
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
        if getattr(clip_grad, _LOOKED_UP) is group:  # and not what somebody put over it, which calls it
            setattr(clip_grad, _LOOKED_UP, original)

    setattr(clip_grad, _LOOKED_UP, group)
    return remove
