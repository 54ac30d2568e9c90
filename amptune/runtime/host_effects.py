"""What a forward pass does on the host, which a recorded one would leave out: it is not to be recorded then."""

from __future__ import annotations

import random
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from amptune.runtime.model_state import HOOKS, OF_EVERY_MODULE

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HostEffects", "hooked", "put_back"]

_GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in HOOKS)
_TENSORS = ("_parameters", "_buffers")
_CONTAINERS = (list, dict, set)


def hooked(model: nn.Module) -> str | None:
    """Which of the model's modules or weights has a hook, in words; None if none has."""
    if any(getattr(torch_module, kind, None) for kind in _GLOBAL_HOOKS):
        return "has hooks that are registered for all modules"
    for path, module in model.named_modules():
        if any(getattr(module, kind, None) for kind in HOOKS):
            return f"has a hook on {path or 'itself'}"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            return f"has a hook on the gradient of {name}"
    return None


class HostEffects:
    """What forward passes changed on the host since this was made: random numbers drawn there, attributes set."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._random = _random_state()
        self._attributes = {path: _attributes_of(module) for path, module in model.named_modules()}

    def found(self) -> str | None:
        """In words, after the model's name; None where nothing changed."""
        drawn = [whose for whose, state in _random_state().items() if state != self._random.get(whose, state)]
        if drawn:
            return f"draws random numbers on the host ({drawn[0]})"
        for path, module in self._model.named_modules():
            before = self._attributes.get(path, {})
            for name, value in _attributes_of(module).items():
                if name not in before or not _is_same(value, before[name]):
                    return f"sets {f'{path}.{name}' if path else name} in each forward pass"
        return None


@contextmanager
def put_back(model: nn.Module) -> Iterator[None]:
    """What passes do to the model's buffers and to random generators is taken back at the end."""
    tables = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {tensor.device.index for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    drawn = random.getstate()
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
        finally:
            random.setstate(drawn)
            for table, before in tables:
                table.update(before)
            for buffer, value in buffers:
                buffer.data.copy_(value)  # not to a backward pass that is still to come: it would take it for changed


def _random_state() -> dict[str, Any]:
    states: dict[str, Any] = {"random": random.getstate(), "torch": torch.get_rng_state().numpy().tobytes()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *others = numpy.random.get_state()
        states["numpy"] = (kind, keys.tobytes(), *others)
    return states


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """Its own, and its weights and buffers by name; of a container also how much it holds."""
    found = {name: value for name, value in vars(module).items() if name not in OF_EVERY_MODULE}
    for kind in _TENSORS:
        found.update(getattr(module, kind))
    return {name: (value, len(value) if isinstance(value, _CONTAINERS) else None) for name, value in found.items()}


def _is_same(one: tuple[Any, int | None], before: tuple[Any, int | None]) -> bool:
    """The same object with as much in it, or plain values that are equal."""
    (value, length), (value_before, length_before) = one, before
    if value is value_before:
        return length == length_before
    return isinstance(value, (bool, int, float, str)) and value == value_before
