"""State of a model beside its parameters and buffers: counters, replay buffers, hidden states in plain attributes."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

from amptune.changes.tensor_tree import tensors_in

__all__ = ["PlainAttributes", "can_be_written"]

# The attributes that every module has are PyTorch's; probabilities of dropout are set while gradients are compared.
_NOT_STATE = frozenset(vars(nn.Module())) | {"p", "dropout"}
# Not text: it may name the device that a model was moved to since.
_VALUES = (type(None), bool, int, float, complex)
_CONTAINERS = (list, deque, dict, set)


class PlainAttributes:
    """The attributes of a model's own modules as it was built, to start each training from them.

    PyTorch's own modules keep no such state. Containers are put back with what they held, not deeper; not those of
    tensors, which the model's own `to` may have moved.
    """

    def __init__(self, model: nn.Module) -> None:
        self._kept = [
            (vars(module), name, value, _content_of(value))
            for module in model.modules()
            if not type(module).__module__.startswith("torch.")
            for name, value in vars(module).items()
            if name not in _NOT_STATE and _can_be_put_back(value)
        ]

    @torch.no_grad()
    def put_back(self) -> None:
        for attributes, name, value, content in self._kept:
            if name not in attributes:  # deleted, or a parameter, buffer or module by now
                continue
            now, attributes[name] = attributes[name], value
            if isinstance(value, torch.Tensor):
                value.resize_(content.shape).copy_(content)
                if isinstance(now, torch.Tensor) and now.device != value.device:  # moved by the model's own `to`
                    attributes[name] = content.to(now.device)
            elif isinstance(value, list | deque):
                value.clear()
                value.extend(content)
            elif isinstance(value, dict | set):
                value.clear()
                value.update(content)


def can_be_written(tensor: torch.Tensor) -> bool:
    """Returns False for an expanded tensor: several of its elements are one."""
    return tensor.layout is not torch.strided or 0 not in tensor.stride()


def _can_be_put_back(value: Any) -> bool:
    if type(value) in _CONTAINERS:
        items = list(value.values() if isinstance(value, dict) else value)
        return not any(isinstance(item, nn.Module) for item in items) and not tensors_in(items)
    is_tensor = type(value) is torch.Tensor and value.layout is torch.strided and not value.requires_grad
    return (is_tensor and can_be_written(value) and not value.is_inference()) or type(value) in _VALUES


def _content_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return value.copy() if type(value) in _CONTAINERS else None
