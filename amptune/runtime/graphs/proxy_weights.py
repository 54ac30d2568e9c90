"""Weights that replace a model's own while one of its passes is recorded."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amptune.runtime.gradient_dtype import take_gradients_as
from amptune.runtime.graphs.host_effects import NotRecordableError
from amptune.runtime.graphs.model_state import OF_EVERY_MODULE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["with_proxies", "without_hooks"]


@contextmanager
def with_proxies(model: nn.Module) -> Iterator[dict[nn.Parameter, nn.Parameter]]:
    """Replaces, within the context, trained parameters by others in the same memory; yields {own: other}.

    Autograd sums a parameter's gradients in a node that lives as long as something refers to it: the loss that a loop
    still holds of its last step, or DistributedDataParallel. That node stays on the stream on which it was made, and a
    backward pass that reaches it cannot be recorded on another stream (https://github.com/pytorch/pytorch/pull/180090).
    A weight that lies deeper than in a list, tuple or dictionary that is an attribute is not replaced; a pass that
    uses such a one cannot be recorded.

    Raises `NotRecordableError` if the others were given gradients within the context; the model's would miss them.
    """
    by_own = {own: _proxy_for(own) for own in model.parameters() if own.requires_grad}
    gradients = {other: other.grad for other in by_own.values()}
    try:
        _exchange(model, by_own)
        yield by_own
    finally:
        _exchange(model, {other: own for own, other in by_own.items()})
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


def _exchange(model: nn.Module, others: Mapping[nn.Parameter, nn.Parameter]) -> None:
    """Exchanges parameters in all modules, and in containers in their attributes, which stay the same objects."""
    for module in model.modules():
        for table in (module._parameters, vars(module)):
            for name, value in list(table.items()):
                if name not in OF_EVERY_MODULE:
                    table[name] = _exchanged(value, others)


def _exchanged(value: Any, others: Mapping[nn.Parameter, nn.Parameter]) -> Any:
    if isinstance(value, nn.Parameter):
        return others.get(value, value)
    if isinstance(value, weakref.ref) and value.__callback__ is None:  # an LSTM has some, in a list
        own = value()
        return weakref.ref(others[own]) if isinstance(own, nn.Parameter) and own in others else value
    if isinstance(value, (list, dict)):
        for place, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            if isinstance(item, (nn.Parameter, weakref.ref)):
                value[place] = _exchanged(item, others)
    if isinstance(value, tuple) and any(isinstance(item, nn.Parameter) for item in value):
        items = [_exchanged(item, others) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


@contextmanager
def without_hooks(weights: Sequence[torch.Tensor]) -> Iterator[None]:
    """Calls no hooks on the weights' gradients within the context: they are called as those of a replay arrive."""
    hooks = [(weight._backward_hooks, dict(weight._backward_hooks)) for weight in weights if weight._backward_hooks]
    try:
        for table, _ in hooks:
            table.clear()
        yield
    finally:
        for table, before in hooks:
            table.update(before)
