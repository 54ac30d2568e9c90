"""Values that describe how training under a policy differs from training in FP32."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import Policy

__all__ = [
    "HARMLESS",
    "ILL_CONDITIONED",
    "MOST_BUFFER_OFF",
    "REPEATED_BATCHES",
    "ROUNDING",
    "THOROUGHNESS",
    "TIMES_BELOW",
    "TIMES_SPREAD",
    "BufferParity",
    "Floats",
    "GradientParity",
    "Gradients",
    "LossCurve",
    "Parity",
    "Reference",
    "Rounding",
    "Run",
    "Spread",
    "Thoroughness",
]

Floats = NDArray[np.float32]

# Source of the spread of FP32 gradients: different batches, or the parts of one batch if all batches are equal.
Spread = Literal["batches", "parts", "none"]

# Precision of a product's inputs: bf16 has 8 bits, fp16 and TF32 have 11.
Rounding = Literal["bf16", "fp16"]
_BITS: Mapping[Rounding, int] = {"bf16": 8, "fp16": 11}
# Relative root mean square of the rounding error with that many bits: at most half a unit in the last place, evenly
# distributed.
ROUNDING: Mapping[Rounding, float] = {kind: 2.0**-bits / math.sqrt(12) for kind, bits in _BITS.items()}

# If rounding the weights alone changes a gradient by this share, a comparison of the gradient tells nothing. An
# example: the first layers of DenseNet-161 at its first step.
ILL_CONDITIONED = 0.1
# An error that is this small beside the whole model's gradient does no harm, as a multiple of the rounding error of one
# number. Parameters whose true gradient is 0, such as a bias before BatchNorm, have errors of up to a fifth of that.
HARMLESS = 0.5
# A loss may lie above FP32's by this many times what FP32's own runs differ by. One below does no harm, unless it is so
# far below that it must be another loss.
TIMES_SPREAD, TIMES_BELOW = 3.0, 10.0
# Number of batches on which FP32's gradients are taken once more, to see what they differ by from themselves.
REPEATED_BATCHES = 2
# A buffer may be this far off, relative to FP32's, whatever FP32's replicas differ by.
MOST_BUFFER_OFF = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoroughness:
    """The amount of training in a judgement: gradients of `batches`, and a loss curve of `epochs` over them.

    `replicas` is the number of extra FP32 curves, each with another data order and seed. They show how much a user's
    runs differ from each other.
    """

    batches: int
    epochs: int
    replicas: int

    @property
    def gradient_steps(self) -> int:
        """Steps in which the reference takes gradients: of each batch, rounded too, and of some batches again."""
        return 2 * self.batches + REPEATED_BATCHES

    @property
    def curve_steps(self) -> int:
        """Steps of a loss curve."""
        return self.batches * self.epochs


# The first entry that fits into the time is used. If the last entry needs more than twice the time, nothing is judged.
THOROUGHNESS = (
    Thoroughness(batches=8, epochs=4, replicas=2),
    Thoroughness(batches=6, epochs=3, replicas=2),
    Thoroughness(batches=4, epochs=3, replicas=2),
    Thoroughness(batches=4, epochs=2, replicas=1),
    Thoroughness(batches=3, epochs=1, replicas=1),
)


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Sketches of the unscaled gradients of several batches from the same weights.

    `sketches` has the shape (batches, columns). `noticeable` (batches, parameters) counts elements that are not tiny
    beside the others of their parameter.
    """

    sketches: Floats
    noticeable: NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """The losses of training from the initial weights over the batches, epoch after epoch.

    `skipped` counts the steps that the loss scaler skipped after its scale had first settled. `scale`, `buffers` (the
    floating-point ones, flat and by name) and `evaluated` (the result of the workload's `evaluate`) are from the end.
    """

    losses: tuple[float, ...]
    skipped: int = 0
    scale: float = 1.0
    buffers: Mapping[str, Floats] = field(default_factory=dict, hash=False)
    evaluated: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """The gradients and the loss curve of training under one policy; `more` are curves in the replicas' data orders."""

    gradients: Gradients
    curve: LossCurve
    more: tuple[LossCurve, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Training in FP32, and how much FP32 runs differ; made once and compared with every candidate.

    `names` are those of the parameters, `columns` holds each one's slice of a sketch. `rounded` holds gradients from
    weights with random changes as large as rounding errors (in the parameters `in_half`, which autocast rounds),
    `repeated` those of the first batches once more. Some roundings and the `replicas` are made when first needed. If
    `after_training`, gradients are taken at the weights that the run's loss curve ends at, because more of them can be
    compared there; another process takes FP32's again, at its own weights. The curve and the replicas have seeds from
    `seed` on. `evaluated_at_start` is the result of `evaluate` before training. `fingerprint` shows if another process
    has the same weights and batches. `all_rounded_because` says why all parameters were rounded, if nobody saw which of
    them autocast rounds.
    """

    policy: Policy
    run: Run
    rounded: Mapping[Rounding, Gradients]
    repeated: Gradients
    replicas: tuple[LossCurve, ...]
    names: tuple[str, ...]
    columns: tuple[slice, ...]
    spread: Spread
    thoroughness: Thoroughness
    fingerprint: tuple[float, ...]
    in_half: tuple[str, ...] = ()
    after_training: bool = False
    seed: int = 0
    evaluated_at_start: float | None = None
    all_rounded_because: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientParity:
    """The gradients of one parameter, `name`, under a policy, compared with FP32.

    All figures are relative to the FP32 gradient. `error` is the root mean square of the difference over batches,
    beyond what FP32 differs by from itself. `bias` is the length of the mean difference over that of the mean gradient.
    The yardsticks are `noise`, the spread of FP32 gradients between batches, and `rounding`, the effect of rounded
    weights in FP32. `size` is the gradient's length, and `slope` the part of FP32's gradient in it (the slope of a
    regression over the same batches); both are 1 if equal to FP32. `vanished` is the share of FP32's nonzero elements
    that are 0 under the policy. `share` is the length of the parameter's FP32 gradient relative to the whole model's.
    """

    name: str
    error: float
    bias: float
    noise: float
    rounding: float
    size: float
    slope: float
    vanished: float
    share: float = 1.0

    @property
    def module(self) -> str:
        """The path of the parameter's module; "" for the model itself."""
        return self.name.rpartition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferParity:
    """A buffer at the end of the loss curve, such as BatchNorm's running statistics.

    `off` is its distance from FP32's buffer, `apart` that of FP32's replicas, both relative to FP32's buffer; a running
    mean's relative to the square root of its running variance.
    """

    path: str
    off: float
    apart: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Training under a policy, compared with training in FP32.

    `drift` is the distance of the loss curve above FP32's, the largest of any epoch, relative to the distance between
    FP32's replicas (at least a floor). `drift_share` is that distance relative to the loss; `below` is the distance
    below FP32's, in the unit of `drift`. If the curve was suspicious, several are trained; where their mean, relative
    to its standard error, is nearer to FP32's, `drift` and `below` are of that. `precision` is the relative rounding
    error of the policy's products. `buffers` are those that training changes. `skipped_share` is the share of steps
    that the loss scaler skipped after it had settled at `scale`. `evaluated`, `evaluated_fp32` and `evaluated_at_start`
    are results of the workload's `evaluate`: of the policy, of FP32, and before training. `losses` is the policy's loss
    curve, `losses_fp32` that of FP32 and of its replicas, if they were needed. `all_rounded_because` is the
    reference's: the effect of rounding, and with it the limits, may then be too large. `again` is a second look, with
    other orders and random numbers, if the first one was near the limits. `own_step` tells that the workload has a step
    of its own and no loss. If training broke, `failure` gives the reason and `broken` the modules whose gradients
    broke; the other fields are then empty.
    """

    gradients: tuple[GradientParity, ...] = ()
    spread: Spread = "batches"
    precision: float = ROUNDING["bf16"]
    drift: float = 0.0
    drift_share: float = 0.0
    below: float = 0.0
    buffers: tuple[BufferParity, ...] = ()
    skipped_share: float = 0.0
    scale: float = 1.0
    evaluated: float | None = None
    evaluated_fp32: float | None = None
    evaluated_at_start: float | None = None
    losses: tuple[float, ...] = ()
    losses_fp32: tuple[tuple[float, ...], ...] = ()
    all_rounded_because: str | None = None
    again: Parity | None = None
    own_step: bool = False
    failure: Failure | None = None
    broken: tuple[str, ...] = ()
    seconds: float = 0.0
