"""Weights that replace a model's own while one of its passes is recorded."""

from __future__ import annotations

import weakref
from collections import deque
from contextlib import contextmanager
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amptune.runtime.gradient_dtype import take_gradients_as
from amptune.runtime.graphs.host_effects import NotRecordableError
from amptune.runtime.graphs.model_state import DEPTH, OF_EVERY_MODULE, table_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["with_proxies"]


@contextmanager
def with_proxies(model: nn.Module) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Replaces, within the context, trained parameters by others in the same memory; yields {own: other}.

    Autograd sums a parameter's gradients in a node that lives as long as something refers to it: the loss that a loop
    still holds of its last step, or DistributedDataParallel. That node stays on the stream on which it was made, and a
    backward pass that reaches it cannot be recorded on another stream (https://github.com/pytorch/pytorch/pull/180090).

    Raises `NotRecordableError` if the others were given gradients within the context; the model's would miss them.
    """
    by_own = {own: _proxy_for(own) for own in model.parameters() if own.requires_grad}
    gradients = {other: other.grad for other in by_own.values()}
    try:
        _Exchange(by_own).within(model)
        yield by_own
    finally:
        _Exchange({other: own for own, other in by_own.items()}).within(model)
    if any(other.grad is not gradient for other, gradient in gradients.items()):
        raise NotRecordableError("runs a backward pass of its own")


def _proxy_for(own: nn.Parameter) -> nn.Parameter:
    """Returns the other parameter. If `own` has a gradient it has a placeholder, which cannot be read or added to."""
    other = nn.Parameter(own.detach())
    other.__dict__ = own.__dict__
    take_gradients_as(own, other)
    if own.grad is not None and own.grad.layout is torch.strided:
        other.grad = own.grad.new_zeros(()).expand_as(own.grad)
    return other


class _Exchange:
    """An exchange of parameters for others, inside containers and objects that stay the same."""

    def __init__(self, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
        self._others = others
        self._met: set[int] = set()

    def within(self, model: nn.Module) -> None:
        """Exchanges the parameters of all modules, also inside containers in their attributes."""
        for module in model.modules():
            own = vars(module)
            self._at(module._parameters, module._parameters.items(), 0)
            self._at(own, [item for item in own.items() if item[0] not in OF_EVERY_MODULE], DEPTH)

    def _at(self, holder: Any, items: Iterable[tuple[Any, Any]], depth: int) -> None:
        for place, value in items:
            other = self._of(value, depth)
            if other is not value:
                holder[place] = other

    def _of(self, value: Any, depth: int) -> Any:
        """Returns the replacement of a parameter, of a tuple or weak reference with one (an LSTM has some), or the
        value itself.
        """
        if isinstance(value, nn.Parameter):
            return self._others.get(value, value)
        if isinstance(value, weakref.ref) and value.__callback__ is None:
            own = value()
            return weakref.ref(self._others[own]) if self._has(own) else value
        if depth and isinstance(value, tuple):
            items = [self._of(item, depth - 1) for item in value]
            if all(map(is_, items, value)):
                return value
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if depth and id(value) not in self._met:
            self._met.add(id(value))
            self._fill(value, depth - 1)
        return value

    def _fill(self, value: Any, depth: int) -> None:
        if isinstance(value, (list, deque)):
            self._at(value, enumerate(value), depth)
        elif isinstance(value, set):
            for own in filter(self._has, list(value)):
                value.remove(own)
                value.add(self._others[own])
        elif (table := table_in(value)) is not None:
            self._at(table, table.items(), depth)
            if any(map(self._has, table)):
                items = [(self._others[key] if self._has(key) else key, item) for key, item in table.items()]
                table.clear()
                table.update(items)

    def _has(self, value: Any) -> bool:
        """Tests the type first: a number with the same hash as a parameter must not be compared with it."""
        return isinstance(value, nn.Parameter) and value in self._others
