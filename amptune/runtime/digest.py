"""The digest that identifies a model; a policy's `valid_for` carries it under `model`."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["model_digest"]


def model_digest(model: nn.Module) -> str:
    """Returns `sha256:…` of the module tree (paths and class names) and of the shapes of parameters and buffers.

    A policy, the device, the dtype and the memory format do not change the digest. Buffers that are not saved are
    left out: they are caches, and change size while a model runs.
    """
    text = "\n".join(_lines(model))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _lines(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules():
        yield f"module {path} {type(module).__name__}"
        for name, parameter in module.named_parameters(recurse=False):
            yield f"parameter {path} {name} {_shape(parameter)}"
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield f"buffer {path} {name} {_shape(buffer)}"


def _shape(tensor: nn.parameter.Parameter | nn.parameter.Buffer) -> str:
    return "lazy" if nn.parameter.is_lazy(tensor) else "x".join(str(size) for size in tensor.shape)
