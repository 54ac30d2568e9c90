"""Finds the tensors that a pass reads and writes, and where its backward pass takes the gradients of weights.

A recorded pass can use only inputs, weights, buffers and its own tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amptune.runtime.graphs.host_effects import NotRecordableError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

__all__ = ["TensorWatch", "edges_for", "place_of"]

_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


class TensorWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has not typed it
    """A mode in which an operation raises `NotRecordableError` if a replay would leave it out or do it wrongly.

    Such operations are: reading a tensor that is neither `fixed` (inputs and weights) nor a buffer nor made in the
    mode, since the next pass may use another one; writing to `fixed`; bringing data from the host; collectives.
    """

    def __init__(self, fixed: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fixed = set(map(place_of, fixed))
        self._known = {*self._fixed, *map(place_of, buffers)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func.namespace in _COLLECTIVES:
            raise NotRecordableError("exchanges tensors with other processes")
        if func.namespace == "aten" and func._opname == "lift_fresh":  # torch.tensor(1.0) within the pass
            self._known.update(map(place_of, given))
        if any(place_of(tensor) not in self._known for tensor in given):
            raise NotRecordableError("uses a tensor that is none of its inputs, weights and buffers")
        if any(place_of(tensor) in self._fixed for tensor in _written(func, args, kwargs)):
            raise NotRecordableError("writes to its weights or inputs")
        result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if any(one.is_cuda for one in made) and any(_is_data_of_the_host(tensor) for tensor in given):
            raise NotRecordableError("brings tensors from the host to the device")
        self._known.update(map(place_of, made))
        return result


def place_of(tensor: torch.Tensor) -> int:
    """Returns an id of the memory that the tensor is a view of, valid as long as that memory lives."""
    if tensor.layout is not torch.strided:
        raise NotRecordableError("has tensors that are sparse")
    return int(tensor.untyped_storage()._cdata)


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _is_data_of_the_host(tensor: torch.Tensor) -> bool:
    """Returns False for a number (no dimensions) made in the pass: it is passed to the kernel as an argument."""
    return not tensor.is_cuda and tensor.dim() > 0


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
