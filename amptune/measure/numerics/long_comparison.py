"""Compares long training under a policy with FP32's, over several seeds. Pure.

A policy trains like FP32 if its mean lies within the spread of FP32's own seeds: an equivalence test, whose margin is a
multiple of the standard deviation between these.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from amptune.measure.numerics.comparison import LEAST_DEVIATION, LEAST_LEVEL, NEARLY_ZERO, buffer_parities
from amptune.measure.results.training_runs import TIMES_BELOW, TIMES_SPREAD, BufferParity, LossCurve

__all__ = [
    "LEAST_LOOK_STEPS",
    "LEAST_SEEDS",
    "Agreement",
    "CurvePair",
    "Gap",
    "buffers_of",
    "gaps_of",
    "smoothed",
]

# Does the policy train like FP32: it does, it does not, nobody can tell.
Agreement = Literal["met", "missed", "open"]
# A curve is compared as the means of so many parts: the batches of a part are many, so their noise is little.
PARTS = 10
LEAST_LOOK_STEPS = 2 * PARTS
# With fewer seeds nobody knows what FP32's own runs differ by.
LEAST_SEEDS = 3
# The upper end of a 95 % interval.
UPPER_95 = 0.975
# The number of points of a curve that is drawn.
POINTS = 200

Values = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CurvePair:
    """The curves of one seed, which decides data order and random numbers: in FP32 and under the policy."""

    seed: int
    fp32: LossCurve
    policy: LossCurve

    @property
    def steps(self) -> int:
        """The steps that both have taken."""
        return min(len(self.fp32.losses), len(self.policy.losses))

    @property
    def ends_alike(self) -> bool:
        """True if both have taken as many steps, so that what they end with can be compared."""
        return len(self.fp32.losses) == len(self.policy.losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A figure under the policy and in FP32, each a mean over the seeds.

    `spread` is the standard deviation between FP32's seeds, and `error` half the 95 % interval of the difference. The
    policy's may be `above` FP32's by so much, and `below` it.
    """

    what: str
    fp32: float
    policy: float
    spread: float
    error: float
    above: float
    below: float

    @property
    def difference(self) -> float:
        return self.policy - self.fp32

    @property
    def agreement(self) -> Agreement:
        """Returns "met" if the whole interval of the difference is allowed, "missed" if nothing of it is."""
        low, high = self.difference - self.error, self.difference + self.error
        if -self.below <= low and high <= self.above:
            return "met"
        return "missed" if low > self.above or high < -self.below else "open"

    def as_dict(self) -> dict[str, Any]:
        """Returns the gap as `--json` prints it."""
        return {
            "what": self.what,
            "agreement": self.agreement,
            "fp32": self.fp32,
            "policy": self.policy,
            "difference": self.difference,
            "difference_error": self.error,
            "fp32_seeds_std": self.spread,
            "allowed_above": self.above,
            "allowed_below": self.below,
        }

    @property
    def times_allowed(self) -> float:
        """The difference as a multiple of what is allowed on its side."""
        allowed = self.above if self.difference > 0 else self.below
        return abs(self.difference) / allowed if allowed else math.inf if self.difference else 0.0


