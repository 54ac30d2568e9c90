"""Finds and replaces tensors inside batches and arguments: in tuples, lists, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

if TYPE_CHECKING:
    from collections.abc import Callable

    Fn = Callable[[torch.Tensor], torch.Tensor]
    Other = Callable[[Any], Any]

__all__ = ["HALF_DTYPES", "map_tensors", "moved_to", "stored_in", "tensors_in"]

HALF_DTYPES = (torch.float16, torch.bfloat16)


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Replaces every tensor in `value` by `fn` of it, keeping each container's type.

    Goes through tuples, named tuples, lists, mappings and dataclasses at any depth. Other objects are returned as
    they are, and so is a container in which nothing changed; no container is changed in place.
    """
    return _mapped(fn, value)[0]


def moved_to(device: torch.device, value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Replaces every tensor in `value` by `move` of it, which moves it to the device.

    An object in it that is no container, and has a method `to` as a tensor has, is copied and moved by that: a graph
    of torch_geometric or DGL.
    """

    def is_movable(item: Any) -> bool:
        return callable(getattr(item, "to", None)) and not isinstance(item, (type, torch.nn.Module))

    return _mapped(move, value, lambda item: copy.copy(item).to(device) if is_movable(item) else item)[0]


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Returns every tensor in `value`, in order."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, value)
    return found


def stored_in(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Returns the plain tensors that hold the numbers of one that may be sparse or nested: indices, then values.

    Most functions know nothing else: a sparse tensor has no nbytes and no stride, and cannot be compared or narrowed.
    """
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]  # the public ones want it coalesced
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_nested:
        return [tensor.values()]
    return [tensor]


def _mapped(fn: Fn, value: Any, other: Other | None = None) -> tuple[Any, bool]:
    """Returns (the new value, whether it changed), since torch.compile cannot compare containers by identity.

    `other` replaces what is neither a tensor nor a container.
    """
    if isinstance(value, torch.Tensor):
        new = fn(value)
        return new, new is not value
    if isinstance(value, (tuple, list)):  # older torch.compile cannot trace `tuple | list`
        return _sequence(fn, value, other)
    if isinstance(value, Mapping):
        return _mapping(fn, value, other)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(fn, value, other)
    if other is None:
        return value, False
    replaced = other(value)
    return replaced, replaced is not value


def _sequence(fn: Fn, value: tuple[Any, ...] | list[Any], other: Other | None) -> tuple[Any, bool]:
    pairs = [_mapped(fn, item, other) for item in value]
    if not any(changed for _, changed in pairs):
        return value, False
    items = [item for item, _ in pairs]
    if isinstance(value, PackedSequence):
        items[1] = value.batch_sizes  # recurrent layers take them on the CPU, wherever the data is
    if type(value) is tuple:
        return tuple(items), True
    make = getattr(type(value), "_make", type(value))  # named tuples take their fields one by one, and have _make
    return make(items), True


def _mapping(fn: Fn, value: Mapping[Any, Any], other: Other | None) -> tuple[Any, bool]:
    changed = _changed(fn, value, other)
    if not changed:
        return value, False
    if type(value) is dict:
        return {**value, **changed}, True
    if not isinstance(value, MutableMapping):
        return type(value)({**value, **changed}), True  # type: ignore[call-arg]  # as MappingProxyType takes it
    copied = copy.copy(value)  # keeps default factories, and attributes beside the items
    for key, item in changed.items():
        copied[key] = item
    return copied, True


def _dataclass(fn: Fn, value: Any, other: Other | None) -> tuple[Any, bool]:
    """Builds the new object without `__init__`, so that checks and counters in `__post_init__` do not run again.

    `dataclasses.replace` would run them and refuses init=False fields; `copy.copy` of a frozen one with slots
    breaks the graph of torch.compile.
    """
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    changed = _changed(fn, fields, other)
    if not changed:
        return value, False
    copied = object.__new__(type(value))
    # Attributes other than fields are copied too, except in a compiled graph: torch 2.9 cannot trace __dict__.
    beside = {} if torch.compiler.is_compiling() else getattr(value, "__dict__", {})
    for name, item in {**beside, **fields, **changed}.items():
        object.__setattr__(copied, name, item)
    return copied, True


def _changed(fn: Fn, items: Mapping[Any, Any], other: Other | None) -> dict[Any, Any]:
    pairs = [(key, _mapped(fn, item, other)) for key, item in items.items()]
    return {key: item for key, (item, changed) in pairs if changed}
