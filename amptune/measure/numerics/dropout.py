"""Training without dropout, to compare gradients: kernels of different dtypes draw different masks from one seed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

__all__ = ["without_dropout"]

# Attributes that hold a probability: of nn.Dropout and its variants, and of recurrent layers and nn.MultiheadAttention,
# which pass theirs to functions that a TorchFunctionMode cannot see into.
_ATTRIBUTES = ("p", "dropout")
# Functions without "dropout" in their name, and the position of its probability among their arguments.
_PLACES = {torch.nn.functional.scaled_dot_product_attention: 4, torch.nn.functional.multi_head_attention_forward: 10}


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
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        place = 1 if "dropout" in name else _PLACES.get(func)
        if "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        elif "dropout" in name and "p" in kwargs:
            kwargs["p"] = 0.0
        elif place is not None and len(args) > place and isinstance(args[place], float):
            args = (*args[:place], 0.0, *args[place + 1 :])
        return func(*args, **kwargs)
