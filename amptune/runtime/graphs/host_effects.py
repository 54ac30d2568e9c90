"""Detects effects of a forward pass on the host. A recording would leave them out, so it is refused."""

from __future__ import annotations

import random
import sys
from collections import deque
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel

from amptune.errors import AmptuneError
from amptune.runtime.graphs.model_state import DEPTH, HOOKS, OF_EVERY_MODULE, PLAIN, table_in

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NotRecordableError", "obstacle_in", "without_effects"]

_GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in HOOKS)
_TABLES = ("_parameters", "_buffers", "_modules")


class NotRecordableError(AmptuneError):
    """An error that says why a forward pass cannot be recorded, in words that follow the model's name."""


def obstacle_in(model: nn.Module) -> str | None:
    """Returns why no pass of the model can be recorded, in words that follow its name, or None. Runs no pass."""
    if any(getattr(torch_module, kind, None) for kind in _GLOBAL_HOOKS):
        return "has hooks that are registered for all modules"
    for path, module in model.named_modules():
        if any(getattr(module, kind, None) for kind in HOOKS):
            return f"has a hook on {path or 'itself'}"
        if isinstance(module, DistributedDataParallel):
            return "holds DistributedDataParallel, which is to be put around what is recorded"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            return f"has a hook on the gradient of {name}"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
            return f"holds {name}, which is no plain tensor"
    return None


@contextmanager
def without_effects(model: nn.Module) -> Iterator[None]:
    """Raises `NotRecordableError` if the code within changes anything on the host; restores as much as it can.

    Buffers and random generators are restored too, including the generators of the model's devices.
    """
    host = _Host(model)
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = {tensor.device.index for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
    with torch.random.fork_rng(devices=sorted(devices)):
        try:
            yield
            host.require_unchanged()
        finally:
            host.put_back()
            for buffer, value in buffers:
                buffer.data.copy_(value)  # by .data: else a backward pass still to come would see it as modified


class _Host:
    """A snapshot of the random generators, and of the attributes of modules and weights with their contents."""

    def __init__(self, model: nn.Module) -> None:
        self._generators = _generators()
        owners = (*model.named_modules(), *model.named_parameters())
        self._attributes = {path: (owner, _attributes_of(owner)) for path, owner in owners}

    def require_unchanged(self) -> None:
        drawn = [whose for whose, state in _generators().items() if state != self._generators.get(whose, state)]
        if drawn:
            raise NotRecordableError(f"draws random numbers on the host ({drawn[0]})")
        for path, (owner, before) in self._attributes.items():
            now = _attributes_of(owner)
            changed = [name for name in (*before, *now) if not _is_same(now.get(name), before.get(name))]
            if changed:
                what = ".".join(filter(None, (path, changed[0])))
                raise NotRecordableError(f"changes {what} in each forward pass")

    def put_back(self) -> None:
        random.setstate(self._generators["random"])
        if "numpy" in self._generators:
            sys.modules["numpy"].random.set_state(self._generators["numpy"])
        for owner, before in self._attributes.values():
            own = vars(owner)
            for name in [name for name in own if name not in OF_EVERY_MODULE and name not in before]:
                del own[name]
            for name, (value, content) in before.items():
                own[name] = value
                _refill(value, content)


def _generators() -> dict[str, Any]:
    states: dict[str, Any] = {"random": random.getstate(), "torch": _state_of(torch.default_generator)}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *others = numpy.random.get_state()
        states["numpy"] = (kind, tuple(keys.tolist()), *others)
    return states


def _state_of(generator: torch.Generator) -> bytes:
    return bytes(generator.get_state().tolist())  # `.numpy()` needs NumPy, which a training node may lack


def _attributes_of(owner: nn.Module | nn.Parameter) -> dict[str, tuple[Any, Any]]:
    """Returns {name: (value, content)} of its own attributes, and of a module's weights, buffers and modules."""
    own = {name: value for name, value in vars(owner).items() if name not in OF_EVERY_MODULE or name in _TABLES}
    return {name: (value, _content(value, DEPTH)) for name, value in own.items()}


def _content(value: Any, depth: int) -> Any:
    """Returns what may change inside the same object: items with their content, or a generator's state; else None."""
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, torch.Generator):
        return _state_of(value)
    if hasattr(value, "bit_generator"):  # NumPy's
        return value.bit_generator.state
    items = _items(value) if depth else None
    return None if items is None else [(key, item, _content(item, depth - 1)) for key, item in items]


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    if isinstance(value, (list, deque)):
        return list(enumerate(value))
    if isinstance(value, set):
        return [(item, item) for item in value]
    table = table_in(value)
    return None if table is None else list(table.items())


def _is_same(now: Any, before: Any) -> bool:
    """Returns True if two (value, content) pairs are one object with the same content, or equal plain values."""
    if now is None or before is None:
        return False
    (value, content), (value_before, content_before) = now, before
    same = _are_equal(value, value_before)
    if not isinstance(content, list) or not isinstance(content_before, list):
        return same and repr(content) == repr(content_before)  # a NumPy generator's state holds arrays
    return (
        same
        and len(content) == len(content_before)
        and all(
            key is key_before or key == key_before
            for (key, *_), (key_before, *_) in zip(content, content_before, strict=True)
        )
        and all(_is_same(one[1:], other[1:]) for one, other in zip(content, content_before, strict=True))
    )


def _are_equal(value: Any, other: Any) -> bool:
    """Returns True for one and the same object, and for equal plain values or tuples."""
    if isinstance(value, tuple) and type(value) is type(other):
        return len(value) == len(other) and all(map(_are_equal, value, other))
    return value is other or (type(value) in PLAIN and type(other) in PLAIN and bool(value == other))


def _refill(value: Any, content: Any) -> None:
    """Restores the contents of a container or the state of a generator, at any depth."""
    if isinstance(value, random.Random):
        value.setstate(content)
    elif isinstance(value, torch.Generator):
        value.set_state(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = content
    if not isinstance(content, list):
        return
    if isinstance(value, (list, deque)):
        value.clear()
        value.extend(item for _, item, _ in content)
    elif isinstance(value, set):
        value.clear()
        value.update(item for _, item, _ in content)
    else:
        table = table_in(value)
        if table is not None:
            table.clear()
            table.update((key, item) for key, item, _ in content)
    for _, item, inner in content:
        _refill(item, inner)
