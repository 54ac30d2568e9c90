"""A snapshot of what a forward pass may depend on, cheap enough to be asked before every replay."""

from __future__ import annotations

from collections import deque
from functools import partial
from itertools import chain
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = [
    *("FOREIGN", "HOOKS", "OF_EVERY_MODULE"),
    *("ModelState", "are_same", "changed_keys", "first_change", "is_foreign", "is_observed", "named"),
]

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes of every module, to which PyTorch itself writes.
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_MOST_ITEMS = 1000
FOREIGN = ("torch", "builtins", "numpy")
_FLAGS = (
    torch.is_autocast_cache_enabled,
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
    torch.backends.cuda.cudnn_sdp_enabled,
    torch._C._get_cublas_allow_fp16_reduced_precision_reduction,
    torch._C._get_cublas_allow_bf16_reduced_precision_reduction,
    torch._C._get_cudnn_benchmark,
    torch._C._get_cudnn_deterministic,
    torch._C._get_cudnn_enabled,
    partial(torch._C._get_fp32_precision_getter, "cuda", "matmul"),
    partial(torch._C._get_fp32_precision_getter, "cuda", "conv"),
    partial(torch._C._get_fp32_precision_getter, "cuda", "rnn"),
)


class ModelState:
    """A snapshot of a model's modules, their classes, modes and hooks; of its weights, buffers and where they lie; of
    attributes, and of the lists, dictionaries and objects (a config) that are attributes; and of PyTorch's flags.

    What lies deeper is not seen here: recordings are compared with the model now and then. Every step asks, so this
    compares identities in C: DenseNet-161 takes half a millisecond, while the device is busy already.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.modules())
        self._parameters = list(model.parameters())
        self._flags = _flags()
        self._classes = list(map(type, self._modules))
        self._hooks = [getattr(module, kind) for module in self._modules for kind in HOOKS]
        held = {id(one): (name, one) for name, one in self._containers()}  # modules share a config
        self._empty = [(name, one) for name, one in held.values() if not one]
        self._contents = [(name, one, _content(one)) for name, one in held.values() if one]
        self._tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self._places = {name: tensor.detach() for name, tensor in self._tensors.items()}
        self._storages = {place.untyped_storage()._cdata for place in self._places.values()}

    def _containers(self) -> Iterator[tuple[str, Any]]:
        """Yields what holds values that a pass may depend on, each with a name."""
        for module in self._modules:
            own = vars(module)
            yield from (("", own), ("", module._modules), ("", module._parameters), ("", module._buffers))
            for name, value in own.items():
                inner = value if isinstance(value, (list, deque, set, dict)) else _table_of(value)
                if name not in OF_EVERY_MODULE and inner is not None and len(inner) <= _MOST_ITEMS:
                    yield name, inner
        yield from (("", vars(parameter)) for parameter in self._parameters)
        yield from (("hooks", table) for table in self._hooks)
        for cls in dict.fromkeys(chain.from_iterable(one.__mro__ for one in set(self._classes))):
            if not is_foreign(cls):
                yield "", vars(cls)

    def changed(self) -> str | None:
        """Returns the name of something that changed since the snapshot, or None."""
        for name, one in self._empty:
            if one:
                return name or str(next(iter(one)))
        for place in range(len(self._contents)):
            if (changed := self._change_in(place)) is not None:
                return changed
        if not all(map(is_, map(type, self._modules), self._classes)):
            return "the class of a module"
        if not all(map(torch.Tensor.is_set_to, self._tensors.values(), self._places.values())):
            return next(name for name, tensor in self._tensors.items() if not tensor.is_set_to(self._places[name]))
        return None if _flags() == self._flags else "flags of PyTorch"

    def _change_in(self, place: int) -> str | None:
        """Returns None for the same objects. An equal number or string in the place of another one is noted."""
        name, container, before = self._contents[place]
        now = _content(container)
        if len(now) == len(before) and all(map(is_, _items(now), _items(before))):
            return None
        changed = first_change(now, before)
        if changed is not None:
            return name or changed or "its attributes"
        self._contents[place] = name, container, now
        return None

    def holds_memory_of(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Returns True if a tensor lies in the memory of a weight or a buffer."""
        return any(one.untyped_storage()._cdata in self._storages for one in tensors)

    def trained(self) -> tuple[bool, ...]:
        """Returns `requires_grad` of each parameter."""
        return tuple([parameter.requires_grad for parameter in self._parameters])


def is_observed() -> bool:
    """Returns True if something observes the pass that a replay would leave out or disturb, or may do so."""
    autograd, functorch = torch._C._autograd, torch._C._functorch
    hooks = getattr(autograd, "_top_saved_tensors_default_hooks", None)
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._current_graph_task_id() != -1  # in a backward pass, where checkpointing computes again
        or functorch.peek_interpreter_stack() is not None
        or torch.jit.is_tracing()  # type: ignore[attr-defined,no-untyped-call]
        or parametrize._cache_enabled > 0
        or hooks is None
        or hooks(False) is not None
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())  # type: ignore[no-untyped-call]
    )


def is_foreign(named: Any) -> bool:
    """Returns True for a class or function of PyTorch, NumPy or Python itself."""
    return (getattr(named, "__module__", None) or "").partition(".")[0] in FOREIGN


def _table_of(value: Any) -> dict[str, Any] | None:
    """Returns the attributes of an object that is more than a value, such as a config; else None."""
    if isinstance(value, (nn.Module, torch.Tensor, type)) or (callable(value) and is_foreign(value)):
        return None
    table = getattr(value, "__dict__", None)
    return table if isinstance(table, dict) else None


def are_same(now: Any, before: Any) -> bool:
    """Returns True for one object, for equal numbers or strings of one type, and for lists or tuples of such."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, (list, tuple)):
        return len(now) == len(before) and all(map(are_same, now, before))
    return type(now) in _PLAIN and repr(now) == repr(before)  # 0.0 is not -0.0


def first_change(now: Any, before: Any) -> str | None:
    """Returns the place of what changed, "" for all of it, or None."""
    if not isinstance(now, dict) or not isinstance(before, dict):
        return None if are_same(now, before) else ""
    changed = changed_keys(now, before)
    if changed:
        return named(changed[0])
    return None if are_same([*now], [*before]) else ""  # the order of a dictionary


def named(key: Any) -> str:
    """Returns the key in words; of a tensor, whose numbers are on the device, the type."""
    return str(key) if isinstance(key, (str, int, float)) else type(key).__name__


def changed_keys(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> list[Any]:
    """Returns the keys whose values differ, or that only one of both has."""
    missing = object()
    keys = dict.fromkeys([*before, *now])
    return [key for key in keys if not are_same(now.get(key, missing), before.get(key, missing))]


def _content(container: Any) -> dict[Any, Any] | list[Any]:
    return dict(container) if hasattr(container, "values") else list(container)


def _items(content: dict[Any, Any] | list[Any]) -> Iterable[Any]:
    return chain(content, content.values()) if isinstance(content, dict) else content


def _flags() -> list[Any]:
    return [flag() for flag in _FLAGS]
