"""Compares training under a policy with training in FP32: gradients, loss curves and buffers. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from amptune.measure.results.training_runs import (
    HARMLESS,
    ILL_CONDITIONED,
    ROUNDING,
    BufferParity,
    Floats,
    GradientParity,
    LossCurve,
    Parity,
    Reference,
    Rounding,
    Run,
)

__all__ = ["LEAST_DEVIATION", "LEAST_LEVEL", "NEARLY_ZERO", "buffer_parities", "comparable", "compare"]


def compare(reference: Reference, run: Run, rounding: Rounding) -> Parity:
    """Compares a run with the reference. Both are finite; `rounding` is the coarsest rounding the policy does."""
    drift, share, below = _drift(reference, run)
    return Parity(
        gradients=tuple(_gradient_parities(reference, run, rounding)),
        spread=reference.spread,
        precision=ROUNDING[rounding],
        drift=drift,
        drift_share=share,
        below=below,
        buffers=tuple(buffer_parities(reference.run.curve, reference.replicas, run.curve)),
        skipped_share=run.curve.skipped / max(1, len(run.curve.losses)),
        scale=run.curve.scale,
        evaluated=run.curve.evaluated,
        evaluated_fp32=reference.run.curve.evaluated,
        evaluated_at_start=reference.evaluated_at_start,
        losses=run.curve.losses,
        losses_fp32=tuple(one.losses for one in (reference.run.curve, *reference.replicas)),
        all_rounded_because=reference.all_rounded_because,
    )


def comparable(reference: Reference) -> int:
    """Returns the number of parameters whose gradient in half can be compared with FP32's, or is negligible."""
    rounding: Rounding = "bf16"  # the coarsest
    own = _gradient_parities(reference, reference.run, rounding)
    return sum(one.rounding < ILL_CONDITIONED or one.share < HARMLESS * ROUNDING[rounding] for one in own)


def _gradient_parities(reference: Reference, run: Run, rounding: Rounding) -> Iterator[GradientParity]:
    """Yields the parity of each parameter that has a gradient in FP32."""
    own, found, rounded = reference.run.gradients, run.gradients, reference.rounded[rounding]
    whole = _mean_square(own.sketches)
    for i, (name, columns) in enumerate(zip(reference.names, reference.columns, strict=True)):
        fp32, theirs = own.sketches[:, columns], found.sketches[:, columns]
        size = _mean_square(fp32)
        if size == 0:
            continue
        itself = _mean_square(_difference(reference.repeated.sketches[:, columns], fp32))
        before, after = float(own.noticeable[:, i].sum()), float(found.noticeable[:, i].sum())
        yield GradientParity(
            name=name,
            error=math.sqrt(max(0.0, _mean_square(theirs - fp32) - itself) / size),
            bias=_bias(_gram(theirs - fp32), _gram(fp32)),
            noise=math.sqrt(_spread(_gram(fp32)) / size),
            rounding=math.sqrt(_mean_square(_difference(rounded.sketches[:, columns], fp32)) / size),
            size=math.sqrt(_mean_square(theirs) / size),
            slope=float(np.vdot(theirs.astype(np.float64), fp32)) / (len(fp32) * size),
            vanished=max(0.0, before - after) / max(1.0, before),
            share=math.sqrt(size / whole),
        )


def _difference(some: Floats, all_batches: Floats) -> Floats:
    return some - all_batches[: len(some)]


def _mean_square(rows: Floats) -> float:
    """Returns the mean squared length of the rows."""
    return float(np.mean(np.square(rows.astype(np.float64)).sum(axis=1)))


def _gram(rows: Floats) -> NDArray[np.float64]:
    """Returns the inner products of all pairs of rows."""
    wide = rows.astype(np.float64)
    return wide @ wide.T


def _bias(errors: NDArray[np.float64], gradients: NDArray[np.float64]) -> float:
    """Returns the length of the mean error over that of the mean gradient, from inner products over batches.

    A mean of few batches still contains part of the spread between batches. This part is subtracted from the error
    but not from the gradient: otherwise any error would look large beside a gradient whose mean is 0.
    """
    batches = len(gradients)
    error = max(0.0, float(errors.mean()) - _spread(errors) / batches)
    gradient = float(gradients.mean()) + _spread(gradients) / batches
    return math.sqrt(error / gradient) if gradient > 0 else 0.0


def _spread(gram: NDArray[np.float64]) -> float:
    """Returns the variance of the rows around their mean, summed over columns."""
    batches = len(gram)
    if batches < 2:
        return 0.0
    return max(0.0, float(np.mean(gram.diagonal()) - gram.mean()) * batches / (batches - 1))


