"""Takes the arguments and the results of a call apart into tensors, plain values and their structure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from amptune.runtime.graphs.host_effects import NotRecordableError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PassKind", "Signature", "arguments_of", "outputs_of"]

# Types beside tensors: every replay is given and returns the recorded value.
_CONSTANTS = (type(None), bool, int, float, str)


class _Tensor(NamedTuple):
    """The properties of a tensor that matter to a recording; `place` is that among the tensors, each counted once."""

    place: int
    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class _Constant:
    """A plain value: 2 is not 2.0, and 0.0 is not -0.0."""

    kind: type
    text: str
    value: Any = field(compare=False)


@dataclass(frozen=True, slots=True)
class Signature:
    """A structure with plain values and the properties of tensors; equal ones can use the same recording."""

    leaves: tuple[_Tensor | _Constant, ...]
    structure: TreeSpec
    dataclass: type | None = None

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns the structure with these tensors in it."""
        leaves = [tensors[leaf.place] if isinstance(leaf, _Tensor) else leaf.value for leaf in self.leaves]
        value = tree_unflatten(leaves, self.structure)
        if self.dataclass is None:
            return value
        made: Any = object.__new__(self.dataclass)
        vars(made).update(value)
        return made


@dataclass(frozen=True, kw_only=True)
class PassKind:
    """The conditions that must be the same for a recording to compute what the model would."""

    arguments: Signature
    autocast: tuple[bool, torch.dtype]
    trained: tuple[bool, ...]

    def caller(self, model: nn.Module, device_type: str) -> Callable[[Sequence[torch.Tensor]], Any]:
        """Returns a function that calls the model with other tensors, as the loop calls it now.

        It raises `NotRecordableError` if the model changes the lists or dictionaries that it is given.
        """
        enabled, dtype = self.autocast
        cached = torch.is_autocast_cache_enabled()

        def called(tensors: Sequence[torch.Tensor]) -> Any:
            given = args, kwargs = self.arguments.filled(tensors)
            leaves, structure = tree_flatten(given)
            with torch.autocast(device_type, enabled=enabled, dtype=dtype, cache_enabled=cached):
                returned = model(*args, **kwargs)
            after, now = tree_flatten(given)
            if now != structure or any(one is not other for one, other in zip(leaves, after, strict=True)):
                raise NotRecordableError("changes the lists or dictionaries that it is given")
            return returned

        return called


def arguments_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str, *, least: int = 1
) -> tuple[Signature, list[torch.Tensor]] | None:
    """Returns the arguments' signature and tensors, or None for arguments that no recording can serve.

    There are to be that many tensors at least.
    """
    leaves, structure = tree_flatten((args, kwargs))
    if not all(type(leaf) in (torch.Tensor, nn.Parameter, *_CONSTANTS) for leaf in leaves):
        return None
    tensors = _tensors_among(leaves)
    if len(tensors) < least or any(
        one.device.type != device_type or one.requires_grad or one.layout is not torch.strided or vars(one)
        for one in tensors
    ):
        return None
    return _signature(leaves, structure, tensors, strides=True), tensors


def outputs_of(returned: Any) -> tuple[Signature, list[torch.Tensor]]:
    """Returns the signature, and each tensor once.

    Raises `NotRecordableError` for an unknown type, or a tensor that is sparse or has attributes.
    """
    kind = type(returned) if _is_plain_data(returned) else None
    leaves, structure = tree_flatten(returned if kind is None else vars(returned))
    strange = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_CONSTANTS))), None)
    if strange is not None:
        name = type(strange).__name__
        hint = " (use_cache=False leaves it out)" if name.endswith("Cache") else ""  # in transformers
        raise NotRecordableError(f"returns a {name}, whose contents are not known{hint}")
    tensors = _tensors_among(leaves)
    if any(map(vars, tensors)):
        raise NotRecordableError("returns a tensor with attributes of its own")
    if any(one.layout is not torch.strided for one in tensors):
        raise NotRecordableError("has tensors that are sparse")
    return replace(_signature(leaves, structure, tensors, strides=False), dataclass=kind), tensors


def _tensors_among(leaves: Sequence[Any]) -> list[torch.Tensor]:
    return list({id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}.values())


def _signature(
    leaves: Sequence[Any], structure: TreeSpec, tensors: Sequence[torch.Tensor], *, strides: bool
) -> Signature:
    properties = {
        id(one): _Tensor(place, one.shape, one.dtype, one.stride() if strides else (), one.device, one.requires_grad)
        for place, one in enumerate(tensors)
    }
    parts = (properties.get(id(leaf)) or _Constant(type(leaf), repr(leaf), leaf) for leaf in leaves)
    return Signature(tuple(parts), structure)


def _is_plain_data(value: Any) -> bool:
    """Returns True for a dataclass that holds its fields and nothing else, in no other built-in type."""
    kind, held = type(value), getattr(value, "__dict__", None)
    is_one = dataclasses.is_dataclass(kind) and kind.__new__ is object.__new__
    return is_one and held is not None and held.keys() == {one.name for one in dataclasses.fields(kind)}
