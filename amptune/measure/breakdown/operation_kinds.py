"""Classifies operations by the names and arguments that the profiler records, and GPU kernels by their names.

Names of kernels change with library versions; unknown names count as `other`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import cache
from typing import Literal

import torch

from amptune.changes.tensor_tree import HALF_DTYPES
from amptune.measure.breakdown.step_trace import Op
from amptune.measure.results.step_profile import ALIGNED

__all__ = [
    "bytes_cast",
    "channels_of",
    "in_half",
    "is_cast",
    "is_convolution",
    "is_matmul",
    "is_product",
    "kind_of_kernel",
    "kind_of_operation",
    "unaligned_dims",
]

_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn,
    "c10::Float8_e5m2": torch.float8_e5m2,
}
# Position of `input` among the arguments (PyTorch's native_functions.yaml).
_CONVOLUTIONS = {"aten::convolution": 0, "aten::convolution_backward": 1}
# Position of the left matrix among the arguments.
_MATMULS = {"aten::mm": 0, "aten::addmm": 1, "aten::_addmm_activation": 1, "aten::bmm": 0, "aten::baddbmm": 1}
_PRODUCTS = re.compile(
    r"aten::(convolution|_?convolution_\w+|cudnn_convolution\w*|mkldnn_convolution\w*|\w*addmm\w*|mm|bmm|baddbmm|addmv|mv|"
    r"\w*scaled_dot_product\w*|\w*_rnn\w*|mkldnn_linear\w*)$"
)
_VARIANT = re.compile(r"^aten::_?(?:native_|cudnn_|miopen_|mkldnn_)?|(?:_with_indices)?(?:_backward)?(?:_data)?_?$")


def is_cast(op: Op) -> bool:
    """Returns True if it copies more than one number to another floating-point type, as every `.to` does."""
    if op.name != "aten::copy_" or len(op.types) < 2:
        return False
    to, of = op.types[:2]
    return to != of and to in _DTYPES and of in _DTYPES and math.prod(op.shapes[0]) > 1


def bytes_cast(cast: Op) -> int:
    """Returns the bytes that the cast reads and writes."""
    return math.prod(cast.shapes[0]) * sum(_DTYPES[type_].itemsize for type_ in cast.types[:2])


def is_convolution(op: Op) -> bool:
    return op.name in _CONVOLUTIONS


def is_matmul(op: Op) -> bool:
    return op.name in _MATMULS


def is_product(op: Op) -> bool:
    """Returns True for a matrix product, a convolution, or an operation made of them (attention, recurrent layers)."""
    return _PRODUCTS.match(op.name) is not None


def in_half(nested: Iterable[Op]) -> bool | None:
    """Returns True if the products among nested operations have an input in half; None without recorded types.

    The outermost may be recorded before autocast casts its inputs.
    """
    dtypes = {_DTYPES[kind] for op in nested if is_product(op) for kind in op.types if kind in _DTYPES}
    return not dtypes.isdisjoint(HALF_DTYPES) if dtypes else None


def channels_of(convolution: Op) -> int | None:
    """Returns the number of input channels; None if the profiler did not record it."""
    at, shapes = _CONVOLUTIONS[convolution.name], convolution.shapes
    return shapes[at][1] if len(shapes) > at and len(shapes[at]) > 1 else None


def unaligned_dims(op: Op) -> tuple[int, int, int] | None:
    """Returns (m, n, k) of a half-precision matrix product if one of them is not `ALIGNED`, otherwise None."""
    at = _MATMULS.get(op.name)
    if at is None or len(op.shapes) < at + 2 or _DTYPES.get(op.types[at]) not in HALF_DTYPES:
        return None
    left, right = op.shapes[at : at + 2]
    m, n, k = left[-2], right[-1], left[-1]
    return (m, n, k) if any(size % ALIGNED for size in (m, n, k)) else None


def kind_of_operation(op: Op) -> str:
    """Returns the name without variants, as the user knows it: `batch_norm` for `aten::native_batch_norm_backward`."""
    return _VARIANT.sub("", op.name) if op.name.startswith("aten::") else op.name


KernelKind = Literal["layout", "tensor-core", "plain", "other"]

# cuDNN's conversions between NCHW and NHWC, and the padding of channels that goes with them.
_LAYOUT = re.compile(
    r"nchwto\w*nhwc|nhwcto\w*nchw|nchw2nhwc|nhwc2nchw|convert_?tensor|tensortransform|addpadding|"
    r"transpose_readwrite|kcrstorsck|nchwtonchw",
    re.IGNORECASE,
)
# The shape of a tensor-core instruction (s16816 is m16n8k16 into FP32), its name, or a type only tensor cores compute.
_TENSOR_CORE = re.compile(
    r"[shi]_?(?:884|1688|16816|16832|161616)|tensorop|tensor\d+x\d+x\d+|[hiw]g?mma|gmma|nvjet|"
    r"xmma\w*(?:bf16|f16|tf32)|cutlass\w*(?:bf16|f16|tf32)|flash|fmha|sdpa",
    re.IGNORECASE,
)
# Products without tensor cores. `xmma` is NVIDIA's name for a kernel generator, not for a unit.
_PLAIN = re.compile(
    r"simt|ffma|sgemm|gemv|gemmsn|gemmk1|grouped_direct|depthwise|convolve|winograd|fft|xmma|"
    r"[dw]grad\w*engine|dgrad2d|wgrad2d|conv2d|conv3d|dot_kernel|gemm",
    re.IGNORECASE,
)


@cache
def kind_of_kernel(name: str) -> KernelKind:
    """Returns the kind; `plain` is a matrix product or convolution without tensor cores, `other` is anything else."""
    if _LAYOUT.search(name):
        return "layout"
    if "init_device_workspace" in name:  # named after the product it prepares
        return "other"
    if "simt" in name or "ffma" in name:  # cutlass names both the type and the unit
        return "plain"
    if _TENSOR_CORE.search(name):
        return "tensor-core"
    return "plain" if _PLAIN.search(name) else "other"
