"""Classification of GPU kernels by name. Names change with library versions; unknown names count as `other`."""

from __future__ import annotations

import re
from functools import cache
from typing import Literal

__all__ = ["KernelKind", "kind_of_kernel"]

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
