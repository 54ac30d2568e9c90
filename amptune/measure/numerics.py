"""How training under a policy differs from training in FP32, as values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from amptune.measure.outcome import Failure
from amptune.policy.settings import Policy

__all__ = [
    "ROUNDING",
    "BufferParity",
    "Floats",
    "Gradients",
    "LossCurve",
    "ModuleParity",
    "Parity",
    "Reference",
    "Rounding",
    "Run",
    "Spread",
    "Thoroughness",
]

Floats = NDArray[np.float32]

# What gives FP32 gradients their spread: different batches, or where those are all alike the parts of one.
Spread = Literal["batches", "parts", "none"]

# How precisely a product's inputs are held: bf16 has 8 bits, fp16 and TF32 have 11.
Rounding = Literal["bf16", "fp16"]
# The root mean square, relative, of what rounding to that many bits changes: half a unit in the last place at the
# most, evenly distributed.
ROUNDING: Mapping[Rounding, float] = {"bf16": 2**-8 / math.sqrt(12), "fp16": 2**-11 / math.sqrt(12)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Thoroughness:
    """How much training a judgement looks at: gradients of `batches`, a loss curve of `epochs` over them.

    `replicas` is how many FP32 curves with another order of the data and another seed say what a user's runs
    differ by.
    """

    batches: int = 8
    epochs: int = 4
    replicas: int = 2

    @property
    def reference_steps(self) -> int:
        """Training steps that the reference takes: gradients, a few of them four times, and its loss curves."""
        return self.batches * (1 + self.epochs * (1 + self.replicas)) + 6


@dataclass(frozen=True, kw_only=True)
class Gradients:
    """Sketches of the gradients of several batches from the initial weights, unscaled.

    `sketches` is (batches, columns), `nonzero` (batches, parameters) counts of elements that are not 0.
    """

    sketches: Floats
    nonzero: NDArray[np.int64]
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCurve:
    """The losses of training from the initial weights over the batches, epoch after epoch.

    `skipped` counts the steps that the loss scaler skipped, those aside in which its scale came down to where it
    stays; `scale` is the loss scale at the end. `buffers` are the floating-point buffers at the end, flat and by
    name, and `evaluated` is what the workload's `evaluate` said then.
    """

    losses: tuple[float, ...]
    skipped: int = 0
    scale: float = 1.0
    buffers: Mapping[str, Floats] = field(default_factory=dict, hash=False)
    evaluated: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """Training under one policy."""

    gradients: Gradients
    curve: LossCurve


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Training in FP32, and how far FP32 is from itself; made once, and every candidate is held against it.

    `columns` are each parameter's in a sketch and `module_of` the path of its module. `rounded` are gradients from
    weights changed at random by what rounding them would change, `reseeded` those under another seed than the
    run's; both are of the first batches. `fingerprint` tells whether another process has the same weights and batches.
    """

    policy: Policy
    run: Run
    rounded: Mapping[Rounding, Gradients]
    reseeded: Gradients
    replicas: tuple[LossCurve, ...]
    columns: tuple[slice, ...]
    module_of: tuple[str, ...]
    spread: Spread
    thoroughness: Thoroughness
    fingerprint: tuple[float, ...]
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleParity:
    """One module's gradients under a policy beside those in FP32, over all its parameters.

    All are relative to the FP32 gradient. `error` is the root mean square of the difference over batches, beyond
    what another seed changes; `bias` the length of the mean difference over that of the mean gradient. Their
    yardsticks: `noise` is the spread of FP32 gradients between batches, `rounding` what rounding the weights
    changes in FP32. `size` is that of the gradient itself, 1 as in FP32, and `slope` how much of FP32's gradient is in
    it (the slope of a regression, over the same batches), 1 too; `vanished` is the share of its elements that are 0
    and are not in FP32. `share` is the length of the FP32 gradient relative to that of the whole model's.
    """

    path: str
    error: float
    bias: float
    noise: float
    rounding: float
    size: float
    slope: float
    vanished: float
    share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferParity:
    """A buffer at the end of the loss curve, such as BatchNorm's running statistics: its distance from FP32's, and that
    of FP32's own replicas, both relative to FP32's.
    """

    path: str
    off: float
    apart: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Training under a policy beside training in FP32.

    `drift` is how far the loss curve is above FP32's, the largest of any epoch, relative to how far FP32's own
    replicas are apart (or to a floor, where those hardly are); `drift_share` the same relative to the loss, and
    `below` how far it is below, as `drift`. `buffers` are those that training changes.
    `skipped_share` is the share of steps that the loss scaler skipped once it had settled at `scale`. `evaluated`
    and `evaluated_fp32` are what the workload's `evaluate` said. `failure` says what broke, and `broken` which
    modules' gradients; the rest is then empty.
    """

    modules: tuple[ModuleParity, ...] = ()
    spread: Spread = "batches"
    drift: float = 0.0
    drift_share: float = 0.0
    below: float = 0.0
    buffers: tuple[BufferParity, ...] = ()
    skipped_share: float = 0.0
    scale: float = 1.0
    evaluated: float | None = None
    evaluated_fp32: float | None = None
    failure: Failure | None = None
    broken: tuple[str, ...] = ()
    seconds: float = 0.0
