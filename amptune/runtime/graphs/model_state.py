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
    *("ModelState", "are_same", "changed_keys", "is_foreign", "is_observed"),
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
        self._contents = [(name, one, _items(one)) for name, one in held.values() if one]
        self._ids = [list(map(id, items)) for _, _, items in self._contents]
        tables = [table for module in self._modules for table in (module._parameters, module._buffers)]
        named = [(name, held) for table in tables for name, held in table.items() if held is not None]
        self._names, self._tensors = [name for name, _ in named], [held for _, held in named]
        self._places = [tensor.detach() for tensor in self._tensors]
        self._storages = {tensor.untyped_storage()._cdata for tensor in self._tensors if tensor.layout is torch.strided}

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

    def holds(self) -> bool:
        """Returns True if all is as it was."""
        return (
            not any(one for _, one in self._empty)
            and all(map(is_, map(type, self._modules), self._classes))
            and all(self._is_as_it_was(place) for place in range(len(self._contents)))
            and all(map(torch.Tensor.is_set_to, self._tensors, self._places))
            and _flags() == self._flags
        )

    def _is_as_it_was(self, place: int) -> bool:
        """Returns True for the same objects. An equal number or string in the place of another one is noted."""
        _, container, before = self._contents[place]
        now = _items(container)
        if list(map(id, now)) == self._ids[place]:
            return True
        if not are_same(now, before):
            return False
        self._contents[place] = (*self._contents[place][:2], now)
        self._ids[place] = list(map(id, now))
        return True

    def holds_memory_of(self, tensors: Iterable[torch.Tensor]) -> bool:
        """Returns True if a tensor lies in the memory of a weight or a buffer."""
        return any(one.untyped_storage()._cdata in self._storages for one in tensors)

    def trained(self) -> tuple[bool, ...]:
        """Returns `requires_grad` of each parameter."""
        return tuple([parameter.requires_grad for parameter in self._parameters])

    def changed(self) -> str:
        """Returns the names of all that changed since the snapshot, for messages."""
        names = [name or str(key) for name, one in self._empty for key in one]
        for name, container, before in self._contents:
            if hasattr(container, "values"):
                half = len(before) // 2
                former = dict(zip(before[:half], before[half:], strict=True))
                names += [name or str(key) for key in changed_keys(dict(container), former)]
            elif not are_same(_items(container), before):
                names.append(name)
        places = zip(self._names, self._tensors, self._places, strict=True)
        names += [name for name, tensor, place in places if not tensor.is_set_to(place)]
        if [*map(type, self._modules)] != self._classes:
            names.append("the class of a module")
        return ", ".join(dict.fromkeys(names)) or "flags of PyTorch"


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


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if hasattr(container, "values") else [*container]


def changed_keys(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> list[Any]:
    """Returns the keys whose values differ, or that only one of both has."""
    missing = object()
    keys = dict.fromkeys([*before, *now])
    return [key for key in keys if not are_same(now.get(key, missing), before.get(key, missing))]


def _flags() -> list[Any]:
    return [flag() for flag in _FLAGS]
