"""Classification of operations by the names and arguments that the profiler records."""

from __future__ import annotations

import math
import re

from amptune.measure.step_trace import Op

__all__ = [
    "bytes_cast",
    "groups_and_channels",
    "is_cast",
    "is_convolution",
    "is_matmul",
    "is_product",
    "kind_of_operation",
    "unaligned_dims",
]

_BYTES = {"float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1}
_HALF = {"c10::Half", "c10::BFloat16"}
# Positions of `input` and `groups` among the arguments (PyTorch's native_functions.yaml).
_CONVOLUTIONS = {"aten::convolution": (0, 8), "aten::convolution_backward": (1, 9)}
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
    return to != of and to in _BYTES and of in _BYTES and math.prod(op.shapes[0]) > 1


def bytes_cast(cast: Op) -> int:
    """Returns the bytes that the cast reads and writes."""
    return math.prod(cast.shapes[0]) * sum(_BYTES[type_] for type_ in cast.types[:2])


def is_convolution(op: Op) -> bool:
    return op.name in _CONVOLUTIONS


def is_matmul(op: Op) -> bool:
    return op.name in _MATMULS


def is_product(op: Op) -> bool:
    """Returns True for a matrix product, a convolution, or an operation made of them (attention, recurrent layers)."""
    return _PRODUCTS.match(op.name) is not None


def groups_and_channels(convolution: Op) -> tuple[int, int]:
    """Returns (groups, input channels)."""
    input_at, groups_at = _CONVOLUTIONS[convolution.name]
    values, shapes = convolution.values, convolution.shapes
    groups = int(values[groups_at]) if len(values) > groups_at and values[groups_at].isdigit() else 1
    known = len(shapes) > input_at and len(shapes[input_at]) > 1
    return groups, shapes[input_at][1] if known else groups


def unaligned_dims(op: Op) -> tuple[int, int, int] | None:
    """Returns (m, n, k) of a half-precision matrix product if one of them is not a multiple of 8, otherwise None."""
    at = _MATMULS.get(op.name)
    if at is None or len(op.shapes) < at + 2 or op.types[at] not in _HALF:
        return None
    left, right = op.shapes[at : at + 2]
    m, n, k = left[-2], right[-1], left[-1]
    return (m, n, k) if m % 8 or n % 8 or k % 8 else None


def kind_of_operation(op: Op) -> str:
    """Returns the name without variants, as the user knows it: `batch_norm` for `aten::native_batch_norm_backward`."""
    return _VARIANT.sub("", op.name) if op.name.startswith("aten::") else op.name
