"""What a policy that was not measured may do, from those that were: a Gaussian process over settings and their pairs.

The speed of a policy is, on a logarithm, nearly a sum: what each setting brings, what pairs of settings bring
together (half precision and channels_last), and a little that is the policy's own. A process whose kernel is that
sum (Duvenaud et al., "Additive Gaussian Processes", 2011) learns from some forty trials what a space of 10,000
policies holds. Pure: it knows points and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from amptune.search.space import Knob, Point, Value

__all__ = ["Belief", "Floats", "Surrogate"]

Floats = NDArray[np.float64]

# Tried as prior standard deviations, of all settings together over the spread of what was seen, of the pairs' share
# in that, and of a measurement; the likeliest explains the trials best.
SCALES = (0.7, 1.5)
PAIR_SHARES = (0.2, 0.6)
NOISES = (0.005, 0.02, 0.05)
TRIPLE_SHARE = 0.5
OWN_SHARE = 0.02
# Ordered numbers (a batch size, a depth): the likeness of neighbours falls to 1/e over this many steps.
REACH_STEPS = 2.0
# A measurement this many standard deviations from what the others say counts as an outlier.
OUTLIER = 3.5
OUTLIER_NOISE = 10.0
# So many of the points with the highest expectation are considered.
WORTH_A_LOOK = 2000


@dataclass(frozen=True, slots=True)
class Belief:
    """The logarithm of every point's speed: what is expected, and its standard deviation."""

    mean: Floats
    deviation: Floats

    def improvement(self, over: float) -> Floats:
        """The expected improvement over a value (Jones et al., "Efficient Global Optimization", 1998)."""
        from scipy.special import ndtr

        gap = self.mean - over
        ratio = gap / self.deviation
        density = np.exp(-0.5 * ratio**2) / math.sqrt(2 * math.pi)
        expected: Floats = gap * ndtr(ratio) + self.deviation * density
        return expected


class Surrogate:
    """Beliefs about the points of one space. What it keeps between calls are kernels alone."""

    def __init__(self, knobs: Sequence[Knob], points: Sequence[Point]) -> None:
        self._codes = np.array([[knob.choices.index(point[knob.name]) for knob in knobs] for point in points])
        self._alike = [_likeness(knob.choices) for knob in knobs]
        self._columns: dict[int, Floats] = {}

    @property
    def size(self) -> int:
        """How many points there are."""
        return len(self._codes)

    def belief(self, seen: Mapping[int, float]) -> Belief:
        """What to believe of every point, having seen the logarithm of the speed of some, by index."""
        indices, values = list(seen), np.array(list(seen.values()))
        columns = np.stack([self._column(index) for index in indices], axis=1)  # (parts, seen, points)
        among = columns[:, :, indices]
        centre, spread = float(np.median(values)), max(float(values.std()), 0.01)
        values = values - centre
        priors = product((scale * spread for scale in SCALES), PAIR_SHARES, NOISES)
        fit = max((_fit(among, values, *prior) for prior in priors), key=lambda fit: fit.likelihood)
        fit = fit.without_outliers(among, values)
        cross = np.tensordot(fit.weights, columns, axes=1)
        return Belief(centre + fit.coefficients @ cross, _deviation_of(fit, cross))

    def _column(self, index: int) -> Floats:
        """(main, pairs, triples, own) x points: how alike each point is to this one; 1 for itself."""
        if index not in self._columns:
            own = self._codes[index]
            alike = np.stack([matrix[self._codes[:, k], own[k]] for k, matrix in enumerate(self._alike)])
            self._columns[index] = np.stack([*_mean_products(alike), alike.prod(axis=0)])
        return self._columns[index]


@dataclass(frozen=True, slots=True)
class _Fit:
    weights: Floats
    noise: Floats
    cholesky: Floats
    coefficients: Floats
    likelihood: float

    def without_outliers(self, among: Floats, values: Floats) -> _Fit:
        """The same with far more noise where a value is far from what all the others say of it."""
        inverse = np.linalg.inv(self.cholesky @ self.cholesky.T)
        variance = 1 / np.diag(inverse)
        surprise = np.abs(self.coefficients * variance) / np.sqrt(variance)
        if not (surprise > OUTLIER).any():
            return self
        return _solved(among, values, self.weights, self.noise * np.where(surprise > OUTLIER, OUTLIER_NOISE, 1.0))


def _fit(among: Floats, values: Floats, scale: float, pair_share: float, noise: float) -> _Fit:
    weights = scale**2 * np.array([1.0, pair_share, pair_share * TRIPLE_SHARE, OWN_SHARE])
    return _solved(among, values, weights, np.full(len(values), noise))


def _solved(among: Floats, values: Floats, weights: Floats, noise: Floats) -> _Fit:
    from scipy.linalg import cho_solve

    kernel = np.tensordot(weights, among, axes=1) + np.diag(noise**2 + 1e-9)
    cholesky: Floats = np.asarray(np.linalg.cholesky(kernel))
    coefficients: Floats = cho_solve((cholesky, True), values)
    likelihood = -0.5 * float(values @ coefficients) - float(np.log(np.diag(cholesky)).sum())
    return _Fit(weights, noise, cholesky, coefficients, likelihood)


def _mean_products(alike: Floats) -> tuple[Floats, Floats, Floats]:
    """The means of all single rows, of all products of two and of three of them, by Newton's identities."""
    count = len(alike)
    one, two, three = (np.asarray((alike**power).sum(axis=0)) for power in (1, 2, 3))
    pairs = (one**2 - two) / 2 / max(1, math.comb(count, 2))
    triples = (one**3 - 3 * one * two + 2 * three) / 6 / max(1, math.comb(count, 3))
    return one / count, pairs, triples


def _deviation_of(fit: _Fit, cross: Floats) -> Floats:
    """Each point's standard deviation; of those with no chance it is not worth computing, and is 0."""
    from scipy.linalg import solve_triangular

    worth = np.argsort(-(fit.coefficients @ cross))[:WORTH_A_LOOK]
    reduced = solve_triangular(fit.cholesky, cross[:, worth], lower=True)
    deviation = np.full(cross.shape[1], 1e-6)
    deviation[worth] = np.sqrt(np.maximum(fit.weights.sum() - (reduced**2).sum(axis=0), 1e-12))
    return deviation


def _likeness(choices: Sequence[Value]) -> Floats:
    """1 for the same choice; for another 0, or between ordered numbers less with each step."""
    count = len(choices)
    if any(isinstance(choice, bool | str) for choice in choices):
        return np.eye(count)
    steps = np.abs(np.subtract.outer(np.arange(count), np.arange(count)))
    return np.exp(-steps / REACH_STEPS)
