"""The effects of half precision on each module: alone, on its time; and within one training step, on its numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["Half", "Island", "ModuleSensitivity", "ModuleTrace", "Reach", "Sensitivity", "Stream", "suspects"]

Half = Literal["bf16", "fp16"]

# Dtype of a module's output under autocast: always half (a matrix product), that of the input (a ReLU), or always FP32
# (a LayerNorm on CUDA).
Stream = Literal["half", "follows", "fp32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSensitivity:
    """One module without children, over all its calls in one step.

    `fp32_ms` is its forward and backward time in FP32, `half_ms` that with half inputs, including the casts of its
    weights. `input_bytes` and `output_bytes` are the sizes of its floating-point tensors in FP32. `producers` are
    the paths of modules whose outputs are its inputs.
    """

    path: str
    calls: int
    fp32_ms: float | None
    half_ms: Mapping[Half, float | None] = field(hash=False)
    stream: Stream
    input_bytes: int
    output_bytes: int
    producers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Island:
    """FP32 matrix products and convolutions under autocast that one place in the code causes, forward and backward."""

    module: str | None
    """Path of the innermost module that called them; "" is the model itself, None is code outside it."""
    where: str
    """`file:line` of the innermost code outside PyTorch that called them; "" if unknown."""
    ms: float
    """Their time in one step with stock PyTorch's FP32 math."""
    tf32_ms: float | None
    """Their time in TF32; None if the device has none."""
    share: float
    """`ms` as a share of an eager step under autocast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivity:
    """The modules that could be measured, in the order of their first calls.

    `cast_ms_per_byte` is a cast's time per byte read or written. `islands` come with the longest time first.
    """

    modules: tuple[ModuleSensitivity, ...]
    cast_ms_per_byte: float
    islands: tuple[Island, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The numbers at one place: the largest magnitude under the policy and in FP32, and the error between them.

    `error` is the relative root mean square of the difference, infinite if the policy's numbers are not finite where
    FP32's are. `largest` is infinite or NaN if such a number occurred.
    """

    largest: float
    largest_fp32: float
    error: float

    @property
    def broken(self) -> bool:
        """True if the policy's largest magnitude is not finite but FP32's is."""
        return not math.isfinite(self.largest) and math.isfinite(self.largest_fp32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTrace:
    """One module in one step: its inputs and outputs, and their gradients.

    `gradients_in` are the gradients of its outputs, `gradients_out` those of its inputs, `weights` those of its own
    parameters. A place is None without a floating-point tensor (or gradient). Traces are ordered by the end of the
    first forward calls.
    """

    path: str
    type: str
    inputs: Reach | None
    outputs: Reach | None
    gradients_in: Reach | None
    gradients_out: Reach | None
    weights: Reach | None

    @property
    def breaks_forward(self) -> bool:
        """True if the inputs are finite and the outputs are not."""
        return self.outputs is not None and self.outputs.broken and not (self.inputs is not None and self.inputs.broken)

    @property
    def breaks_backward(self) -> bool:
        """True if inputs and incoming gradients are finite but the gradients of inputs or weights are not."""
        comes = [reach for reach in (self.inputs, self.gradients_in) if reach is not None]
        leaves = [reach for reach in (self.gradients_out, self.weights) if reach is not None]
        return not any(reach.broken for reach in comes) and any(reach.broken for reach in leaves)

    @property
    def adds(self) -> float:
        """Error added by the module, relative to the incoming error: the largest of forward and backward."""
        return max(
            _added(self.outputs, self.inputs),
            _added(self.gradients_out, self.inputs, self.gradients_in),
            _added(self.weights, self.inputs, self.gradients_in),
        )


def suspects(traces: Sequence[ModuleTrace]) -> list[str]:
    """Returns the paths of all modules, the most suspicious first.

    First come the modules that break the forward pass, in forward order. Then come those that break the backward pass,
    the last module first. The others follow by how much error they add.
    """
    forward = [trace for trace in traces if trace.breaks_forward]
    backward = [trace for trace in reversed(traces) if trace.breaks_backward]
    others = sorted(traces, key=lambda trace: -trace.adds)
    return list(dict.fromkeys(trace.path for trace in (*forward, *backward, *others) if trace.path))


# An error smaller than this is rounding; without this floor, growth from almost 0 would look large.
LEAST_ERROR = 0.01
# Finite value used for the error of a number that is not finite, so that it can be written down.
BROKEN = 1e4


def _added(after: Reach | None, *before: Reach | None) -> float:
    if after is None:
        return 0.0
    came = min(BROKEN, max(reach.error if reach is not None else 0.0 for reach in before))
    return max(0.0, min(after.error, BROKEN) - came) / (came + LEAST_ERROR)
