"""What half precision does to each module by itself: to its time, and to its numbers. Values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Half", "InHalf", "ModuleSensitivity", "Sensitivity", "Stream"]

Half = Literal["bf16", "fp16"]

# What autocast makes of a module's output: half whatever came in (a matrix product), what came in (a ReLU), or FP32
# whatever came in (a LayerNorm on CUDA).
Stream = Literal["half", "follows", "fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InHalf:
    """One module run in half precision alone, all others in FP32.

    `ms` is its forward and backward time with half inputs, its weights' casts included. `loss_effect` is what its
    rounding changes the loss by, to first order: the root of the sum of (gradient x change of output) squared.
    `gradient_error` and `gradient_cosine` compare its weights' gradients (its inputs', where it has none) with those
    in FP32; they are infinite and 0 where those break in half. `overflow` is the share of outputs and of gradients,
    scaled by the initial loss scale, that the dtype cannot hold, `underflow` that of the gradients that become 0.
    """

    ms: float | None
    loss_effect: float
    gradient_error: float
    gradient_cosine: float
    overflow: float
    underflow: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSensitivity:
    """One module without children, over all its calls in one step.

    `fp32_ms` is its forward and backward time in FP32. `input_bytes` and `output_bytes` are those of its
    floating-point tensors in FP32, `cast_bytes` what autocast reads and writes to cast its weights. Largest
    magnitudes are those in FP32. `producers` are the paths of the modules whose outputs it takes as they are.
    """

    path: str
    calls: int
    fp32_ms: float | None
    half: Mapping[Half, InHalf] = field(hash=False)
    stream: Stream
    input_bytes: int
    output_bytes: int
    cast_bytes: int
    activation_max: float
    weight_max: float
    gradient_max: float
    producers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The modules in the order of their first calls. `left_out` names those that could not be looked at, and why.

    `cast_ms_per_byte` is what a cast takes for every byte it reads or writes, `step_ms` a whole step in FP32.
    """

    modules: tuple[ModuleSensitivity, ...]
    left_out: Mapping[str, str] = field(hash=False)
    cast_ms_per_byte: float
    step_ms: float
    seconds: float
