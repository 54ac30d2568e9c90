"""What a call is given and what it returns, taken apart into tensors, plain values and their structure."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, register_pytree_node, tree_flatten, tree_map, tree_unflatten

from amptune.runtime.graphs.host_effects import NotRecordableError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["PassKind", "Signature", "arguments_of", "call", "outputs_of"]

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

    def filled(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Returns the structure with these tensors in it."""
        leaves = [tensors[leaf.place] if isinstance(leaf, _Tensor) else leaf.value for leaf in self.leaves]
        return tree_unflatten(leaves, self.structure)


@dataclass(frozen=True, kw_only=True)
class PassKind:
    """The conditions that must be the same for a recording to compute what the model would."""

    arguments: Signature
    autocast: tuple[bool, torch.dtype]
    trained: tuple[bool, ...]


def arguments_of(
    args: tuple[Any, ...], kwargs: dict[str, Any], device_type: str
) -> tuple[Signature, list[torch.Tensor]] | None:
    """Returns the arguments' signature and tensors, or None for arguments that no recording can serve."""
    leaves, structure = tree_flatten((args, kwargs))
    if not all(type(leaf) in (torch.Tensor, nn.Parameter, *_CONSTANTS) for leaf in leaves):
        return None
    tensors = _tensors_among(leaves)
    if not tensors or any(
        one.device.type != device_type or one.requires_grad or one.layout is not torch.strided or vars(one)
        for one in tensors
    ):
        return None
    return _signature(leaves, structure, tensors, strides=True), tensors


def call(model: nn.Module, arguments: Signature, tensors: Sequence[torch.Tensor]) -> Any:
    """Calls the model with `tensors` in place of those that the arguments were taken from."""
    given = args, kwargs = arguments.filled(tensors)
    leaves, structure = tree_flatten(given)
    returned = model(*args, **kwargs)
    after, now = tree_flatten(given)
    if now != structure or any(one is not other for one, other in zip(leaves, after, strict=True)):
        raise NotRecordableError("changes the lists or dictionaries that it is given")
    return returned


def outputs_of(returned: Any) -> tuple[Signature, list[torch.Tensor]]:
    """Returns the signature, and each tensor once.

    Raises `NotRecordableError` for an unknown type, or a tensor that is sparse or has attributes.
    """
    leaves, structure = tree_flatten(_opened(returned))
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
    return _signature(leaves, structure, tensors, strides=False), tensors


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


class _Opened:
    """A dataclass that PyTorch can take apart; it is put together as what it was."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _opened(value: Any) -> Any:
    return tree_map(lambda leaf: _Opened(leaf) if _is_plain_data(leaf) else leaf, value)


def _is_plain_data(value: Any) -> bool:
    """Returns True for a dataclass whose fields are all that it holds."""
    kind = type(value)
    if not dataclasses.is_dataclass(kind) or kind.__new__ is not object.__new__:
        return False
    names = [one.name for one in dataclasses.fields(kind)]
    return all(hasattr(value, name) for name in names) and set(getattr(value, "__dict__", ())) <= set(names)


def _taken_apart(opened: _Opened) -> tuple[list[Any], Any]:
    names = [one.name for one in dataclasses.fields(opened.value)]
    return [_opened(getattr(opened.value, name)) for name in names], (type(opened.value), names)


def _put_together(values: Any, context: Any) -> Any:
    kind, names = context
    made = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)  # a frozen one too
    return made


register_pytree_node(_Opened, _taken_apart, _put_together)
