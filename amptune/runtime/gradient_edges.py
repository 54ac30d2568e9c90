"""Finds the points in the autograd graph at which a recorded backward pass takes the gradients of weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge

from amptune.runtime.host_effects import NotRecordableError
from amptune.runtime.tensor_watch import place_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

__all__ = ["edges_for"]

_HALF = (torch.bfloat16, torch.float16)


def edges_for(
    outputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], others: Collection[torch.Tensor]
) -> list[torch.Tensor | GradientEdge]:
    """Returns the point at which `torch.autograd.grad` takes each weight's gradient: usually the weight itself.

    If the only use of a weight is one cast to half, its gradient is taken in half, before it is cast back: then only
    the cast is left to do, and one kernel can do it for many weights.

    Raises `NotRecordableError` if gradients flow to a tensor in the memory of `others`, as nothing would store them
    there; gradients of a tensor made in the pass are dropped with it.
    """
    known, places = set(map(id, weights)), set(map(place_of, others))
    sources: dict[int, list[Any]] = {}
    for node, source in _ways_to_leaves(outputs):
        if id(node.variable) not in known and place_of(node.variable) in places:
            raise NotRecordableError("has gradients for what is none of the weights that its modules have")
        sources.setdefault(id(node.variable), []).append(source)
    if any(output.is_leaf and id(output) not in known for output in outputs):
        raise NotRecordableError("returns a tensor that has a gradient of its own")
    return [_edge_of(weight, sources.get(id(weight), [])) for weight in weights]


def _ways_to_leaves(outputs: Iterable[torch.Tensor]) -> Iterator[tuple[Any, Any]]:
    """Yields (node that takes a leaf's gradient, node that gives it), once for each time that one gives it."""
    met: set[Any] = set()
    ahead: list[tuple[Any, Any]] = [(None, output.grad_fn) for output in outputs]
    while ahead:
        source, node = ahead.pop()
        if type(node).__name__ == "AccumulateGrad":
            yield node, source
        elif node is not None and node not in met:
            met.add(node)
            ahead += [(node, following) for following, _ in node.next_functions]


def _edge_of(weight: torch.Tensor, sources: Sequence[Any]) -> torch.Tensor | GradientEdge:
    if len(sources) != 1 or type(sources[0]).__name__ != "ToCopyBackward0":
        return weight
    metadata = getattr(sources[0], "_input_metadata", ())
    is_cast_to_half = [(one.dtype in _HALF, one.device) for one in metadata] == [(True, weight.device)]
    return GradientEdge(sources[0], 0) if is_cast_to_half and weight.dtype is torch.float32 else weight
