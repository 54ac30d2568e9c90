"""What the instruments say around a block of steps, and whether something disturbed it.

A CPU has no such instruments yet: all its readings but the allocator's are None, and nothing is told from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amptune.hardware.nvml import NvmlGpu
    from amptune.measure.memory import PeakMemory

__all__ = [
    "ALLOC_RETRIES",
    "CLOCK_CODES",
    "FOREIGN_PROCESS",
    "Instruments",
    "Readings",
    "contamination",
    "with_busy_clocks",
]

POWER_CAP = "power-cap"
LOW_CLOCK = "low-clock"
ALLOC_RETRIES = "alloc-retries"
FOREIGN_PROCESS = "foreign-process"

# `nvmlClocksEventReason*` of nvml.h. Harmless and left out: idle 0x1, application clocks 0x2, sync boost 0x10,
# display clocks 0x100.
_SLOWED = {
    0x4: POWER_CAP,
    0x8: "hw-slowdown",
    0x20: "sw-thermal",
    0x40: "hw-thermal",
    0x80: "power-brake",
}
CLOCK_CODES = frozenset({*_SLOWED.values(), LOW_CLOCK})
# nvbench discards a sample measured under this share of the GPU's clock (--throttle-threshold, default 75).
LOW_CLOCK_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """One look at the instruments; None where there is none, or it cannot say.

    `energy_j` counts from the driver's loading, `alloc_retries` from the trial's beginning; `foreign_processes`
    are the ids of processes on this GPU that are not amptune's.
    """

    clock_event_reasons: int | None = None
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None
    energy_j: float | None = None
    alloc_retries: int = 0
    foreign_processes: tuple[int, ...] | None = None


class Instruments:
    """The readings of one GPU (None for a CPU, or without NVML) and of this process's allocator."""

    def __init__(self, nvml: NvmlGpu | None, memory: PeakMemory) -> None:
        self._nvml = nvml
        self._memory = memory
        self._kin: frozenset[int] = frozenset()

    def read(self) -> Readings:
        """Everything, once the device has done its work. Energy comes first: it is to be that of the steps alone."""
        energy_j = self._nvml.energy_j() if self._nvml else None
        return replace(
            self.clocks(),
            energy_j=energy_j,
            alloc_retries=self._memory.alloc_retries(),
            foreign_processes=self._foreign_processes(),
        )

    def clocks(self) -> Readings:
        """What is worth reading while the device is busy, without waiting for it."""
        if self._nvml is None:
            return Readings()
        return Readings(
            clock_event_reasons=self._nvml.clock_event_reasons(),
            sm_clock_mhz=self._nvml.sm_clock_mhz(),
            temperature_c=self._nvml.temperature_c(),
        )

    def sm_clock_max_mhz(self) -> int | None:
        return self._nvml.sm_clock_max_mhz() if self._nvml else None

    def _foreign_processes(self) -> tuple[int, ...] | None:
        """Looks for new kin only where a stranger is seen: that walks over all processes of the machine."""
        if self._nvml is None:
            return None
        strangers = self._nvml.foreign_processes(self._kin)
        if strangers:
            self._kin = _kin()
            strangers = self._nvml.foreign_processes(self._kin)
        return strangers


def with_busy_clocks(after: Readings, busy: Sequence[Readings]) -> Readings:
    """`after` a block, its clocks and temperature replaced by the worst of those read while the device was busy."""
    return replace(
        after,
        clock_event_reasons=_any_of([reading.clock_event_reasons for reading in busy]),
        sm_clock_mhz=min((r.sm_clock_mhz for r in busy if r.sm_clock_mhz is not None), default=None),
        temperature_c=max((r.temperature_c for r in busy if r.temperature_c is not None), default=None),
    )


def contamination(before: Readings, after: Readings, sm_clock_max_mhz: int | None) -> tuple[str, ...]:
    """The codes of what disturbed a block of steps, none where it was clean.

    `after` holds the clocks of the busy device (`with_busy_clocks`). Those `before` count for nothing: NVML's
    reasons outlast their cause, an H200's power cap by 0.5 s. A low clock is a code of its own only where NVML
    names no reason for it.
    """
    reasons = after.clock_event_reasons or 0
    found = [code for bit, code in _SLOWED.items() if reasons & bit]
    if not found and _is_low(after.sm_clock_mhz, sm_clock_max_mhz):
        found.append(LOW_CLOCK)
    if after.alloc_retries > before.alloc_retries:
        found.append(ALLOC_RETRIES)
    if before.foreign_processes or after.foreign_processes:
        found.append(FOREIGN_PROCESS)
    return tuple(found)


def _is_low(sm_clock_mhz: int | None, sm_clock_max_mhz: int | None) -> bool:
    if sm_clock_mhz is None or sm_clock_max_mhz is None:
        return False
    return sm_clock_mhz < LOW_CLOCK_SHARE * sm_clock_max_mhz


def _any_of(masks: Sequence[int | None]) -> int | None:
    known = [mask for mask in masks if mask is not None]
    if not known:
        return None
    union = 0
    for mask in known:
        union |= mask
    return union


def _kin() -> frozenset[int]:
    """This process's parent and all that descend from it: amptune's workers are siblings."""
    import psutil

    try:
        parent = psutil.Process().parent()
        return frozenset() if parent is None else frozenset({parent.pid, *(p.pid for p in parent.children(True))})
    except psutil.Error:  # it ended meanwhile, or may not be looked at
        return frozenset()
