"""Shrinks each policy's estimate towards the other policies: the best of many looks better than it is. Pure."""

from __future__ import annotations

import numpy as np

from amptune.search.table.improvement import Floats
from amptune.search.table.objective import NEGLIGIBLE

__all__ = ["shrunk"]

# The baseline's own noise is at most this share of that of a difference to it.
_SHARED = 0.9
# Each round takes the estimates of the one before, so that the noise in them does not count twice.
_ROUNDS = 3
# A policy may be unlike all others: its logarithm differs by this much (standard deviation).
_BROAD = 1.0


def shrunk(raw: Floats, covariance: Floats, baseline: int) -> tuple[Floats, Floats]:
    """Returns means and variances, (policies,) each, of the logarithms `raw` relative to the baseline's.

    The population that a policy is shrunk towards is a mixture of the others' estimates and of a broad density. With
    fewer than three policies there is none. The baseline was not chosen for its score, so it stays where it is.
    `covariance` (policies, policies) is that of the scores themselves.
    """
    with_baseline = covariance[baseline]
    differences = covariance + with_baseline[baseline] - with_baseline[:, None] - with_baseline
    noise = np.maximum(np.diag(differences), 0.0)
    others = np.arange(len(raw)) != baseline
    if others.sum() < 2:
        return raw, noise
    # All differences share the baseline's noise: it is taken from them, and is the baseline's own.
    pairs = differences[np.ix_(others, others)]
    common = float(np.median(pairs[~np.eye(len(pairs), dtype=bool)]))
    shared = min(max(common, 0.0), _SHARED * float(noise[others].min()))
    noise = np.where(others, noise - shared, shared)
    mean, own = raw, noise
    for _ in range(_ROUNDS):
        mean, own = _towards(raw, noise, mean, own)
        mean, own = np.where(others, mean, raw), np.where(others, own, noise)
    return mean, own


def _towards(raw: Floats, noise: Floats, mean: Floats, own: Floats) -> tuple[Floats, Floats]:
    """Returns each policy's mean and variance, given the others' as its population."""
    centre = np.append(mean, raw.mean())
    width = np.append(own + NEGLIGIBLE**2, _BROAD**2)  # it is not resolved finer than matters to a user
    total = width + noise[:, None]
    density = -((raw[:, None] - centre) ** 2) / (2 * total) - np.log(total) / 2
    density[np.arange(len(raw)), np.arange(len(raw))] = -np.inf
    weight = np.exp(density - density.max(axis=1, keepdims=True))
    weight /= weight.sum(axis=1, keepdims=True)
    each = (raw[:, None] * width + centre * noise[:, None]) / total
    means = (weight * each).sum(axis=1)
    variances = (weight * (width * noise[:, None] / total + (each - means[:, None]) ** 2)).sum(axis=1)
    return means, variances
