"""Whether two trials trained alike."""

from __future__ import annotations

from amptune.measure.bench.policy_timer import LEAST_FIRST_STEPS
from amptune.measure.results.outcome import Measurement


def trained_alike(first: Measurement, second: Measurement) -> bool:
    """Whether the losses that both kept agree: a trial keeps fewer where its first steps are slow."""
    both = min(len(first.losses), len(second.losses))
    assert both >= LEAST_FIRST_STEPS
    return first.losses[:both] == second.losses[:both]
