"""Effects of half precision on each module alone, on its time and on its numbers, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Half", "InHalf", "ModuleSensitivity", "Sensitivity", "Stream"]

Half = Literal["bf16", "fp16"]

# Dtype of a module's output under autocast: always half (a matrix product), that of the input (a ReLU), or always FP32
# (a LayerNorm on CUDA).
Stream = Literal["half", "follows", "fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class InHalf:
    """One module in half precision, with all others in FP32.

    `ms` is its forward and backward time with half inputs, including the casts of its weights. `loss_effect` is the
    change of the loss by its rounding, to first order: the root of the sum of (gradient x change of output) squared.
    `gradient_error` and `gradient_cosine` compare its weights' gradients (its inputs' if it has no weights) with those
    in FP32; they are infinite and 0 if the gradients break in half. `overflow` is the share of outputs and of
    gradients (times the initial loss scale) that the dtype cannot hold, `underflow` that of gradients that become 0.
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

    `fp32_ms` is its forward and backward time in FP32. `input_bytes` and `output_bytes` are the sizes of its
    floating-point tensors in FP32. `cast_bytes` are the bytes that autocast reads and writes to cast its weights. The
    `_max` fields are the largest magnitudes in FP32. `producers` are the paths of modules whose outputs are its inputs.
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
    """The modules in the order of their first calls. `left_out` maps modules that could not be measured to the reason.

    `cast_ms_per_byte` is a cast's time per byte read or written, `step_ms` the time of a whole step in FP32.
    """

    modules: tuple[ModuleSensitivity, ...]
    left_out: Mapping[str, str] = field(hash=False)
    cast_ms_per_byte: float
    step_ms: float
    seconds: float