# Floor for the yardstick, as a share of the loss: replicas may differ by less than this.
LEAST_DEVIATION = 0.005
# Floor for the loss level, as a share of the first loss: a loss may fall to almost 0.
LEAST_LEVEL = 0.02
# In place of 0 where something is divided by a size.
NEARLY_ZERO = float(np.finfo(np.float32).tiny)


def _drift(reference: Reference, run: Run) -> tuple[float, float, float]:
    """Returns the largest of any epoch: (above FP32, relative to the distance between the replicas; above FP32,
    relative to the loss; below FP32, relative to the distance between the replicas).

    Extra curves can lower the drift, never raise it: where their mean is nearer to FP32's, in units of its standard
    error from the replicas and from the curves themselves, that counts.
    """
    own = [_by_epoch(curve, reference) for curve in (reference.run.curve, *reference.replicas)]
    theirs = [_by_epoch(curve, reference) for curve in (run.curve, *run.more)]
    least = max(LEAST_LEVEL * abs(reference.run.curve.losses[0]), NEARLY_ZERO)
    level = [np.maximum(np.abs(losses), least) for losses in own]
    apart = [(replica - own[0]) / level[0] for replica in own[1:]]
    variance = max(LEAST_DEVIATION**2, float(np.mean(np.square(apart))) if apart else 0.0)
    above = np.array([(a - b) / size for a, b, size in zip(theirs, own, level, strict=False)])
    times = above[0] / math.sqrt(variance)
    drift, below = float(times.max()), float(-times.min())
    if len(above) > 1:
        error = np.sqrt((variance + above.var(axis=0, ddof=1)) / 2 / len(above))
        mean_times = above.mean(axis=0) / error
        drift, below = min(drift, float(mean_times.max())), min(below, float(-mean_times.min()))
    return drift, float(above[0].max()), max(0.0, below)


def buffer_parities(fp32: LossCurve, replicas: Sequence[LossCurve], curve: LossCurve) -> Iterator[BufferParity]:
    """Yields the buffers that training changes: they differ between FP32 and its replicas, or under the policy."""
    for name, own in fp32.buffers.items():
        found = curve.buffers.get(name)
        if found is None or found.shape != own.shape:
            continue
        others = [replica.buffers[name] for replica in replicas if name in replica.buffers]
        distance = _between_variances if name.endswith("running_var") else _distance
        size = _scale(name, fp32.buffers)
        apart = max((distance(other, own, size) for other in others if other.shape == own.shape), default=0.0)
        off = distance(found, own, size)
        if off or apart:
            yield BufferParity(path=name, off=off, apart=apart)


def _distance(one: Floats, other: Floats, size: float) -> float:
    """Returns the length of the difference, relative to `size`; a mask's infinities, and NaN, differ from no equals."""
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    return float(np.linalg.norm(one[~same] - other[~same])) / size


def _between_variances(one: Floats, other: Floats, _: float) -> float:
    """Returns the root mean square, over channels, of the relative difference of their deviations.

    In some models one channel varies a thousand times more than all others, and in each run another: of the length of
    the whole it would be all.
    """
    if np.isfinite(one).all() != np.isfinite(other).all():
        return math.inf
    a, b = (np.sqrt(np.maximum(np.nan_to_num(values), 0.0)) for values in (one, other))
    return math.sqrt(float(np.mean(np.square((a - b) / np.maximum(np.maximum(a, b), NEARLY_ZERO)))))


def _scale(name: str, buffers: Mapping[str, Floats]) -> float:
    """Returns the length that a buffer's distances are relative to: its own; of a running mean, its deviation's.

    BatchNorm subtracts a mean and divides by the deviation: behind a layer whose outputs have no mean, the mean is made
    of rounding errors and all the same harmless.
    """
    variance = buffers.get(f"{name.removesuffix('running_mean')}running_var") if name.endswith("running_mean") else None
    lengths = buffers[name] if variance is None else np.sqrt(np.maximum(variance, 0.0))
    return max(float(np.linalg.norm(lengths[np.isfinite(lengths)])), NEARLY_ZERO)


def _by_epoch(curve: LossCurve, reference: Reference) -> NDArray[np.float64]:
    """Returns the mean loss of each epoch: it covers all batches once, so the order of batches matters little."""
    count = max(1, len(curve.losses) // reference.thoroughness.batches)
    return np.array([np.mean(part) for part in np.array_split(np.array(curve.losses), count)])
