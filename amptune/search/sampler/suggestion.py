"""A suggestion: a policy to measure next, with what it promises."""

from __future__ import annotations

from dataclasses import dataclass

from amptune.policy.settings import Policy
from amptune.search.sampler.storage import Handle

__all__ = ["UNTRIED_GAIN", "Suggestion"]

# What a policy that was asked for is thought to gain, on the logarithm of the score: 10 %.
UNTRIED_GAIN = 0.1


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A policy to measure next; `handle` is its trial in the store.

    `gain` is its expected improvement, on the logarithm of the score. A score below `least` would be a surprise. The
    trial is expected to take `seconds`, None if that is unknown.
    """

    policy: Policy
    handle: Handle
    gain: float = UNTRIED_GAIN
    least: float = 0.0
    seconds: float | None = None
