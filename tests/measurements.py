"""A measurement of which a test names what it is about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from amptune.measure.results.outcome import Measurement

__all__ = ["took"]

PLAIN = Measurement(
    samples_per_step=32,
    step_ms=(10.0,) * 5,
    warmup_s=0.1,
    warmup_steps=8,
    peak_allocated_mib=1000.0,
    peak_reserved_mib=1000.0,
    losses=(2.3, 2.2),
)


def took(step_ms: float = 10.0, mib: float = 1000.0, **more: Any) -> Measurement:
    """Five steps of this time, with this peak, allocated and reserved; `more` are fields by their names."""
    return replace(PLAIN, step_ms=(step_ms,) * 5, **{"peak_allocated_mib": mib, "peak_reserved_mib": mib, **more})
