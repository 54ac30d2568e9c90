"""Distance between a run and the reference, computed from recorded values alone.

Gradients are compared as sketches. A sketch holds, for each parameter's gradient, a fixed number of sums of its
elements under random signs. It is linear: the sketch of a difference is the difference of the sketches. It preserves
inner products, and therefore lengths, up to a relative error of sqrt(2 / columns) (Charikar, Chen, Farach-Colton 2002,
"Finding frequent items in data streams"; the AMS sketch of Alon, Matias, Szegedy 1996).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from amptune.measure.numerics import (
    BufferParity,
    Floats,
    Gradients,
    LossCurve,
    ModuleParity,
    Parity,
    Reference,
    Rounding,
    Run,
)

__all__ = ["compare"]


def compare(reference: Reference, run: Run, rounding: Rounding) -> Parity:
    """Compares a run with the reference. Both are finite; `rounding` is the coarsest rounding the policy does."""
    drift, share, below = _drift(reference, run.curve)
    return Parity(
        modules=tuple(_module_parities(reference, run.gradients, rounding)),
        spread=reference.spread,
        drift=drift,
        drift_share=share,
        below=below,
        buffers=tuple(_buffer_parities(reference, run.curve)),
        skipped_share=run.curve.skipped / max(1, len(run.curve.losses)),
        scale=run.curve.scale,
        evaluated=run.curve.evaluated,
        evaluated_fp32=reference.run.curve.evaluated,
    )


def _module_parities(reference: Reference, found: Gradients, rounding: Rounding) -> Iterator[ModuleParity]:
    """Yields the parity of each module that has a gradient in FP32."""
    own, rounded = reference.run.gradients, reference.rounded[rounding]
    whole = _mean_square(own.sketches)
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
            slope=float(np.vdot(theirs.astype(np.float64), fp32)) / (len(fp32) * size),
            vanished=max(0.0, float(lost) / max(1.0, float(own.nonzero[:, parameters].sum()))),
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


def _drift(reference: Reference, curve: LossCurve) -> tuple[float, float, float]:
    """Returns the largest of any epoch: (above FP32, relative to the distance between the replicas; above FP32,
    relative to the loss; below FP32, relative to the distance between the replicas).
    """
    batches = reference.thoroughness.batches
    fp32 = _by_epoch(reference.run.curve.losses, batches)
    above = _by_epoch(curve.losses, batches) - fp32
    apart = [_by_epoch(replica.losses, batches) - fp32 for replica in reference.replicas]
    level = np.maximum(np.abs(fp32), max(LEAST_LEVEL * abs(reference.run.curve.losses[0]), 1e-30))
    own = math.sqrt(float(np.mean(np.square(np.array(apart) / level)))) if apart else 0.0
    share, yardstick = above / level, max(own, LEAST_DEVIATION)
    return float(share.max()) / yardstick, float(share.max()), max(0.0, float(-share.min())) / yardstick


def _buffer_parities(reference: Reference, curve: LossCurve) -> Iterator[BufferParity]:
    """Yields the buffers that training changes: they differ between FP32 and its replicas, or under the policy."""
    for name, own in reference.run.curve.buffers.items():
        found = curve.buffers.get(name)
        length = float(np.linalg.norm(own))
        if found is None or found.shape != own.shape:
            continue
        others = [replica.buffers[name] for replica in reference.replicas if name in replica.buffers]
        apart = max((float(np.linalg.norm(other - own)) for other in others if other.shape == own.shape), default=0.0)
        off = float(np.linalg.norm(found - own))
        if off or apart:
            size = max(length, 1e-30)
            yield BufferParity(path=name, off=off / size, apart=apart / size)


def _by_epoch(losses: Sequence[float], batches: int) -> NDArray[np.float64]:
    """Returns the mean loss of each epoch: it covers all batches once, so the order of batches matters little."""
    count = max(1, len(losses) // batches)
    return np.array([np.mean(part) for part in np.array_split(np.array(losses), count)])
