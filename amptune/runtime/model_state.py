"""What a model consists of, for who has recorded a pass of it: whether it is still the same."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["HOOKS", "OF_EVERY_MODULE", "PLAIN", "ModelState", "table_in"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What every module has, and PyTorch itself writes to.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Values that a forward pass may branch on.
PLAIN = (type(None), bool, int, float, str, tuple)


class ModelState:
    """The modules, weights, buffers and attributes of a model when this was made, and where its tensors lie.

    Of dictionaries and plain objects that are attributes (a config) it knows the values. It is asked in every step,
    so it goes by identity and in C: DenseNet-161 takes about half a millisecond, in which the device has its work
    already.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        tables = {id(table): table for table in self._attributes()}  # modules share a config
        self._tables = [(table, dict(table)) for table in tables.values()]
        self._holders: list[dict[str, Any]] = [
            table for module in self._modules for table in (module._modules, module._parameters, module._buffers)
        ]
        self._held = self._ids()
        self._tensors = [held for table in self._holders for held in table.values() if isinstance(held, torch.Tensor)]
        self._places = [tensor.detach() for tensor in self._tensors]
        self._hooks = [getattr(module, kind) for module in self._modules for kind in HOOKS]
        self._hooked = sum(map(len, self._hooks))

    def _attributes(self) -> Iterator[dict[str, Any]]:
        for module in self._modules:
            own = vars(module)
            yield own
            inner = (table_in(value) for name, value in own.items() if name not in OF_EVERY_MODULE)
            yield from (table for table in inner if table is not None)

    def _ids(self) -> list[int]:
        return list(map(id, chain.from_iterable(table.values() for table in self._holders)))

    def holds(self) -> bool:
        """Whether all of it is there still, in the same mode, and nothing else."""
        try:
            same = all(now == before for now, before in self._tables)
        except (RuntimeError, ValueError):  # tensors and arrays, compared because they are others
            return False
        return (
            same
            and self._ids() == self._held
            and all(map(torch.Tensor.is_set_to, self._tensors, self._places))
            and sum(map(len, self._hooks)) == self._hooked
        )

    def trained(self) -> tuple[bool, ...]:
        """Which parameters have a gradient."""
        return tuple([parameter.requires_grad for parameter in self._parameters])

    def changed(self) -> str:
        """The names of what changed since, for people."""
        attributes = [name for now, before in self._tables for name in _differing(now, before)]
        moved = {id(one) for one, place in zip(self._tensors, self._places, strict=True) if not one.is_set_to(place)}
        gone = set(self._held) - set(self._ids())
        names = [n for table in self._holders for n, held in table.items() if id(held) in moved or id(held) in gone]
        new = [n for table in self._holders for n, held in table.items() if id(held) not in set(self._held)]
        return ", ".join(dict.fromkeys([*attributes, *names, *new])) or "hooks"


def table_in(value: Any) -> dict[str, Any] | None:
    """The names and values of a dictionary, or of an object that is there to hold some."""
    if isinstance(value, dict):
        return value
    if isinstance(value, (nn.Module, torch.Tensor, type)) or callable(value):
        return None
    table = getattr(value, "__dict__", None)
    return table if isinstance(table, dict) else None


def _differing(now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*now, *before]):
        one, other = now.get(name, now), before.get(name, now)
        if one is not other and not (type(one) is type(other) and type(one) in PLAIN and one == other):
            yield name
