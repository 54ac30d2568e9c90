"""The switches of a whole process that a policy sets: FP32 math, cudnn.benchmark, autocast of compiled backwards.

Each function here sets one and returns what puts it back.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from amptune.policy.settings import Fp32Math

__all__ = ["Fp32MathState", "fp32_math_state", "set_compiled_backward", "set_cudnn_benchmark", "set_fp32_math"]

Undo = Callable[[], None] if TYPE_CHECKING else None
Precision = Literal["none", "ieee", "tf32", "bf16"]

# PyTorch keeps FP32 math twice, since 2.9: as older switches, and as a tree of fp32_precision settings in which
# "none" follows the parent (docs: notes/cuda.html#tensorfloat-32-tf32-on-ampere-and-later-devices). Reading an
# older switch raises when the two disagree, which torch.compile's cache does.
_PARENTS = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
_LEAVES = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"))

# (matmul, convolutions and RNNs). PyTorch's own default is TF32 for cuDNN and IEEE for matrix products.
_WANTED: dict[Fp32Math, tuple[Precision, Precision]] = {
    "stock": ("ieee", "tf32"),
    "ieee": ("ieee", "ieee"),
    "tf32": ("tf32", "tf32"),
}
