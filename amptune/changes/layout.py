"""Memory formats: of a model's weights and buffers, and of its batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amptune.changes.tensor_tree import map_tensors

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["convert_batch", "convert_model", "convertible", "format_of"]

_TORCH_FORMAT = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}

# The numbers of dimensions that a format is for: (batch, channels, height, width) or (…, depth, height, width).
_DIMENSIONS = {"contiguous": (4, 5), "channels_last": (4,), "channels_last_3d": (5,)}


def convertible(tensor: torch.Tensor, memory_format: str) -> bool:
    """Returns True if the tensor fits the format: strided, with 4 or 5 dimensions, and not expanded.

    A lazy module's weights have no dimensions yet.
    """
    return (
        not nn.parameter.is_lazy(tensor)
        and tensor.dim() in _DIMENSIONS[memory_format]
        and tensor.layout is torch.strided
        and all(stride or size <= 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    )


def format_of(model: nn.Module) -> str:
    """Returns the format that a model's weights are in: contiguous, unless all that show one lie in another."""
    shown = set()
    for weight in model.parameters():
        fitting = [one for one in _DIMENSIONS if convertible(weight, one)]
        found = [one for one in fitting if weight.is_contiguous(memory_format=_TORCH_FORMAT[one])]
        shown |= {*found} if len(found) == 1 else set()
    return shown.pop() if len(shown) == 1 else "contiguous"


def convert_batch(batch: Any, memory_format: str) -> Any:
    """Returns the batch with its images (or volumes) in the format, at any depth; all else is unchanged."""
    return map_tensors(lambda tensor: _converted(tensor, memory_format), batch)


def convert_model(model: nn.Module, memory_format: str) -> Callable[[], None]:
    """Converts weights and buffers in place, and returns a function that restores their strides exactly.

    The tensors keep their identity, so an optimizer that was built before still holds them.
    """
    before = [
        _Strides(module=module, name=name, shape=tensor.shape, strides=tensor.stride())
        for module, name, tensor in _state(model)
        if convertible(tensor, memory_format)
    ]
    try:
        for was in before:
            if (tensor := was.tensor()) is not None:
                tensor.data = _converted(tensor.data, memory_format)
    except BaseException:  # most likely out of memory: a partly converted model is of no use
        _restore(before)
        raise
    return lambda: _restore(before)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strides:
    """The memory layout of a tensor, held by name, as moving a model to a device replaces its buffers."""

    module: nn.Module
    name: str
    shape: torch.Size
    strides: Sequence[int]

    def tensor(self) -> torch.Tensor | None:
        """Returns the tensor that has the name now."""
        tables = (self.module._parameters, self.module._buffers)
        return next((table[self.name] for table in tables if self.name in table), None)  # TorchScript's have no `get`


def _state(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                yield module, name, tensor


def _converted(tensor: torch.Tensor, memory_format: str) -> torch.Tensor:
    """Uses `to`, which changes the strides even if both formats fit (one channel); `contiguous` would not.

    https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
    """
    if not convertible(tensor, memory_format):
        return tensor
    return tensor.to(memory_format=_TORCH_FORMAT[memory_format])


@torch.no_grad()
def _restore(before: Sequence[_Strides]) -> None:
    for was in before:
        tensor = was.tensor()
        if tensor is None or tensor.shape != was.shape or tensor.stride() == was.strides:
            continue  # replaced since, or already restored through another module that shares it
        restored = torch.empty_strided(was.shape, was.strides, dtype=tensor.dtype, device=tensor.device)
        tensor.data = restored.copy_(tensor.data)
