"""What a model consists of, for who has recorded a pass of it: whether it is still the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HOOKS", "OF_EVERY_MODULE", "ModelState"]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# What every module has, and PyTorch itself writes to; save for the children.
OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"_modules"}
_PLAIN = (type(None), bool, int, float, str, tuple)


class ModelState:
    """The modules, weights, buffers and plain attributes of a model when this was made, and where its tensors lie.

    It is asked in every step, so it goes by identity: a thousand tensors take a few tenths of a millisecond, in which
    the device has its work already.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        self._hooks = [getattr(module, kind) for module in self._modules for kind in HOOKS]
        self._hooked = sum(map(len, self._hooks))
        self._tables = [(table, len(table)) for table in self._all_tables()]
        self._entries = [
            (table, name, held) for table, _ in self._tables for name, held in table.items() if _counts(name, held)
        ]
        tensors = (held for _, _, held in self._entries if isinstance(held, torch.Tensor))
        self._places = [(tensor, tensor.data_ptr()) for tensor in tensors]

    def _all_tables(self) -> Iterator[dict[str, Any]]:
        for module in self._modules:
            yield from (vars(module), module._modules, module._parameters, module._buffers)

    def holds(self) -> bool:
        """Whether all of it is there still, and nothing else."""
        return (
            all(len(table) == count for table, count in self._tables)
            and all(table.get(name, table) is held for table, name, held in self._entries)
            and all(tensor.data_ptr() == place for tensor, place in self._places)
            and sum(map(len, self._hooks)) == self._hooked
        )

    def modes(self) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """(which modules train, which parameters do)."""
        return (
            tuple([module.training for module in self._modules]),
            tuple([parameter.requires_grad for parameter in self._parameters]),
        )


def _counts(name: str, held: Any) -> bool:
    """Tensors and modules, and the attributes that a forward pass may branch on; `training` is one of the modes."""
    return isinstance(held, (torch.Tensor, nn.Module)) or (isinstance(held, _PLAIN) and name not in OF_EVERY_MODULE)
