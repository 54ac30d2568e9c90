"""Hooks by which a training script that runs unchanged is seen and led: loaders, passes, losses, updates.

Where PyTorch has a public hook, it is used; the rest are methods of PyTorch's classes that are replaced until `undo`.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from amptune.runtime.way_back import WayBack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["LedIterator", "Listener", "ScriptHooks", "as_policys", "autocast_as_it_is", "inner_of", "is_wrapper"]

_WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel)
_WRAPPER_NAMES = ("_FabricModule",)  # which casts inputs, and enters autocast


class Listener(Protocol):
    """An object that is told of a script's training, and decides for it."""

    def is_script(self) -> bool:
        """Returns True if the code that runs now is the script's."""

    def batch(self, loader: Any, own: LedIterator) -> Any:
        """Returns the loader's next batch. May raise `StopIteration`."""

    def draws_later(self) -> bool:
        """Returns True if a loader that is iterated over need not begin before a batch is drawn from it."""

    def called(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Is told of each outermost call of a module that trains, while `ScriptHooks.watch_modules` is on."""

    def backward(self, loss: torch.Tensor, run: Callable[[torch.Tensor], None]) -> None:
        """Runs the backward pass of a loss, which is given without the factor of the script's own loss scaler."""

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        """Is told of each update of weights, and of those that a loss scaler skipped."""

    def scaler(self, scaler: Any) -> None:
        """Is told of each loss scaler that scales."""

    def leaves_out_autocast(self, dtype: torch.dtype) -> bool:
        """Returns True if autocast that the script enters is to do nothing, as a policy decides on it."""

    def leaves_out_compile(self, mode: str) -> bool:
        """Returns True if torch.compile of a module is to return it as it is."""

    def schedules(self) -> bool:
        """Returns True if learning-rate schedules go on."""


_AUTOCAST = torch.amp.autocast.__enter__, torch.amp.autocast.__exit__


@contextmanager
def autocast_as_it_is() -> Iterator[None]:
    """Puts PyTorch's own autocast in place meanwhile, which its compiler knows by its functions."""
    kind: Any = torch.amp.autocast
    before = kind.__enter__, kind.__exit__
    kind.__enter__, kind.__exit__ = _AUTOCAST
    try:
        yield
    finally:
        kind.__enter__, kind.__exit__ = before


def as_policys(autocast: torch.amp.autocast) -> torch.amp.autocast:
    """Marks autocast as the policy's, which is entered in any case."""
    vars(autocast)["is_policys"] = True
    return autocast


def inner_of(module: nn.Module) -> nn.Module:
    """Returns the module within wrappers of several devices, or of Fabric."""
    while is_wrapper(module):
        module = module.module  # type: ignore[assignment]
    return module


def is_wrapper(module: nn.Module) -> bool:
    """Returns True for a module that calls another one for the script."""
    return isinstance(module, _WRAPPERS) or type(module).__name__ in _WRAPPER_NAMES


class ScriptHooks:
    """The hooks on a script that `listener` hears, until `undo`."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._back = WayBack()
        self._watch = WayBack()
        self._depth = threading.local()
        with self._back:
            self.replace(DataLoader, "__iter__", self._loader)
            self.replace(torch.Tensor, "backward", self._backward)
            self.replace(torch.amp.GradScaler, "scale", self._scale)
            self.replace(torch.amp.GradScaler, "step", self._scaler_step)
            self.replace(torch.amp.autocast, "__enter__", self._enter)
            self.replace(torch.amp.autocast, "__exit__", self._exit)
            self.replace(torch, "compile", self._compile)
            self.replace(nn.Module, "compile", self._compile_in_place)
            self.replace(LRScheduler, "step", self._schedule)
            hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._updated(optimizer))
            self._back.add(hook.remove)

    def undo(self) -> None:
        """Removes all hooks."""
        self._watch.go()
        self._back.go()

    def watch_modules(self) -> None:
        """Has the listener told of modules that are called. Each call of a module takes longer meanwhile."""
        before = torch_module.register_module_forward_pre_hook(self._begins)
        after = torch_module.register_module_forward_hook(lambda module, *_: self._ends(module), always_call=True)
        self._watch.add(before.remove)
        self._watch.add(after.remove)

    def watch_no_modules(self) -> None:
        """Ends that; nothing of it stays in what is timed or compiled."""
        self._watch.go()

    def replace(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Replaces an attribute by `wrapper` of it, until `undo`."""
        own, is_own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, wrapper(own))
        self._back.add(*((setattr, owner, name, own) if is_own else (delattr, owner, name)))

    def _begins(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if is_wrapper(module):
            return
        depth = getattr(self._depth, "now", 0)
        self._depth.now = depth + 1
        if depth == 0 and torch.is_grad_enabled() and not _is_in_backward() and self._listener.is_script():
            self._listener.called(module, args)

    def _ends(self, module: nn.Module) -> None:
        if not is_wrapper(module):
            self._depth.now = max(0, getattr(self._depth, "now", 0) - 1)

    def _updated(self, optimizer: torch.optim.Optimizer) -> None:
        if self._listener.is_script():
            self._listener.updated(optimizer)

    def _loader(self, own: Any) -> Any:
        def __iter__(loader: Any) -> Iterator[Any]:  # noqa: N807  # it is that
            if not self._listener.is_script():
                return own(loader)  # type: ignore[no-any-return]
            led = LedIterator(loader, lambda: own(loader), self._listener)
            return led if self._listener.draws_later() else led.begun()

        return __iter__

    def _backward(self, own: Any) -> Any:
        def backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            # under a mode for torch functions, as of a default device, PyTorch's own method calls this one once more
            if getattr(self._depth, "is_heard", False) or not self._listener.is_script():
                own(loss, *args, **kwargs)
                return
            plain = getattr(loss, "unscaled", loss)
            self._depth.is_heard = True
            try:
                self._listener.backward(plain, lambda given: own(given if plain is loss else loss, *args, **kwargs))
            finally:
                self._depth.is_heard = False

        return backward

    def _scale(self, own: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            if not self._listener.is_script():
                return own(scaler, outputs)
            self._listener.scaler(scaler)
            scaled = own(scaler, outputs)
            if isinstance(scaled, torch.Tensor) and scaled is not outputs:
                vars(scaled)["unscaled"] = outputs
            return scaled

        return scale

    def _scaler_step(self, own: Any) -> Any:
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            result = own(scaler, optimizer, *args, **kwargs)
            self._updated(optimizer)  # also if it was skipped
            return result

        return step

    def _enter(self, own: Any) -> Any:
        def __enter__(autocast: Any) -> Any:  # noqa: N807
            entered = vars(autocast).setdefault("entered", [])
            is_own = torch.compiler.is_compiling() or "is_policys" in vars(autocast) or not autocast._enabled
            is_own = is_own or _is_in_backward()  # as it was when what is computed again was computed first
            left_out = not is_own and self._listener.is_script()
            left_out = left_out and self._listener.leaves_out_autocast(autocast.fast_dtype)
            entered.append(left_out)
            return autocast if left_out else own(autocast)

        return __enter__

    def _exit(self, own: Any) -> Any:
        def __exit__(autocast: Any, *error: Any) -> Any:  # noqa: N807
            entered = vars(autocast).get("entered")
            return None if entered and entered.pop() else own(autocast, *error)

        return __exit__

    def _compile(self, own: Any) -> Any:
        def compile(model: Any = None, *args: Any, **kwargs: Any) -> Any:  # noqa: A001  # PyTorch's name
            is_module = isinstance(model, nn.Module) and self._listener.is_script()
            if is_module and self._listener.leaves_out_compile(kwargs.get("mode") or "default"):
                return model
            return own(model, *args, **kwargs)

        return compile

    def _compile_in_place(self, own: Any) -> Any:
        def compile(module: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: A001
            asked = self._listener.is_script()
            if not (asked and self._listener.leaves_out_compile(kwargs.get("mode") or "default")):
                own(module, *args, **kwargs)

        return compile

    def _schedule(self, own: Any) -> Any:
        def step(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            goes_on = not self._listener.is_script() or self._listener.schedules()
            return own(schedule, *args, **kwargs) if goes_on else None

        return step


def _is_in_backward() -> bool:
    """Returns True while activations are computed again in a backward pass, by `torch.utils.checkpoint`."""
    return torch._C._current_graph_task_id() != -1  # as torch's own module tracker asks


class LedIterator:
    """A loader's iterator, whose batches the listener gives; it begins when the first one of its own is drawn.

    `drawn` counts those of its own, and `given` all.
    """

    def __init__(self, loader: Any, begin: Callable[[], Any], listener: Listener) -> None:
        self._loader, self._begin, self._listener = loader, begin, listener
        self._iterator: Any = None
        self.drawn = self.given = 0

    def begun(self) -> LedIterator:
        """Begins now, unless it has."""
        if self._iterator is None:
            self._iterator = self._begin()
        return self

    def draw(self) -> Any:
        """Returns its own next batch. Raises `StopIteration` at its end."""
        self.drawn += 1
        return next(self.begun()._iterator)

    @property
    def is_at_end(self) -> bool:
        """True if as many batches were given as the loader has."""
        try:
            return self.given >= len(self._loader)
        except TypeError:  # it has no length
            return False

    def __iter__(self) -> LedIterator:
        return self

    def __next__(self) -> Any:
        batch = self._listener.batch(self._loader, self)
        self.given += 1
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.begun()._iterator, name)
