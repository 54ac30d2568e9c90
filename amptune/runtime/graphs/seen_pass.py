"""Watches what a loop does with the outputs of a pass that the model itself ran, before such a pass is recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from amptune.runtime.graphs.host_effects import NotRecordableError
from amptune.runtime.graphs.signature import PassKind, outputs_of
from amptune.runtime.graphs.tensor_use import sources_among

__all__ = ["SeenPass", "is_kept", "name_of_node", "under_name"]


@dataclass(eq=False)
class SeenPass:
    """A kind of pass that came once, and the gradients of those outputs, by place, from which backward passes began."""

    kind: PassKind
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    _of_sources: dict[int, torch.Tensor] = field(default_factory=dict)
    _passes: set[int] = field(default_factory=set)
    _has_more: bool = False

    def watched(self, returned: Any) -> Any:
        """Returns copies that note which outputs a backward pass starts from, but those that others are made from."""
        signature, tensors = outputs_of(returned)
        sources = sources_among(tensors)
        for place, one in enumerate(tensors):
            if one.requires_grad and place in sources:
                one.register_hook(partial(self._of_sources.__setitem__, place))  # type: ignore[no-untyped-call]
            elif one.requires_grad:
                tensors[place] = under_name(name_of_node(one), _Mark).apply(self, place, one)
        return signature.filled(tensors)

    def note(self, place: int, gradient: torch.Tensor) -> None:
        """Notes that the running backward pass starts from this output."""
        self.gradients[place] = gradient.detach().clone()
        self._passes.add(torch._C._current_graph_task_id())
        self._has_more |= is_kept() or torch.is_grad_enabled()

    def is_used(self) -> bool:
        """Returns True once a backward pass has come. It started from a source if it did from no other output."""
        self.gradients = self.gradients or dict(self._of_sources)
        self._of_sources.clear()
        return bool(self.gradients)

    def require_one_pass(self) -> None:
        """Raises `NotRecordableError` if there was more than one backward pass, or if another may follow."""
        if self._has_more or len(self._passes) > 1:
            raise NotRecordableError("has several backward passes (one for each loss, retain_graph or create_graph)")


class _Mark(torch.autograd.Function):
    """An autograd function that copies a tensor, and notes when a backward pass reaches it."""

    @staticmethod
    def forward(ctx: Any, seen: SeenPass, place: int, output: torch.Tensor) -> torch.Tensor:
        ctx.seen, ctx.place = seen, place
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        ctx.seen.note(ctx.place, gradient)
        return None, None, gradient


def is_kept() -> bool:
    """Returns True if the running backward pass was asked to keep its graph (retain_graph)."""
    asked = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if asked is None else bool(asked())  # what cannot be asked counts as unsafe


def name_of_node(tensor: torch.Tensor) -> str:
    """Returns the name of what made the tensor, or ""."""
    return "" if tensor.grad_fn is None else tensor.grad_fn.name()


@cache
def under_name(name: str, function: Any) -> Any:
    """Returns the autograd function with another name for its nodes: a loop may ask an output for its `grad_fn`."""
    if not name:
        return function
    own = type(function)(function.__name__, (function,), {})
    own._backward_cls.__name__ = own._backward_cls.__qualname__ = name
    return own
