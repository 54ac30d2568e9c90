"""Calls of a model: which of them are alike, and what the loop does with what they return."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from amptune.runtime.graphs.host_effects import NotRecordableError
from amptune.runtime.graphs.outputs import CONSTANTS, is_kept, tensors_of
from amptune.runtime.graphs.tensor_use import sources_among

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.utils._pytree import TreeSpec

__all__ = ["ModelCall", "PassKind", "SeenPass"]


@dataclass(frozen=True, slots=True)
class _Meta:
    """The properties of a tensor that matter to a recording; `first` is the first position of the same tensor."""

    first: int
    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device


@dataclass(frozen=True, eq=False)
class ModelCall:
    """The arguments of a call: their structure, tensors and plain values. Equal calls can use the same recording."""

    structure: TreeSpec
    leaves: tuple[Any, ...]
    tensors: Sequence[torch.Tensor]

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str) -> ModelCall | None:
        """Returns the call, or None for arguments that no recording can serve."""
        found, structure = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in found if isinstance(leaf, torch.Tensor)]
        plain = all(type(leaf) in (torch.Tensor, nn.Parameter, *CONSTANTS) for leaf in found)
        fitting = plain and all(
            one.device.type == device_type and not one.requires_grad and one.layout is torch.strided and not vars(one)
            for one in tensors
        )
        if not (tensors and fitting):
            return None
        first = {id(tensor): place for place, tensor in reversed([*enumerate(tensors)])}
        leaves = tuple(
            _meta(leaf, first[id(leaf)]) if isinstance(leaf, torch.Tensor) else (type(leaf), leaf, str(leaf))
            for leaf in found
        )
        return ModelCall(structure, leaves, tensors)

    def on(self, model: nn.Module, tensors: Sequence[torch.Tensor]) -> Any:
        """Calls the model with `tensors` in place of the call's own."""
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, _Meta) else leaf[1] for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.structure)
        outputs = model(*args, **kwargs)
        after, structure = tree_flatten((args, kwargs))
        if structure != self.structure or any(one is not other for one, other in zip(leaves, after, strict=True)):
            raise NotRecordableError("changes the lists or dictionaries that it is given")
        return outputs

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ModelCall) and (self.leaves, self.structure) == (other.leaves, other.structure)


def _meta(tensor: torch.Tensor, first: int) -> _Meta:
    return _Meta(first, tensor.shape, tensor.dtype, tensor.stride(), tensor.device)


@dataclass(frozen=True, kw_only=True)
class PassKind:
    """The conditions that must be the same for a recording to compute what the model would."""

    call: ModelCall
    autocast: tuple[bool, torch.dtype]
    trained: tuple[bool, ...]

    def without_tensors(self) -> PassKind:
        return replace(self, call=replace(self.call, tensors=()))


@dataclass
class SeenPass:
    """A kind of pass that came once, and the gradients of those outputs from which backward passes have started."""

    kind: PassKind
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    _of_sources: dict[int, torch.Tensor] = field(default_factory=dict)
    _passes: set[int] = field(default_factory=set)
    _has_more: bool = False

    def watched(self, outputs: Any) -> Any:
        """Returns copies that note which outputs a backward pass starts from, but those that others are made from."""
        leaves, structure = tree_flatten(outputs)
        tensors = tensors_of(outputs)
        sources = sources_among(tensors)
        has_gradient = [place for place, one in enumerate(tensors) if one.requires_grad]
        marked = {
            id(tensors[place]): _Mark.apply(self, number, tensors[place])  # type: ignore[no-untyped-call]
            for number, place in enumerate(has_gradient)
            if place not in sources
        }
        for number, place in enumerate(has_gradient):
            if place in sources:
                tensors[place].register_hook(partial(self._of_sources.__setitem__, number))  # type: ignore[no-untyped-call]
        return tree_unflatten([marked.get(id(leaf), leaf) for leaf in leaves], structure)

    def note(self, number: int, gradient: torch.Tensor) -> None:
        """Notes that the running backward pass starts from this output."""
        self.gradients[number] = gradient.detach().clone()
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
    def forward(ctx: Any, seen: SeenPass, number: int, output: torch.Tensor) -> torch.Tensor:
        ctx.seen, ctx.number = seen, number
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        ctx.seen.note(ctx.number, gradient)
        return None, None, gradient
