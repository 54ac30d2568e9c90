"""The memory that a training step reads and writes, and how much values in it differ."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amptune.runtime.graphs.host_effects import NotRecordableError
from amptune.runtime.graphs.tensor_use import COLLECTIVES, COPIES, WAITS, place_of, written

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["MemoryWatch", "differences", "whole"]

_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
# Tensors are compared in groups of about so many numbers, which bounds the memory that a comparison needs.
_GROUP = 1 << 26
# Values that differ by so many units in the last place, beside what a step changes them by, are rounded otherwise.
_UNITS = 16.0


class MemoryWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has not typed it
    """A mode that notes which tensors a step reads and writes of those that were there before it.

    `read` and `written` hold them by their place in memory; each is kept alive. `gradients` lie elsewhere in each step,
    and are apart: `added` are those, by number, that the step reads or adds to. `obstacle` says why the step cannot be
    recorded, in words that follow its name; nothing is raised, for the step that is watched trains.
    """

    supports_higher_order_operators = True

    def __init__(
        self, inputs: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None], device: torch.device
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.added: set[int] = set()
        self._gradients = {place_of(one): number for number, one in enumerate(gradients) if one is not None}
        self.read: dict[int, torch.Tensor] = {}
        self.written: dict[int, torch.Tensor] = {}
        self.obstacle: str | None = None
        self._inputs = set(map(place_of, inputs))
        self._made: set[int] = set()
        self._on_cuda = device.type == "cuda"
        self._stream: torch.cuda.Stream | None = None  # of the first operation

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets compiled parts run compiled."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        try:
            self._note(func, args, kwargs, result)
        except NotRecordableError as error:
            self.obstacle = self.obstacle or str(error)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        if not isinstance(func, torch._ops.OpOverload):
            raise NotRecordableError(f"uses {func}, of which nobody knows what it writes to")
        given, made = (
            [one for one in tree_leaves(some) if isinstance(one, torch.Tensor)] for some in ((args, kwargs), result)
        )
        if strange := next((one for one in (*given, *made) if type(one) not in _PLAIN), None):
            raise NotRecordableError(f"uses a {type(strange).__name__}, which is no plain tensor")
        is_constant = func.namespace == "aten" and func._opname == "lift_fresh"  # torch.tensor(1.0) within the step
        places = {} if is_constant else {place_of(one): one for one in given}
        before = {place: one for place, one in places.items() if place not in self._made}
        self._made.update(place for place in map(place_of, made) if place not in before)
        writes = [one for one in written(func, args, kwargs) if place_of(one) in before]
        for place, tensor in before.items():
            if place in self._gradients:
                self.added.add(self._gradients[place])
            elif place not in self._inputs and place not in self.read:
                self.read[place] = tensor.detach()
        for tensor in writes:
            if place_of(tensor) not in self._gradients:
                self.written.setdefault(place_of(tensor), tensor.detach())
        if any(place_of(one) in self._inputs for one in writes):
            raise NotRecordableError("writes to its batch")
        if self._on_cuda:
            self._require_on_device(func, given, made, writes)

    def _require_on_device(
        self,
        func: Any,
        given: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        writes: Sequence[torch.Tensor],
    ) -> None:
        if not all(one.is_cuda for one in writes):
            raise NotRecordableError("writes to a tensor on the CPU")
        if func.namespace in COLLECTIVES:
            raise NotRecordableError("exchanges tensors with other processes")
        if func._opname == "_local_scalar_dense" and given[0].is_cuda:
            raise NotRecordableError(f"{WAITS}; keep such numbers in tensors, and read them after the step")
        # a number (no dimensions) that was made in the step is passed to the kernel as an argument
        if any(one.is_cuda for one in made) and any(not one.is_cuda and one.dim() > 0 for one in given):
            raise NotRecordableError("brings tensors from the host to the device; move them there before the step")
        if func._opname in COPIES and any(one.is_cuda for one in given) and any(one.is_cpu for one in made):
            raise NotRecordableError("brings tensors from the device to the host; return them from the step")
        self._stream = self._stream or torch.cuda.current_stream()
        if torch.cuda.current_stream() != self._stream:
            raise NotRecordableError("works on more than one stream")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Returns all of the memory that the tensor is a view of, as a vector of its dtype that autograd does not see."""
    storage = tensor.untyped_storage()
    plain = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return plain.set_(storage, 0, (storage.nbytes() // tensor.element_size(),), (1,))


@torch.no_grad()
def differences(
    own: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], before: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Returns |own - other| / |own - before| (2-norms, FP32) for each name under which they differ.

    What was there `before` counts by its rounding error too. What is not finite must be so in the same places.
    """
    found: dict[str, float] = {}
    for names in _groups(own):
        pairs = [(_plain(own[name]), _plain(other[name])) for name in names]
        apart = torch.stack(torch._foreach_norm([one - two for one, two in pairs], 2, torch.float32))
        for name, pair, size in zip(names, pairs, apart.tolist(), strict=True):
            if size != 0.0:  # or NaN
                start = _plain(before[name]) if name in before else torch.zeros_like(pair[0])
                found[name] = _relative(*pair, start)
    return {name: apart for name, apart in found.items() if apart > 0.0}


def _relative(own: torch.Tensor, other: torch.Tensor, before: torch.Tensor) -> float:
    same = (own == other) | (own.isnan() & other.isnan())
    if not torch.equal(own.isfinite() | same, other.isfinite() | same):
        return float("inf")
    apart, changed = (torch.where(same | ~own.isfinite(), 0.0, own - one).norm() for one in (other, before))
    kept = torch.where(before.isfinite(), before, 0.0).norm() * (_UNITS * torch.finfo(before.dtype).eps)
    return float(apart / (changed + kept)) if apart > 0 else 0.0


def _groups(tensors: Mapping[str, torch.Tensor]) -> Iterator[list[str]]:
    group: list[str] = []
    for name, tensor in tensors.items():
        if group and sum(tensors[one].numel() for one in group) + tensor.numel() > _GROUP:
            yield group
            group = []
        group.append(name)
    if group:
        yield group


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return tensor if tensor.dtype is torch.float64 else tensor.float()
