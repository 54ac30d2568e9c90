"""Detects effects of a forward pass on the host, at any depth. A recording would leave them out, so it is refused."""

from __future__ import annotations

import random
import sys
from collections import deque
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel

from amptune.errors import AmptuneError
from amptune.runtime.graphs.host_objects import CONTAINERS, IteratorFoundError, content_of, put_back, used_by
from amptune.runtime.graphs.model_state import HOOKS, are_same, changed_keys, is_foreign

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["DeviceState", "NotRecordableError", "copies_of", "obstacle_in", "without_effects", "without_repeats"]

_GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in HOOKS)
# More objects than this are not looked through.
_MOST_OBJECTS = 200_000


class NotRecordableError(AmptuneError):
    """An error that says why a forward pass cannot be recorded, in words that follow the model's name."""


def obstacle_in(model: nn.Module) -> str | None:
    """Returns why no pass of the model can be recorded, in words that follow its name, or None. Runs no pass."""
    if any(getattr(torch_module, kind, True) for kind in _GLOBAL_HOOKS):
        return "has hooks that are registered for all modules"
    packages = {package for module in model.modules() if (package := _package_of(type(module))) != "__main__"}
    for path, module in model.named_modules():
        # A hook that the model's own package has set, such as one that captures outputs, is a part of its forward.
        if any(_package_of(hook) not in packages for kind in HOOKS for hook in getattr(module, kind).values()):
            return f"has a hook on {path or 'itself'}"
        if isinstance(module, torch.jit.ScriptModule):
            return f"holds {path or 'itself'}, a TorchScript module, whose weights cannot be exchanged"
        if isinstance(module, DistributedDataParallel):
            return "holds DistributedDataParallel, which is to be put around what is recorded"
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks:
            return f"has a hook on the gradient of {name}"
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.layout is not torch.strided:
            return f"holds {name}, which is no plain tensor"
    return None


def _package_of(named: Any) -> str:
    package = (getattr(named, "__module__", None) or "").partition(".")[0]
    return "__main__" if package in ("", "torch") else package


@contextmanager
def without_effects(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Raises `NotRecordableError` if the code within changes anything on the host; restores as much as it can.

    Yields a function that restores buffers and the random generators of the model's devices, as the end does.
    """
    host, device = _Host(model), DeviceState(model)
    try:
        yield device.put_back
        host.require_unchanged()
    finally:
        try:
            device.put_back()
        finally:
            host.put_back()


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns copies of tensors, made by a kernel for each dtype and device in place of one for each tensor."""
    copies: dict[int, torch.Tensor] = {}
    kinds: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(place)
    for places in kinds.values():
        joined = torch.cat([tensors[place].detach().reshape(-1) for place in places])
        parts = joined.split_with_sizes([tensors[place].numel() for place in places])
        copies |= {place: part.view(tensors[place].shape) for place, part in zip(places, parts, strict=True)}
    return [copies[place] for place in range(len(tensors))]


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view in which each dimension that is expanded has one item."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class DeviceState:
    """The buffers of a model and the random generators of its devices, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        # `data`, else a backward pass sees them as modified
        self._buffers = [without_repeats(buffer.data) for buffer in model.buffers()]
        self._values = copies_of(self._buffers)
        devices = {tensor.device.index for tensor in (*model.parameters(), *model.buffers()) if tensor.is_cuda}
        self._random = {device: torch.cuda.get_rng_state(device) for device in devices}

    def put_back(self) -> None:
        """Restores the values."""
        for device, state in self._random.items():
            torch.cuda.set_rng_state(state, device)
        for buffer, value in zip(self._buffers, self._values, strict=True):
            buffer.copy_(value)


class _Host:
    """A snapshot of the random generators, and of all that a model's modules and the code of its passes can reach."""

    def __init__(self, model: nn.Module) -> None:
        generators: dict[str, Any] = {"random": random._inst, "torch": torch.default_generator}
        if "numpy" in sys.modules:
            generators["numpy"] = sys.modules["numpy"].random.mtrand._rand
        self._generators = set(map(id, generators.values()))
        classes = dict.fromkeys(
            cls for module in model.modules() for cls in type(module).__mro__ if not is_foreign(cls)
        )
        self._methods: dict[str, list[Any]] = {}
        for cls in classes:
            for name, value in vars(cls).items():
                self._methods.setdefault(name, []).append(value)
        ahead: deque[tuple[str, Any]] = deque(generators.items())
        ahead += [(f"{cls.__name__}.forward", vars(cls)["forward"]) for cls in classes if "forward" in vars(cls)]
        ahead += [*model.named_modules(), *model.named_parameters()]
        self._met: dict[int, tuple[str, Any, Any]] = {}
        while ahead:
            name, value = ahead.popleft()
            content = None if id(value) in self._met else self._content(name, value)
            if content is not None:
                self._met[id(value)] = name, value, content
                if isinstance(content, dict):
                    ahead += [(".".join(filter(None, (name, _named(key)))), inner) for key, inner in content.items()]
                if isinstance(value, (FunctionType, *CONTAINERS)) and hasattr(value, "__dict__"):
                    ahead.append((name, vars(value)))
            if len(self._met) > _MOST_OBJECTS:
                raise NotRecordableError(f"holds more than can be looked through (beyond {name})")

    def _content(self, name: str, value: Any) -> Any:
        try:
            return used_by(value, self._methods) if isinstance(value, FunctionType) else content_of(value)
        except IteratorFoundError:
            raise NotRecordableError(f"holds {name}, an iterator, which cannot be put back") from None

    def require_unchanged(self) -> None:
        for name, value, before in self._met.values():
            changed = _changed(self._content(name, value), before)
            if changed is not None and id(value) in self._generators:
                raise NotRecordableError(f"draws random numbers on the host ({name})")
            if changed is not None:
                raise NotRecordableError(f"changes {'.'.join(filter(None, (name, changed)))} in each forward pass")

    def put_back(self) -> None:
        for name, value, before in self._met.values():
            if _changed(self._content(name, value), before) is not None:
                put_back(value, before)


def _changed(now: Any, before: Any) -> str | None:
    """Returns the place of what changed, "" for all of it, or None."""
    if not isinstance(now, dict) or not isinstance(before, dict):
        return None if are_same(now, before) else ""
    changed = changed_keys(now, before)
    if changed:
        return _named(changed[0])
    return None if are_same([*now], [*before]) else ""  # the order of a dictionary


def _named(key: Any) -> str:
    """Returns the key in words; of a tensor, whose numbers are on the device, the type."""
    return str(key) if isinstance(key, (str, int, float)) else type(key).__name__
