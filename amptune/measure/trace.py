"""Where numbers go wrong inside one training step: module by module, under a policy beside FP32. Values and sums."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ModuleTrace", "Reach", "suspects"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What passed at one place: the largest magnitude under the policy and in FP32, and how far the two are apart.

    `error` is the relative root mean square of the difference, infinite where the policy's is not finite and FP32's
    is. `largest` is infinite or NaN where that occurred.
    """

    largest: float
    largest_fp32: float
    error: float

    @property
    def broken(self) -> bool:
        """Not finite, where FP32's is."""
        return not math.isfinite(self.largest) and math.isfinite(self.largest_fp32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTrace:
    """One module in one step: its inputs and outputs, the gradients that came to its outputs and left by its inputs.

    A place is None where no floating-point tensor (or no gradient) passed; `weights` is its own parameters'
    gradients. Traces are in the order in which the first forward calls ended.
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
        """The numbers that come in are finite, those that go out are not."""
        return self.outputs is not None and self.outputs.broken and not (self.inputs is not None and self.inputs.broken)

    @property
    def breaks_backward(self) -> bool:
        """What comes in, forward and backward, is finite; gradients that go out or to the weights are not."""
        comes = [reach for reach in (self.inputs, self.gradients_in) if reach is not None]
        leaves = [reach for reach in (self.gradients_out, self.weights) if reach is not None]
        return not any(reach.broken for reach in comes) and any(reach.broken for reach in leaves)

    @property
    def adds(self) -> float:
        """How many times as large the module makes the relative error, forward or backward, the larger of both."""
        return max(
            _added(self.outputs, self.inputs),
            _added(self.gradients_out, self.inputs, self.gradients_in),
            _added(self.weights, self.inputs, self.gradients_in),
        )


def suspects(traces: Sequence[ModuleTrace]) -> list[str]:
    """The paths of all modules, the most suspicious first.

    What breaks the forward pass comes before all else, in the order of the pass, then what breaks the backward one,
    the last module first; then what adds most to the error.
    """
    forward = [trace for trace in traces if trace.breaks_forward]
    backward = [trace for trace in reversed(traces) if trace.breaks_backward]
    others = sorted(traces, key=lambda trace: -trace.adds)
    return list(dict.fromkeys(trace.path for trace in (*forward, *backward, *others) if trace.path))


# An error smaller than this is rounding, and no module is to blame for what becomes of it relative to nothing.
ROUNDING = 0.01
# What stands for the error of a number that is not finite, so that it can be written down.
BROKEN = 1e4


def _added(after: Reach | None, *before: Reach | None) -> float:
    if after is None:
        return 0.0
    came = min(BROKEN, max(reach.error if reach is not None else 0.0 for reach in before))
    return max(0.0, min(after.error, BROKEN) - came) / (came + ROUNDING)
