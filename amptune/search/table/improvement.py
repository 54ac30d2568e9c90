"""Expected improvement: how much a policy that may be better is expected to raise the best score. Pure."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import ndtr

__all__ = ["expected_improvement"]

Floats = np.ndarray[Any, np.dtype[np.float64]]


def expected_improvement(ahead: Floats | float, deviation: Floats | float) -> Floats:
    """Returns E[max(0, X)], X Gaussian with the mean `ahead` and this standard deviation, element by element.

    It is a Φ(a / s) + s φ(a / s), and max(0, a) where s is 0 (Mockus, Tiesis and Zilinskas 1978; Jones, Schonlau and
    Welch 1998, equation 15). `ahead` is how far the mean lies above the best score, both on the logarithm.
    """
    a, s = np.asarray(ahead, dtype=np.float64), np.asarray(deviation, dtype=np.float64)
    known = s < 1e-12  # a score that is known needs no division
    z = a / np.where(known, 1.0, s)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    return np.asarray(np.where(known, np.maximum(0.0, a), np.maximum(0.0, a * ndtr(z) + s * density)))
