"""Finds the tensors that a pass reads and writes, and where its backward pass takes the gradients of weights.

A recorded pass can use only inputs, weights, buffers and its own tensors, all on one device and one stream.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import GradientEdge
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amptune.changes.tensor_tree import HALF_DTYPES
from amptune.runtime.graphs.host_effects import NotRecordableError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

__all__ = [
    "COLLECTIVES",
    "COPIES",
    "WAITS",
    "TensorWatch",
    "WaitMode",
    "edges_for",
    "name_of_node",
    "place_of",
    "require_apart",
    "sources_among",
    "written",
]

COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
COPIES = ("_to_copy", "copy_", "copy")
WAITS = "waits for the device (.item(), .cpu(), or a tensor in an `if`)"


class WaitMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has not typed it
    """A mode in which the host does not wait for numbers of the device, but gets those that a former pass got.

    Without `known` it waits, and notes them as `seen`; with it, `same` are tensors that say whether each number is
    as before.
    """

    def __init__(self, known: Sequence[Any] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.known = known
        self.seen: list[Any] = []
        self.same: list[torch.Tensor] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled parts of a model run compiled; elsewhere a compiler gives up what it meets under a mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname == "_local_scalar_dense" and not args[0].is_cpu:
            return self._number(func, args[0])
        return func(*args, **(kwargs or {}))

    def _number(self, func: Any, tensor: torch.Tensor) -> Any:
        if self.known is None:
            mode = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("default")
            try:
                self.seen.append(func(tensor))
            finally:
                torch.cuda.set_sync_debug_mode(mode)
            return self.seen[-1]
        if len(self.same) >= len(self.known):
            raise NotRecordableError(WAITS)
        number = self.known[len(self.same)]
        self.same.append((tensor != tensor) if number != number else (tensor == number))  # NaN
        return number


class TensorWatch(WaitMode):  # type: ignore[no-untyped-call]  # as above
    """A mode in which an operation raises `NotRecordableError` if a replay would leave it out or do it wrongly.

    Such operations are: reading a tensor that is neither `fixed` (inputs and weights) nor a buffer nor made in the
    mode, since the next pass may use another one, or its memory may be freed; writing to `fixed`; moving data between
    host and device; working on another stream; collectives.
    """

    def __init__(self, fixed: Sequence[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._fixed = set(map(place_of, fixed))
        self._known = {*self._fixed, *map(place_of, buffers)}
        self._on_cuda = any(tensor.is_cuda for tensor in fixed)
        self._of_host = {place_of(one) for one in (*fixed, *buffers) if self._on_cuda and not one.is_cuda}
        self._stream = torch.cuda.current_stream() if self._on_cuda else None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func.namespace in COLLECTIVES:
            raise NotRecordableError("exchanges tensors with other processes")
        if func.namespace == "aten" and func._opname == "lift_fresh":  # torch.tensor(1.0) within the pass
            self._known.update(map(place_of, given))
        places = list(map(place_of, given))
        if not self._known.issuperset(places):
            raise NotRecordableError("uses a tensor that is none of its inputs, weights and buffers")
        if not self._of_host.isdisjoint(places):
            raise NotRecordableError("uses a weight, buffer or input that is on the CPU")
        if any(place_of(tensor) in self._fixed for tensor in written(func, args, kwargs)):
            raise NotRecordableError("writes to its weights or inputs")
        result = super().__torch_dispatch__(func, types, args, kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if self._on_cuda:
            self._require_on_device(func, given, made)
        self._known.update(map(place_of, made))
        return result

    def _require_on_device(self, func: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        # a number (no dimensions) that was made in the pass is passed to the kernel as an argument
        if any(one.is_cuda for one in made) and any(not one.is_cuda and one.dim() > 0 for one in given):
            raise NotRecordableError("brings tensors from the host to the device")
        if func._opname in COPIES and any(one.is_cuda for one in given) and any(one.is_cpu for one in made):
            raise NotRecordableError("brings tensors from the device to the host")
        if torch.cuda.current_stream() != self._stream:
            raise NotRecordableError("works on more than one stream")


def place_of(tensor: torch.Tensor) -> int:
    """Returns an id of the memory that the tensor is a view of, valid as long as that memory lives."""
    if tensor.layout is not torch.strided:
        raise NotRecordableError("has tensors that are sparse")
    return int(tensor.untyped_storage()._cdata)


def require_apart(outputs: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
    """Raises `NotRecordableError` for shared memory: replays return copies, which a loop's writes would not reach."""
    taken = set(map(place_of, others))
    for place in map(place_of, outputs):
        if place in taken:
            raise NotRecordableError("returns what shares memory with another output, an input, a weight or a buffer")
        taken.add(place)


def written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yields the tensors that an operation writes to in place.

    Schemas of batch norm do not tell that it writes to its running statistics while it trains.
    """
    named = func._schema.arguments
    given = {one.name: args[place] if place < len(args) else kwargs.get(one.name) for place, one in enumerate(named)}
    trains = any(given.get(name) for name in ("train", "training", "use_input_stats"))
    for one in named:
        is_written = one.alias_info is not None and one.alias_info.is_write
        if is_written or (trains and one.name in ("running_mean", "running_var")):
            yield from (leaf for leaf in tree_leaves(given[one.name]) if isinstance(leaf, torch.Tensor))


def sources_among(outputs: Sequence[torch.Tensor]) -> set[int]:
    """Returns the places of those outputs from which others are made."""
    nodes = {output.grad_fn: place for place, output in enumerate(outputs) if output.grad_fn is not None}
    return {
        nodes[following] for source, following in _edges_behind(outputs) if source is not None and following in nodes
    }


def name_of_node(tensor: torch.Tensor) -> str:
    """Returns the name of what made the tensor, or ""."""
    return "" if tensor.grad_fn is None else tensor.grad_fn.name()


def _edges_behind(outputs: Iterable[torch.Tensor]) -> Iterator[tuple[Any, Any]]:
    """Yields each (node, node that it gives a gradient to), once for each gradient; (None, node) for the outputs."""
    met: set[Any] = set()
    ahead: list[tuple[Any, Any]] = [(None, output.grad_fn) for output in outputs]
    while ahead:
        source, node = ahead.pop()
        if node is not None:
            yield source, node
        if node is not None and node not in met:
            met.add(node)
            ahead += [(node, following) for following, _ in node.next_functions]


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
    for source, node in _edges_behind(outputs):
        if type(node).__name__ != "AccumulateGrad":
            continue
        if id(node.variable) not in known and place_of(node.variable) in places:
            raise NotRecordableError("has gradients for what is none of the weights that its modules have")
        sources.setdefault(id(node.variable), []).append(source)
    if any(output.is_leaf and id(output) not in known for output in outputs):
        raise NotRecordableError("returns a tensor that has a gradient of its own")
    return [_edge_of(weight, sources.get(id(weight), [])) for weight in weights]


def _edge_of(weight: torch.Tensor, sources: Sequence[Any]) -> torch.Tensor | GradientEdge:
    if len(sources) != 1 or type(sources[0]).__name__ != "ToCopyBackward0":
        return weight
    metadata = getattr(sources[0], "_input_metadata", ())
    is_cast_to_half = [(one.dtype in HALF_DTYPES, one.device) for one in metadata] == [(True, weight.device)]
    return GradientEdge(sources[0], 0) if is_cast_to_half and weight.dtype is torch.float32 else weight
