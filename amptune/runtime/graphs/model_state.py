"""A snapshot of a model, which tells whether the model has changed since one of its passes was recorded."""

from __future__ import annotations

from collections import deque
from itertools import chain
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["DEPTH", "HOOKS", "OF_EVERY_MODULE", "PLAIN", "ModelState", "table_in"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes of every module, to which PyTorch itself writes.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# How many levels of lists and dictionaries in attributes are searched, and up to how many items each.
DEPTH, _MOST_ITEMS = 3, 1000
# Values that a forward pass may branch on.
PLAIN = (type(None), bool, int, float, str, tuple)


class ModelState:
    """A snapshot of a model's modules, weights, buffers and attributes, and of where its tensors lie in memory.

    It includes the contents of lists, dictionaries and plain objects (a config) in attributes of modules and weights,
    a few levels deep, except large ones. Every step asks it, so it compares by identity and in C: DenseNet-161 takes
    about half a millisecond, while the device is busy already.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        held = {id(one): (name, one) for name, one in self._attributes()}  # modules share a config
        self._contents = [(name, one, _copy_of(one)) for name, one in held.values() if one]
        self._empty = [one for _, one in held.values() if not one]
        self._holders: list[dict[str, Any]] = [
            table for module in self._modules for table in (module._modules, module._parameters, module._buffers)
        ]
        self._held = self._ids()
        self._tensors = [held for table in self._holders for held in table.values() if isinstance(held, torch.Tensor)]
        self._places = [tensor.detach() for tensor in self._tensors]
        self._hooks = [getattr(module, kind) for module in self._modules for kind in HOOKS]
        self._hooked = sum(map(len, self._hooks))

    def _attributes(self) -> Iterator[tuple[str, Any]]:
        """Yields the lists, sets and dictionaries in attributes, each with a name."""
        for owner in (*self._modules, *self._parameters):
            own = vars(owner)
            yield "", own
            for name, value in own.items():
                if name not in OF_EVERY_MODULE:
                    yield from _containers_in(name, value, DEPTH)

    def _ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(table.values() for table in self._holders)))

    def holds(self) -> bool:
        """Returns True if the model is unchanged: all is still there, in the same mode, and nothing was added."""
        try:
            same = not any(self._empty) and all(now == before for _, now, before in self._contents)
        except (RuntimeError, ValueError):  # raised by == of tensors or arrays, which runs only if they were replaced
            return False
        return (
            same
            and self._ids() == self._held
            and all(map(torch.Tensor.is_set_to, self._tensors, self._places))
            and sum(map(len, self._hooks)) == self._hooked
        )

    def trained(self) -> tuple[bool, ...]:
        """Returns `requires_grad` of each parameter."""
        return tuple([parameter.requires_grad for parameter in self._parameters])

    def changed(self) -> str:
        """Returns the names of all that changed since the snapshot, for messages."""
        attributes = [changed for name, *contents in self._contents for changed in _differing(name, *contents)]
        attributes += [str(name) for filled in self._empty for name in filled]
        moved = {id(one) for one, place in zip(self._tensors, self._places, strict=True) if not one.is_set_to(place)}
        gone = set(self._held) - set(self._ids())
        names = [n for table in self._holders for n, held in table.items() if id(held) in moved or id(held) in gone]
        new = [n for table in self._holders for n, held in table.items() if id(held) not in set(self._held)]
        return ", ".join(dict.fromkeys([*attributes, *names, *new])) or "hooks"


def table_in(value: Any) -> dict[Any, Any] | None:
    """Returns a dictionary itself, or the attributes of an object that may be a namespace; else None."""
    if isinstance(value, dict):
        return value
    if isinstance(value, (nn.Module, torch.Tensor, type, FunctionType, MethodType, ModuleType)):
        return None
    table = getattr(value, "__dict__", None)
    return table if isinstance(table, dict) else None


def _containers_in(name: str, value: Any, depth: int) -> Iterator[tuple[str, Any]]:
    is_sequence = isinstance(value, (list, deque, set, tuple))
    inner = value if is_sequence else table_in(value)
    if not depth or inner is None or len(inner) > _MOST_ITEMS:
        return
    if not isinstance(inner, tuple):
        yield name, inner
    for item in inner if is_sequence else inner.values():
        yield from _containers_in(name, item, depth - 1)


def _copy_of(container: Any) -> Any:
    kind: Any = next(kind for kind in (dict, list, deque, set) if isinstance(container, kind))
    return kind(container)


def _differing(name: str, now: Any, before: Any) -> Iterator[str]:
    """Yields the names in a dictionary that are bound to something else; for another container its own name."""
    if not isinstance(now, dict):
        yield from () if len(now) == len(before) and all(map(is_, now, before)) else (name,)
        return
    for key in dict.fromkeys([*now, *before]):
        one, other = now.get(key, now), before.get(key, now)
        if one is not other and not (type(one) is type(other) and type(one) in PLAIN and one == other):
            yield str(key)
