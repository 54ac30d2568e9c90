"""Detects effects of a forward pass on the host, at any depth. A recording would leave them out, so it is refused."""

from __future__ import annotations

import random
import sys
from collections import deque
from contextlib import contextmanager
from operator import is_
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel

from amptune.errors import AmptuneError
from amptune.runtime.graphs.host_objects import (
    ITERATOR,
    content_of,
    has_attributes,
    is_of_python,
    names_of,
    put_back,
    used_by,
)
from amptune.runtime.graphs.model_state import HOOKS, first_change, is_foreign, named

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

__all__ = [
    "DeviceState",
    "HostSnapshot",
    "NotRecordableError",
    "RandomState",
    "SavedValues",
    "alike",
    "obstacle_in",
    "without_effects",
    "without_repeats",
]

_GLOBAL_HOOKS = tuple(f"_global{kind}" for kind in HOOKS)
# More objects than this, each with a dictionary of its attributes, are not looked through.
_MOST_OBJECTS = 400_000


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
    host, device = HostSnapshot([model]), DeviceState(model)
    try:
        yield device.put_back
        host.require_unchanged()
    finally:
        try:
            device.put_back()
        finally:
            host.put_back()


def alike(kinds: Iterable[Any]) -> list[list[int]]:
    """Returns the places of each kind: tensors of one kind are copied by one kernel, others by one for each."""
    places: dict[Any, list[int]] = {}
    for place, kind in enumerate(kinds):
        places.setdefault(kind, []).append(place)
    return [*places.values()]


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a view in which each dimension that is expanded has one item."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class RandomState:
    """The state of the random generators of GPUs, to be put back; other devices have none."""

    def __init__(self, *devices: torch.device) -> None:
        self._states = {device: torch.cuda.get_rng_state(device) for device in devices if device.type == "cuda"}

    def put_back(self) -> None:
        """Restores the generators."""
        for device, state in self._states.items():
            torch.cuda.set_rng_state(state, device)


