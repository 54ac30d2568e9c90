"""Weights that stand in for a model's own while a pass of it is recorded."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from operator import is_
from typing import TYPE_CHECKING, Any

from torch import nn

from amptune.runtime.gradient_dtype import take_gradients_as
from amptune.runtime.model_state import OF_EVERY_MODULE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["standing_in"]


@contextmanager
def standing_in(model: nn.Module) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Within it the model has other trained parameters, in the memory of its own; gives them, each by its own.

    Autograd sums a parameter's gradients in a node that lives as long as anything leads to it: the loss that a loop
    still holds of its last step, or DistributedDataParallel. That node keeps to the stream on which it was made, and a
    backward pass that comes to it cannot be recorded on another (https://github.com/pytorch/pytorch/pull/180090).
    """
    by_own = {own: _stand_in_for(own) for own in model.parameters() if own.requires_grad}
    before: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for module in model.modules():
            for table, name, value in [*_held_by(module)]:
                other = _with_stand_ins(value, by_own)
                if other is not value:
                    before.append((table, name, value))
                    table[name] = other
        yield by_own
    finally:
        for table, name, value in before:
            table[name] = value


def _held_by(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(in which table, under which name, what): its parameters, and attributes of its class."""
    for table in (module._parameters, vars(module)):
        for name, value in table.items():
            if table is module._parameters or name not in OF_EVERY_MODULE:
                yield table, name, value


def _stand_in_for(own: nn.Parameter) -> nn.Parameter:
    other = nn.Parameter(own.detach())
    vars(other).update(vars(own))
    take_gradients_as(own, other)
    return other


def _with_stand_ins(value: Any, by_own: Mapping[nn.Parameter, nn.Parameter]) -> Any:
    """The value itself, unless it is, holds or (as an LSTM) weakly refers to parameters that others stand in for."""
    if isinstance(value, nn.Parameter):
        return by_own.get(value, value)
    if isinstance(value, weakref.ref):
        own = value()
        other = _with_stand_ins(own, by_own) if isinstance(own, nn.Parameter) else own
        return value if other is own else weakref.ref(other)
    if type(value) is dict:
        items = list(value.values())
        others = _with_stand_ins(items, by_own)
        return value if others is items else dict(zip(value, others, strict=True))
    if type(value) in (list, tuple):
        others = [_with_stand_ins(item, by_own) for item in value]
        return value if all(map(is_, value, others)) else type(value)(others)
    return value