def gaps_of(pairs: Sequence[CurvePair], tolerance: float | None = None) -> tuple[Gap, ...]:
    """Returns the gaps of the loss, part by part and over all steps, and of what `evaluate` gave, if it was called.

    There are `LEAST_SEEDS` pairs at least. What `evaluate` gives may differ by its `tolerance`, or by more if seeds do.
    """
    steps = min(pair.steps for pair in pairs)
    fp32 = np.array([pair.fp32.losses[:steps] for pair in pairs], dtype=np.float64)
    policy = np.array([pair.policy.losses[:steps] for pair in pairs], dtype=np.float64)
    least = max(LEAST_LEVEL * abs(float(fp32[:, 0].mean())), NEARLY_ZERO)
    level = np.maximum(np.abs(_parts(fp32).mean(axis=0)), least)
    ends = [steps * part // PARTS for part in range(PARTS + 1)]
    names = [f"loss in steps {start + 1:,} to {end:,}" for start, end in pairwise(ends)]
    gaps = _gaps(names, _parts(fp32), _parts(policy), level, below=TIMES_BELOW)
    means = fp32.mean(axis=1, keepdims=True), policy.mean(axis=1, keepdims=True)
    gaps += _gaps([f"loss in all {steps:,} steps"], *means, level.mean(keepdims=True), below=TIMES_BELOW)
    ended = [(one.fp32.evaluated, one.policy.evaluated) for one in pairs if one.ends_alike]
    rated = np.array([both for both in ended if None not in both], dtype=np.float64)
    if len(rated) >= LEAST_SEEDS:
        own, theirs = rated[:, :1], rated[:, 1:]
        gaps += _gaps(["evaluate(model)"], own, theirs, np.abs(own.mean(axis=0)), TIMES_SPREAD, tolerance or 0.0)
    return tuple(gaps)


def buffers_of(pairs: Sequence[CurvePair]) -> tuple[BufferParity, ...]:
    """Returns the parity of each buffer at the end, with the means over the seeds."""
    ended = [pair for pair in pairs if pair.ends_alike]
    found: dict[str, list[BufferParity]] = {}
    for pair in ended:
        others = [other.fp32 for other in ended if other is not pair]
        for parity in buffer_parities(pair.fp32, others, pair.policy):
            found.setdefault(parity.path, []).append(parity)
    return tuple(
        BufferParity(path=path, off=fmean(one.off for one in seen), apart=fmean(one.apart for one in seen))
        for path, seen in found.items()
    )


def smoothed(losses: Sequence[float]) -> list[tuple[float, float]]:
    """Returns points (step, mean of the losses around it) of a curve that can be drawn."""
    count = max(1, min(POINTS, len(losses)))
    steps, parts = (np.array_split(np.array(one), count) for one in (range(1, 1 + len(losses)), losses))
    return [(float(step.mean()), float(part.mean())) for step, part in zip(steps, parts, strict=True)]


def _parts(losses: Values) -> Values:
    """Returns the mean loss of each part of each curve: (seeds, parts)."""
    return np.stack([part.mean(axis=1) for part in np.array_split(losses, PARTS, axis=1)], axis=1)


def _gaps(
    names: Sequence[str], fp32: Values, policy: Values, level: Values, below: float, least: float = 0.0
) -> list[Gap]:
    """Returns a gap for each column of the two tables (seeds, figures); `level` is the size of each figure.

    Runs of one seed have the same data, so the interval of their differences is the narrower one until rounding has
    led them apart; then it is the interval of two independent samples.
    """
    from scipy.special import stdtrit  # takes longer to import than a command needs to print its help

    seeds = len(fp32)
    variance, of_policy, of_both = (_smooth(one.var(axis=0, ddof=1)) for one in (fp32, policy, policy - fp32))
    spread = np.maximum(np.sqrt(variance), LEAST_DEVIATION * level)
    apart = np.sqrt((variance + of_policy) / seeds) * stdtrit(2 * (seeds - 1), UPPER_95)
    error = np.minimum(apart, np.sqrt(of_both / seeds) * stdtrit(seeds - 1, UPPER_95))
    return [
        Gap(
            what=name,
            fp32=float(fp32[:, i].mean()),
            policy=float(policy[:, i].mean()),
            spread=float(spread[i]),
            error=float(error[i]),
            above=max(least, TIMES_SPREAD * float(spread[i])),
            below=max(least, below * float(spread[i])),
        )
        for i, name in enumerate(names)
    ]


def _smooth(variances: Values) -> Values:
    """Returns the means of each variance with its neighbours: those of a few seeds are rough."""
    padded = np.pad(variances, 1, mode="edge")
    around: Values = np.stack([padded[:-2], padded[1:-1], padded[2:]]).mean(axis=0)
    return around
