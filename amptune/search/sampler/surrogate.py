"""Predicts unmeasured policies from measured ones: a Gaussian process over settings and their pairs.

The logarithm of a policy's speed is nearly a sum: one part for each setting, one for pairs of settings (half precision
and channels_last), and a little that is the policy's own. A process whose kernel is that sum (Duvenaud et al.,
"Additive Gaussian Processes", 2011) learns a space of 10,000 policies from two to three hundred trials
(reports/replay). Pure: it uses only points and numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from amptune.search.space.knobs import Dimension, Point, Value

__all__ = ["Belief", "Surrogate"]

Floats = NDArray[np.float64]

# Before any trial, pairs and triples of settings add this share of their settings' variances, and a measurement has
# this standard deviation, on the logarithm; FACTOR times smaller and larger are tried too, and the likeliest is kept.
SHARE, NOISE, FACTOR = 0.1, 0.02, 3.0
# The values tried for the variance of one setting's effect, as a share of that of all trials.
EFFECT_SIZES = (1e-4, 0.003, 0.05, 0.4)
# Priors are fitted on the first FEWEST trials, and again each time there are half as many more.
FEWEST = 2
# Ordered numbers (a batch size, a depth): the likeness of neighbours falls to 1/e over this many steps.
REACH_STEPS = 2.0
# A measurement this many standard deviations from what the others say counts as an outlier.
OUTLIER = 3.0


@dataclass(frozen=True, slots=True)
class Belief:
    """The logarithm of every point's speed: its expected value and its standard deviation."""

    mean: Floats
    deviation: Floats


class Surrogate:
    """Beliefs about the points of one space. Results kept between calls save time and change nothing."""

    def __init__(self, knobs: Sequence[Dimension], points: Sequence[Point]) -> None:
        self._codes = np.array([[knob.choices.index(point[knob.name]) for knob in knobs] for point in points])
        self._alike = [_likeness(knob.choices) for knob in knobs]
        self._first_guess = _Prior(np.full(len(knobs), SHARE), SHARE, NOISE)
        # The prior fitted on the first trials, for each number of them, with those trials.
        self._priors: dict[int, tuple[tuple[tuple[int, float], ...], _Prior]] = {}
        self._prior = self._first_guess
        self._rows: dict[int, Floats] = {}

    @property
    def size(self) -> int:
        """The number of points."""
        return len(self._codes)

    def belief(self, seen: Mapping[int, float], running: Collection[int] = ()) -> Belief:
        """Returns the belief about every point; `seen` has the logarithm of the speed of some, by index, in order.

        Those that are `running` are believed to turn out as expected.
        """
        prior = self._prior_of(tuple(seen.items()))
        if prior is not self._prior:
            self._prior = prior
            self._rows.clear()
        belief = self._given(seen)
        expected = {index: float(belief.mean[index]) for index in running if index not in seen}
        return self._given({**seen, **expected}) if expected else belief

    def _given(self, seen: Mapping[int, float]) -> Belief:
        indices, values, centre, spread = _standardized(seen.items())
        noises = np.full(len(values), self._prior.noise / spread)
        kernel = self._prior.kernel(self._likenesses(indices, indices))
        fit = _solved(kernel, values, noises).without_outliers(values)
        cross = self._covariances_of(indices)
        mean: Floats = fit.coefficients @ cross
        return Belief(centre + spread * mean, spread * _deviation_of(fit, cross, self._prior.variance))

    def _prior_of(self, seen: tuple[tuple[int, float], ...]) -> _Prior:
        """Returns the prior for these trials: fitted on the first of them, again and again as they grew."""
        prior, count = self._first_guess, FEWEST
        while count <= len(seen):
            first, (known, found) = seen[:count], self._priors.get(count, ((), prior))
            if known != first:
                indices, values, _, spread = _standardized(first)
                found = _likeliest(prior, self._likenesses(indices, indices), values, spread)
                self._priors[count] = first, found
            prior, count = found, count + math.ceil(count / 2)
        return prior

    def _covariances_of(self, indices: Sequence[int]) -> Floats:
        """Returns (some, every) covariances between points, each row computed once."""
        for index in indices:
            if index not in self._rows:
                self._rows[index] = self._prior.kernel(self._likenesses([index], range(self.size)))[0]
        return np.stack([self._rows[index] for index in indices])

    def _likenesses(self, some: Sequence[int], others: Sequence[int]) -> Floats:
        """Returns (knobs, some, others): how alike their values are."""
        rows, columns = self._codes[list(some)], self._codes[list(others)]
        return np.stack([matrix[np.ix_(rows[:, k], columns[:, k])] for k, matrix in enumerate(self._alike)])


