"""Weights that stand in for a model's own while a pass of it is recorded."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amptune.runtime.host_effects import NotRecordableError
from amptune.runtime.model_state import OF_EVERY_MODULE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["require_no_others", "standing_in"]


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


def require_no_others(outputs: Iterable[torch.Tensor], stand_ins: Iterable[nn.Parameter]) -> None:
    """Raises `NotRecordableError` where the outputs' gradients come to any other tensor that is to have one."""
    known = set(map(id, stand_ins))
    met: set[Any] = set()
    ahead = [output.grad_fn for output in outputs]
    while ahead:
        node = ahead.pop()
        if node is None or node in met:
            continue
        met.add(node)
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) not in known:  # type: ignore[attr-defined]
            raise NotRecordableError("uses weights that are not in the place where its modules have them")
        ahead += [following for following, _ in node.next_functions]


def _held_by(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(in which table, under which name, what): its parameters, and attributes of its class."""
    for table in (module._parameters, vars(module)):
        for name, value in table.items():
            if table is module._parameters or name not in OF_EVERY_MODULE:
                yield table, name, value


def _stand_in_for(own: nn.Parameter) -> nn.Parameter:
    other = nn.Parameter(own.detach())
    vars(other).update(vars(own))
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