class SavedValues:
    """The values of tensors, and the state of random generators of GPUs, to be put back."""

    def __init__(self, tensors: Sequence[torch.Tensor], *devices: torch.device) -> None:
        self._random = RandomState(*devices)
        self._tensors = tensors
        self.copies = [torch.empty_like(one) for one in tensors]
        self._alike = alike((one.dtype, one.device) for one in tensors)
        self._copy(tensors, self.copies)

    def put_back(self) -> None:
        """Restores them."""
        self._random.put_back()
        self._copy(self.copies, self._tensors)

    @torch.no_grad()
    def _copy(self, values: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        for places in self._alike:
            torch._foreach_copy_([targets[place] for place in places], [values[place] for place in places])


class DeviceState(SavedValues):
    """The buffers of a model and the random generators of its devices, to be put back."""

    def __init__(self, model: nn.Module) -> None:
        # `data`, else a backward pass sees them as modified
        buffers = [without_repeats(buffer.data) for buffer in model.buffers()]
        super().__init__(buffers, *{tensor.device for tensor in (*model.parameters(), *model.buffers())})


class HostSnapshot:
    """A snapshot of the random generators, and of all that modules, and the code that is run, can reach.

    `code` names what is called beside the modules' `forward`: functions, methods and objects. What amptune holds of a
    model is not looked into, but for the model. `besides` are objects that are not looked into either. Without modules
    it is one of what the code may read: of an object the attributes, and the methods, that the code names.
    """

    def __init__(
        self, modules: Sequence[nn.Module], code: Mapping[str, Any] | None = None, besides: Collection[Any] = ()
    ) -> None:
        generators = _generators() if modules else {}
        self._generators = set(map(id, generators.values()))
        self._besides = set(map(id, besides))
        self._reads_all = bool(modules)
        self._names: set[str] = set()  # in the code that was met
        self._attributes: set[int] = set()
        self._classes: dict[type, None] = {}
        self._methods: dict[str, list[Any]] = {}
        self._met: dict[int, tuple[str, Any, Any]] = {}
        inner = dict.fromkeys(one for module in modules for one in module.modules())
        for one in (*inner, *(code or {}).values()):
            self._learn(type(getattr(one, "__self__", one)))
        of_models = [*self._classes]
        if modules and code:
            for cls in HostSnapshot([], code, inner)._classes:
                self._learn(cls)
        first: list[tuple[str, Any]] = [*generators.items(), *(code or {}).items()]
        first += [(f"{cls.__name__}.forward", vars(cls)["forward"]) for cls in of_models if "forward" in vars(cls)]
        for module in modules:
            first += [*module.named_modules(), *module.named_parameters()]
        self._meet(first)
        known = 0
        while not self._reads_all and len(self._names) + len(self._classes) > known:  # code names more to look at
            known = len(self._names) + len(self._classes)
            self._meet(first)

    def _learn(self, kind: type) -> None:
        """Notes the methods of a class, for code that names them."""
        for cls in kind.__mro__:
            if cls not in self._classes and not is_foreign(cls) and not is_of_python(cls):
                self._classes[cls] = None
                for name, value in vars(cls).items():
                    self._methods.setdefault(name, []).append(value)

    def _meet(self, first: Sequence[tuple[str, Any]]) -> None:
        self._met.clear()
        ahead = deque(first)
        while ahead:
            name, value = ahead.popleft()
            ahead += self._within(name, value)
            if len(self._met) > _MOST_OBJECTS:
                raise NotRecordableError(f"holds more than can be looked through (beyond {name})")

    def _within(self, name: str, value: Any) -> Iterator[tuple[str, Any]]:
        """Notes what is inside an object, and yields each with a name."""
        is_known = id(value) in self._met or id(value) in self._besides
        content = None if is_known else self._content(value)
        if content is ITERATOR:
            raise NotRecordableError(f"holds {name}, an iterator, which cannot be put back")
        if content is None:
            return
        self._met[id(value)] = name, value, content
        if not self._reads_all:
            self._learn(value if isinstance(value, type) else type(value))
        if isinstance(value, FunctionType):
            self._names.update(names_of(value.__code__))
        if has_attributes(value):
            self._attributes.add(id(vars(value)))
            yield name, vars(value)
        if isinstance(content, dict):
            skips = not self._reads_all and id(value) in self._attributes
            items = content.items() if not skips else ((k, v) for k, v in content.items() if k in self._names)
            yield from ((_joined(name, named(key)), inner) for key, inner in items)

    def _content(self, value: Any) -> Any:
        return used_by(value, self._methods) if isinstance(value, FunctionType) else content_of(value)

    def _changes(self) -> Iterator[tuple[str, Any, Any]]:
        """Yields (name of what changed inside, object, its content before) for each object."""
        for name, value, before in self._met.values():
            changed = first_change(self._content(value), before)
            if changed is not None:
                yield _joined(name, changed), value, before

    def changed(self) -> str | None:
        """Returns the name of something that changed and that the code may read, or None.

        An attribute of an object counts if the code names it.
        """
        for ident, (name, value, before) in self._met.items():
            now = self._content(value)
            is_dict = isinstance(now, dict) and now.keys() == before.keys()
            if is_dict and all(map(is_, now.values(), before.values())):
                continue
            if ident in self._attributes:
                now, before = ({k: v for k, v in one.items() if k in self._names} for one in (now, before))
            if (changed := first_change(now, before)) is not None:
                return _joined(name, changed)
        return None

    def require_unchanged(self, when: str = "forward pass") -> None:
        """Raises `NotRecordableError` if something is not as it was."""
        for name, value, _ in self._changes():
            is_drawn = id(value) in self._generators
            what = f"draws random numbers on the host ({name})" if is_drawn else f"changes {name} in each {when}"
            raise NotRecordableError(what)

    def put_back(self) -> None:
        """Restores what can be written."""
        for _, value, before in self._changes():
            put_back(value, before)


def _generators() -> dict[str, Any]:
    """Returns the random generators of the host by name."""
    found: dict[str, Any] = {"random": random._inst, "torch": torch.default_generator}
    if "numpy" in sys.modules:
        found["numpy"] = sys.modules["numpy"].random.mtrand._rand
    return found


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))