def _standardized(seen: Collection[tuple[int, float]]) -> tuple[list[int], Floats, float, float]:
    """Returns the indices, and the values less their median over their deviation, with both."""
    indices, logs = [index for index, _ in seen], np.array([log for _, log in seen])
    centre, spread = float(np.median(logs)), max(float(logs.std()), NOISE)
    return indices, (logs - centre) / spread, centre, spread


@dataclass(frozen=True, slots=True)
class _Prior:
    """The effects of settings assumed before any trial; in units of the trials' spread, except the noise."""

    effects: Floats
    pair_share: float
    noise: float

    def kernel(self, alike: Floats) -> Floats:
        """Returns the covariance of points from their (knobs, some, others) likenesses."""
        rooted = np.sqrt(self.effects)[:, None, None] * alike
        single = pairs = triples = np.zeros_like(rooted[0])
        for own in rooted:  # each pair and each triple of knobs once
            single, pairs, triples = single + own, pairs + own * single, triples + own * pairs
        main = np.tensordot(self.effects, alike, axes=1)
        together: Floats = main + self.pair_share * (pairs + triples / 2)
        return together

    @property
    def variance(self) -> float:
        """The variance of any one point."""
        return float(self.kernel(np.ones((len(self.effects), 1, 1)))[0, 0])


def _likeliest(prior: _Prior, among: Floats, values: Floats, spread: float) -> _Prior:
    """Returns the prior that explains the values best, with one of its numbers changed at a time."""

    def likelihood(one: _Prior) -> float:
        return _solved(one.kernel(among), values, np.full(len(values), one.noise / spread)).likelihood

    for knob in range(len(prior.effects)):
        effects = [np.where(np.arange(len(prior.effects)) == knob, effect, prior.effects) for effect in EFFECT_SIZES]
        prior = max([prior, *(replace(prior, effects=one) for one in effects)], key=likelihood)
    factors = (1 / FACTOR, 1.0, FACTOR)
    prior = max((replace(prior, pair_share=factor * SHARE) for factor in factors), key=likelihood)
    return max((replace(prior, noise=factor * NOISE) for factor in factors), key=likelihood)


@dataclass(frozen=True, slots=True)
class _Fit:
    kernel: Floats
    noise: Floats
    cholesky: Floats
    coefficients: Floats
    likelihood: float

    def without_outliers(self, values: Floats) -> _Fit:
        """Returns the fit with noise as large as the spread at values that are far from what all the others predict."""
        inverse = np.linalg.inv(self.cholesky @ self.cholesky.T)
        variance = 1 / np.diag(inverse)
        surprise = np.abs(self.coefficients * variance) / np.sqrt(variance)
        if not (surprise > OUTLIER).any():
            return self
        return _solved(self.kernel, values, np.where(surprise > OUTLIER, 1.0, self.noise))


def _solved(kernel: Floats, values: Floats, noise: Floats) -> _Fit:
    from scipy.linalg import cho_solve

    cholesky: Floats = np.asarray(np.linalg.cholesky(kernel + np.diag(noise**2)))
    coefficients: Floats = cho_solve((cholesky, True), values)
    likelihood = -float(values @ coefficients) / 2 - float(np.log(np.diag(cholesky)).sum())
    return _Fit(kernel, noise, cholesky, coefficients, likelihood)


def _deviation_of(fit: _Fit, cross: Floats, variance: float) -> Floats:
    from scipy.linalg import solve_triangular

    reduced = solve_triangular(fit.cholesky, cross, lower=True)
    deviation: Floats = np.sqrt(np.maximum(variance - (reduced**2).sum(axis=0), np.finfo(float).eps))
    return deviation


def _likeness(choices: Sequence[Value]) -> Floats:
    """Returns 1 for the same choice; for another 0, or between ordered numbers less with each step."""
    count = len(choices)
    if any(isinstance(choice, bool | str) for choice in choices):
        return np.eye(count)
    steps = np.abs(np.subtract.outer(np.arange(count), np.arange(count)))
    return np.asarray(np.exp(-steps / REACH_STEPS))
