"""Figures of one operation, from the shapes of what it takes and gives."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from amptune.changes.tensor_tree import HALF_DTYPES
from amptune.predict.operation import Operation

__all__ = ["figures_of"]

_ALIGNED = 8  # tensor cores take 16 bytes at a time
_TILE = 64  # rows and columns of a product that a tensor core's kernel computes at a time, as a rule
# Batch normalization in training reads its input once for the statistics and once more to normalize.
_READ_TWICE = ("native_batch_norm", "native_batch_norm_backward", "_native_batch_norm_legit", "native_group_norm")
_MADE_ON_THE_HOST = ("lift_fresh", "_local_scalar_dense", "empty", "new_empty", "empty_like", "empty_strided")


def figures_of(
    func: Any, args: tuple[Any, ...], found: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
) -> Operation | None:
    """Returns an operation's figures; None if it launches no kernel, such as a view."""
    name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
    if not outputs or name in _MADE_ON_THE_HOST or func.namespace != "aten" or _is_view(func, inputs, outputs):
        return None
    moved = float(sum(map(_size, inputs)) + sum(map(_size, outputs)))
    half = any(one.dtype in HALF_DTYPES for one in (*inputs, *outputs))
    if name in ("_to_copy", "copy_") and inputs[-1].dtype != outputs[0].dtype:
        return _operation("cast", 0.0, moved, True)
    if name in ("convolution", "convolution_backward"):
        return _convolution(func, args, found, moved, half)
    if name.startswith("mkldnn_rnn_layer"):
        return _recurrent(name, inputs, moved)
    if name.startswith("_scaled_dot_product"):
        return _attention(name, args, moved, half)
    if func.overloadpacket in flop_registry:
        flops = float(flop_registry[func.overloadpacket](*args, out_val=found))
        rows, columns = outputs[0].shape[-2:]
        odd = max((n for n in (rows, columns, *inputs[-1].shape[-2:-1]) if n % _ALIGNED), default=0)
        return _operation("matmul", flops, moved, half, fill=_fill(rows, columns), odd=odd)
    if name.startswith("embedding") and not name.endswith("backward"):
        moved = 2.0 * _size(outputs[0])
    if name in _READ_TWICE:
        moved += _size(inputs[0])
    return _operation("memory", 0.0, moved, half)


def _operation(kind: str, flops: float, moved: float, half: bool, **more: Any) -> Operation:
    return Operation(kind=kind, module="", flops=flops, bytes=moved, in_half=half, **more)


def _is_view(func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    if func._schema.is_mutable:
        return False
    storages = {one.untyped_storage()._cdata for one in inputs if one.layout == torch.strided}
    return all(one.layout == torch.strided and one.untyped_storage()._cdata in storages for one in outputs)


def _size(tensor: torch.Tensor) -> int:
    """Returns a tensor's bytes; an expanded one has those of its storage."""
    own = tensor.numel() * tensor.element_size()
    return min(own, tensor.untyped_storage().nbytes()) if tensor.layout == torch.strided else own


def _fill(rows: int, columns: int) -> float:
    return math.prod(n / (_TILE * math.ceil(n / _TILE)) for n in (max(rows, 1), max(columns, 1)))


def _convolution(func: Any, args: tuple[Any, ...], found: Any, moved: float, half: bool) -> Operation:
    """A forward pass is one kernel, a backward pass one for each gradient asked for."""
    backward = func.overloadpacket.__name__ == "convolution_backward"
    image, weight = (args[1], args[2]) if backward else (args[0], args[1])
    groups = args[9] if backward else args[8]
    channels, within = weight.shape[0] // groups, weight.shape[1]
    output = args[0] if backward else found
    transposed = args[7] if backward else args[6]
    images = float(_size(image) + _size(output))
    launches = float(sum(args[10][:2])) if backward else 1.0
    pixels = image.shape[0] * math.prod((image if transposed else output).shape[2:])
    flops = 2.0 * launches * pixels * weight.numel()
    kind = "convolution" if groups == 1 else "depthwise" if within == 1 else "grouped"
    fill = _fill(channels, within)
    return _operation(kind, flops, moved, half, fill=fill, layout_bytes=launches * images, launches=launches)


def _recurrent(name: str, inputs: list[torch.Tensor], moved: float) -> Operation:
    """One layer over a sequence of shape (steps, batch, features), with weights (4 hidden, …) for an LSTM.

    Followed in FP32 alone; the recorder says in what precision it is.
    """
    steps, batch = inputs[0].shape[0], inputs[0].shape[1]
    weights = [one for one in inputs[1:] if one.dim() == 2][:2]
    passes = 2 if name.endswith("backward") else 1
    flops = 2.0 * passes * steps * batch * sum(one.numel() for one in weights)
    rows = weights[0].shape[0] if weights else 1
    return _operation("recurrent", flops, moved, False, fill=_fill(batch, rows), launches=2.0 * passes, steps=steps)


def _attention(name: str, args: tuple[Any, ...], moved: float, half: bool) -> Operation:
    """Fused attention: two products of (queries, features, keys) for each head, five in the backward pass."""
    backward = name.endswith("backward")
    query, key = (args[1], args[2]) if backward else (args[0], args[1])
    products = 5 if backward else 2
    flops = 2.0 * products * math.prod(query.shape) * key.shape[-2]
    return _operation("matmul", flops, moved, half)
