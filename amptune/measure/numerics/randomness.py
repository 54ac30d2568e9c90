"""Randomness of the user's model and loss, made the same in runs that are compared.

Kernels of different dtypes draw different numbers from one seed. So there is no dropout while gradients are compared,
and other numbers are drawn in FP32 and then converted. Generators that are the user's own are seeded like the global
ones.
"""

from __future__ import annotations

import gc
import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from amptune.changes.tensor_tree import HALF_DTYPES
from amptune.workload.user_errors import is_the_users

__all__ = ["DrawingInFp32", "OwnGenerators", "without_dropout"]

# Attributes that hold a probability: of nn.Dropout and its variants, and of recurrent layers and nn.MultiheadAttention,
# which pass theirs to functions that a TorchFunctionMode cannot see into.
_ATTRIBUTES = ("p", "dropout")
# Functions without "dropout" in their name, and the position of its probability among their arguments.
_POSITIONS = {torch.nn.functional.scaled_dot_product_attention: 4, torch.nn.functional.multi_head_attention_forward: 10}


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Turns off all dropout of the model, in modules and functions; restores the modules at the end."""
    changed = list(_probabilities(model))
    for module, name, _ in changed:
        setattr(module, name, 0.0)
    try:
        with _NoDropout():
            yield
    finally:
        for module, name, probability in changed:
            setattr(module, name, probability)


def _probabilities(model: nn.Module) -> Iterator[tuple[nn.Module, str, float]]:
    for module in model.modules():
        for name in _ATTRIBUTES:
            value = vars(module).get(name)
            if isinstance(value, float) and 0 < value < 1 and (name == "dropout" or "Dropout" in type(module).__name__):
                yield module, name, value


class _NoDropout(TorchFunctionMode):
    """A mode that calls dropout functions with a probability of 0."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if "dropout" not in name and func not in _POSITIONS and not (kwargs and "dropout_p" in kwargs):
            return func(*args, **(kwargs or {}))  # a step has thousands of these
        kwargs = dict(kwargs or {})
        place = 1 if "dropout" in name else _POSITIONS.get(func)
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        elif "dropout" in name and "p" in kwargs:
            kwargs["p"] = 0.0
        elif place is not None and len(args) > place and isinstance(args[place], float):
            args = (*args[:place], 0.0, *args[place + 1 :])
        return func(*args, **kwargs)


_NEW = (torch.rand, torch.randn, torch.rand_like, torch.randn_like)
_IN_PLACE = {
    getattr(torch.Tensor, name)
    for name in ("normal_", "uniform_", "exponential_", "bernoulli_", "cauchy_", "log_normal_", "geometric_")
}
_DRAWS = {*_NEW, *_IN_PLACE, torch.bernoulli}


class DrawingInFp32(TorchFunctionMode):
    """A mode that draws random numbers of half precision in FP32: they are those of FP32 from the same seed.

    `has_drawn` says whether anything was drawn.
    """

    has_drawn = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _DRAWS:
            return func(*args, **(kwargs or {}))
        self.has_drawn = True
        kwargs = dict(kwargs or {})
        given = args[0] if args and isinstance(args[0], torch.Tensor) else None
        dtype = kwargs.get("dtype") or (torch.get_default_dtype() if given is None else given.dtype)
        if dtype in HALF_DTYPES and func in _NEW and "out" not in kwargs:
            return func(*args, **{**kwargs, "dtype": torch.float32}).to(dtype)
        if dtype in HALF_DTYPES and given is not None and func is torch.bernoulli and "out" not in kwargs:
            return func(given.float(), *args[1:], **kwargs).to(dtype)
        if dtype in HALF_DTYPES and given is not None and func in _IN_PLACE:
            return given.copy_(func(torch.empty_like(given, dtype=torch.float32), *args[1:], **kwargs))
        return func(*args, **kwargs)


# Objects looked at for generators, the nearest first.
MOST_OBJECTS = 100_000


class OwnGenerators:
    """The random generators, besides the global ones, that objects of the user's hold: models, closures, modules."""

    def __init__(self, *holders: Any) -> None:
        kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
        self._found: list[Any] = []
        seen: dict[int, Any] = {}
        waiting = deque(holders)
        while waiting and len(seen) < MOST_OBJECTS:
            one = waiting.popleft()
            if id(one) not in seen and _may_hold(one):
                seen[id(one)] = one
                waiting += gc.get_referents(one)
            elif id(one) not in seen and type(one) in kinds:
                seen[id(one)] = one
                self._found.append(one)

    def seed(self, seed: int) -> None:
        """Seeds each of them alike in every process."""
        for one in self._found:
            if isinstance(one, torch.Generator):
                one.manual_seed(seed)
            elif isinstance(one, np.random.Generator):
                one.bit_generator.state = type(one.bit_generator)(seed).state
            else:
                one.seed(seed)


def _may_hold(one: Any) -> bool:
    """Returns True for what may lead to a generator of the user's: no library, and no data."""
    if isinstance(one, FunctionType):
        return one.__code__.co_filename.startswith("<") or is_the_users(one.__code__.co_filename)
    if isinstance(one, type | ModuleType):
        module = one if isinstance(one, ModuleType) else sys.modules.get(one.__module__)
        file = None if module is None else vars(module).get("__file__")  # a lazy module's attributes import it
        return file is not None and is_the_users(file)
    data = isinstance(one, torch.Tensor | np.ndarray | torch.Generator | np.random.Generator | np.random.RandomState)
    return not data and not isinstance(one, random.Random) and (isinstance(one, dict) or gc.is_tracked(one))
