"""How training under a policy differs from training in FP32, as values; the sums behind them are pure.

Gradients are compared in a sketch: of every parameter's gradient a fixed number of sums of its elements under
random signs. A sketch is linear, so the sketch of a difference is the difference of sketches, and it keeps inner
products, and so lengths, up to a relative sqrt(2 / columns) (Charikar, Chen, Farach-Colton 2002, "Finding frequent
items in data streams"; the sketch of AMS, Alon, Matias, Szegedy 1996).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from amptune.measure.outcome import Failure
from amptune.policy.settings import Policy

__all__ = [
    "ROUNDING",
    "Gradients",
    "LossCurve",
    "ModuleParity",
    "Parity",
    "Reference",
    "Rounding",
    "Run",
    "Spread",
    "Thoroughness",
    "compare",
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

    @property
    def steps(self) -> int:
        """Training steps that a judgement takes."""
        return self.batches * (1 + self.epochs)


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
    stays; `scale` is the loss scale at the end. `evaluated` is what the workload's `evaluate` said then.
    """

    losses: tuple[float, ...]
    skipped: int = 0
    scale: float = 1.0
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
    changes in FP32. `size` is that of the gradient itself, 1 as in FP32; `vanished` the share of its elements that
    are 0 and are not in FP32.
    """

    path: str
    error: float
    bias: float
    noise: float
    rounding: float
    size: float
    vanished: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Training under a policy beside training in FP32.

    `drift` is how far the loss curve is above FP32's, the largest of any epoch, relative to how far FP32's own
    replicas are apart (or to a floor, where those hardly are); `drift_share` the same relative to the loss.
    `skipped_share` is the share of steps that the loss scaler skipped once it had settled at `scale`. `evaluated`
    and `evaluated_fp32` are what the workload's `evaluate` said. `failure` says what broke, and `broken` which
    modules' gradients; the rest is then empty.
    """

    modules: tuple[ModuleParity, ...] = ()
    spread: Spread = "batches"
    drift: float = 0.0
    drift_share: float = 0.0
    skipped_share: float = 0.0
    scale: float = 1.0
    evaluated: float | None = None
    evaluated_fp32: float | None = None
    failure: Failure | None = None
    broken: tuple[str, ...] = ()
    seconds: float = 0.0


def compare(reference: Reference, run: Run, rounding: Rounding) -> Parity:
    """Holds a run against the reference; both are finite. `rounding` is the coarsest that the policy does."""
    drift, share = _drift(reference, run.curve)
    return Parity(
        modules=tuple(_module_parities(reference, run.gradients, rounding)),
        spread=reference.spread,
        drift=drift,
        drift_share=share,
        skipped_share=run.curve.skipped / max(1, len(run.curve.losses)),
        scale=run.curve.scale,
        evaluated=run.curve.evaluated,
        evaluated_fp32=reference.run.curve.evaluated,
    )


def _module_parities(reference: Reference, found: Gradients, rounding: Rounding) -> Iterator[ModuleParity]:
    """Those of the modules that have a gradient in FP32."""
    own, rounded = reference.run.gradients, reference.rounded[rounding]
    for path in dict.fromkeys(reference.module_of):
        parameters = [i for i, module in enumerate(reference.module_of) if module == path]
        columns = np.r_[tuple(reference.columns[i] for i in parameters)]
        fp32, theirs = own.sketches[:, columns], found.sketches[:, columns]
        size = _mean_square(fp32)
        if size == 0:
            continue
        itself = _mean_square(_difference(reference.reseeded.sketches[:, columns], fp32))
        lost = own.nonzero[:, parameters].sum() - found.nonzero[:, parameters].sum()
        yield ModuleParity(
            path=path,
            error=math.sqrt(max(0.0, _mean_square(theirs - fp32) - itself) / size),
            bias=_bias(_gram(theirs - fp32), _gram(fp32)),
            noise=math.sqrt(_spread(_gram(fp32)) / size),
            rounding=math.sqrt(_mean_square(_difference(rounded.sketches[:, columns], fp32)) / size),
            size=math.sqrt(_mean_square(theirs) / size),
            vanished=max(0.0, float(lost) / max(1.0, float(own.nonzero[:, parameters].sum()))),
        )


def _difference(some: Floats, all_batches: Floats) -> Floats:
    return some - all_batches[: len(some)]


def _mean_square(rows: Floats) -> float:
    """The mean of the rows' squared lengths."""
    return float(np.mean(np.square(rows.astype(np.float64)).sum(axis=1)))


def _gram(rows: Floats) -> NDArray[np.float64]:
    """Inner products of the rows with each other."""
    wide = rows.astype(np.float64)
    return wide @ wide.T


def _bias(errors: NDArray[np.float64], gradients: NDArray[np.float64]) -> float:
    """The length of the mean error over that of the mean gradient, from inner products over batches.

    Without what a mean of so few batches holds of what differs between them; the gradient's is kept, so that one
    that is 0 in the mean does not make anything look large beside it.
    """
    batches = len(gradients)
    error = max(0.0, float(errors.mean()) - _spread(errors) / batches)
    gradient = float(gradients.mean()) + _spread(gradients) / batches
    return math.sqrt(error / gradient) if gradient > 0 else 0.0


def _spread(gram: NDArray[np.float64]) -> float:
    """The variance of the rows around their mean, summed over columns."""
    batches = len(gram)
    if batches < 2:
        return 0.0
    return max(0.0, float(np.mean(gram.diagonal()) - gram.mean()) * batches / (batches - 1))


# Replicas that differ by less than this share of the loss give no yardstick: it is taken instead.
LEAST_DEVIATION = 0.005


def _drift(reference: Reference, curve: LossCurve) -> tuple[float, float]:
    """(relative to how far the replicas are apart, relative to the loss): the largest of any epoch."""
    batches = reference.thoroughness.batches
    fp32 = _by_epoch(reference.run.curve.losses, batches)
    above = _by_epoch(curve.losses, batches) - fp32
    apart = [_by_epoch(replica.losses, batches) - fp32 for replica in reference.replicas]
    level = np.maximum(np.abs(fp32), 1e-12)
    own = math.sqrt(float(np.mean(np.square(np.array(apart) / level)))) if apart else 0.0
    share = above / level
    return float(share.max()) / max(own, LEAST_DEVIATION), float(share.max())


def _by_epoch(losses: Sequence[float], batches: int) -> NDArray[np.float64]:
    """The mean loss of each epoch: over all batches once, so that which came first matters little."""
    count = max(1, len(losses) // batches)
    return np.array([np.mean(part) for part in np.array_split(np.array(losses), count)])
