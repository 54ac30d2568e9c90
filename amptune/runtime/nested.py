"""Tensors inside whatever a batch or a module's arguments are made of: tuples, lists, mappings, dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["map_tensors"]


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Replaces every tensor in `value` by `fn` of it, keeping each container's type.

    Goes through tuples, named tuples, lists, mappings and dataclasses at any depth. What it does not know
    passes through, and a container in which nothing changed is returned itself; none is changed in place.
    """
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, tuple | list):
        return _sequence(fn, value)
    if isinstance(value, Mapping):
        return _mapping(fn, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(fn, value)
    return value


def _sequence(fn: Callable[[torch.Tensor], torch.Tensor], value: tuple[Any, ...] | list[Any]) -> Any:
    items = [map_tensors(fn, item) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if type(value) is tuple:
        return tuple(items)
    make = getattr(type(value), "_make", type(value))  # named tuples take their fields one by one, and have _make
    return make(items)


def _mapping(fn: Callable[[torch.Tensor], torch.Tensor], value: Mapping[Any, Any]) -> Any:
    changed = _changed(fn, value)
    if not changed:
        return value
    if not isinstance(value, MutableMapping):
        return type(value)({**value, **changed})  # type: ignore[call-arg]  # as MappingProxyType takes it
    replaced = copy.copy(value)  # keeps default factories, and attributes beside the items
    for key, new in changed.items():
        replaced[key] = new
    return replaced


def _dataclass(fn: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Copies and sets: `dataclasses.replace` refuses init=False fields and would run `__post_init__` again."""
    changed = _changed(fn, {field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if not changed:
        return value
    replaced = copy.copy(value)
    for name, new in changed.items():
        object.__setattr__(replaced, name, new)
    return replaced


def _changed(fn: Callable[[torch.Tensor], torch.Tensor], items: Mapping[Any, Any]) -> dict[Any, Any]:
    mapped = {key: map_tensors(fn, item) for key, item in items.items()}
    return {key: item for key, item in mapped.items() if item is not items[key]}
