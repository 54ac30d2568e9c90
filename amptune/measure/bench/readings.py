"""Readings of the instruments around a block of steps, what they show, and findings about that.

A disturbance comes from outside, or passes. A GPU at its power cap under this very load is no disturbance: training
runs in that state too.

On a CPU there are two instruments: the allocator's retries, and the time that threads waited for a CPU. The other
readings are None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from amptune.measure.bench.run_delay import MOST_HOST_DELAY, RunDelays, host_delay, read_run_delays
from amptune.measure.results.outcome import Measurement, Outcome
from amptune.policy.findings import Finding

if TYPE_CHECKING:
    from amptune.hardware.nvml import NvmlGpu
    from amptune.measure.bench.peak_memory import PeakMemory

__all__ = [
    "CLOCK_CODES",
    "COMPILING",
    "FOREIGN_PROCESS",
    "HOST_LOAD",
    "NOT_REPEATED",
    "OWN_LOAD",
    "Instruments",
    "Readings",
    "contamination",
    "noticed",
    "with_busy_clocks",
]

POWER_CAP = "power-cap"
LOW_CLOCK = "low-clock"
_ALLOC_RETRIES = "alloc-retries"
FOREIGN_PROCESS = "foreign-process"
HOST_LOAD = "host-load"
COMPILING = "compiling"

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
# States that the measured load itself brings about, and training too.
OWN_LOAD = frozenset({POWER_CAP, LOW_CLOCK})
# No block is repeated for these. What compiles goes on during a block that is too long, or that compiles itself
# (stillness.py), and so would it during the next one.
NOT_REPEATED = OWN_LOAD | {COMPILING}
# nvbench discards a sample measured under this share of the GPU's clock (--throttle-threshold, default 75).
LOW_CLOCK_SHARE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Readings:
    """One reading of all instruments; None for an instrument that is missing or gives no value.

    `energy_j` counts from the loading of the driver, `alloc_retries` from the beginning of the trial.
    `foreign_processes` are the ids of processes on this GPU that are not amptune's.
    """

    clock_event_reasons: int | None = None
    sm_clock_mhz: int | None = None
    energy_j: float | None = None
    alloc_retries: int = 0
    foreign_processes: tuple[int, ...] | None = None
    run_delays: RunDelays | None = None


class Instruments:
    """The instruments of one GPU (`nvml` is None for a CPU, or without NVML), and of this process on any machine."""

    def __init__(
        self,
        nvml: NvmlGpu | None,
        memory: PeakMemory,
        run_delays: Callable[[], RunDelays | None] = read_run_delays,
    ) -> None:
        self._nvml = nvml
        self._memory = memory
        self._run_delays = run_delays
        self._kin: frozenset[int] = frozenset()

    def read(self) -> Readings:
        """Reads all instruments after the device has finished. Energy is read first, to include only the steps."""
        energy_j = self._nvml.energy_j() if self._nvml else None
        return replace(
            self.clocks(),
            energy_j=energy_j,
            alloc_retries=self._memory.alloc_retries(),
            foreign_processes=self._foreign_processes(),
            run_delays=self._run_delays(),
        )

    def clocks(self) -> Readings:
        """Reads clocks while the device is busy, without waiting for it."""
        if self._nvml is None:
            return Readings()
        return Readings(
            clock_event_reasons=self._nvml.clock_event_reasons(),
            sm_clock_mhz=self._nvml.sm_clock_mhz(),
        )

    def sm_clock_max_mhz(self) -> int | None:
        return self._nvml.sm_clock_max_mhz() if self._nvml else None

    def _foreign_processes(self) -> tuple[int, ...] | None:
        """Returns foreign processes. Updates amptune's own only if one is seen: that scans the whole machine."""
        if self._nvml is None:
            return None
        strangers = self._nvml.foreign_processes(self._kin)
        if strangers:
            self._kin = _kin()
            strangers = self._nvml.foreign_processes(self._kin)
        return strangers


def with_busy_clocks(after: Readings, busy: Sequence[Readings]) -> Readings:
    """Returns `after` with clocks replaced by the worst ones read while the device was busy."""
    masks = [r.clock_event_reasons for r in busy if r.clock_event_reasons is not None]
    return replace(
        after,
        clock_event_reasons=reduce(or_, masks) if masks else None,
        sm_clock_mhz=min((r.sm_clock_mhz for r in busy if r.sm_clock_mhz is not None), default=None),
    )


def contamination(before: Readings, after: Readings, sm_clock_max_mhz: int | None) -> tuple[str, ...]:
    """Returns the codes of what the readings of a block of steps show, empty if it ran at full clocks and undisturbed.

    `after` holds the clocks of the busy device (`with_busy_clocks`). The clocks in `before` are ignored: NVML's reasons
    outlast their cause, an H200's power cap by 0.5 s. A low clock has its own code only if NVML gives no reason for it.
    """
    reasons = after.clock_event_reasons or 0
    found = [code for bit, code in _SLOWED.items() if reasons & bit]
    clock_mhz, most_mhz = after.sm_clock_mhz, sm_clock_max_mhz
    if not found and clock_mhz is not None and most_mhz is not None and clock_mhz < LOW_CLOCK_SHARE * most_mhz:
        found.append(LOW_CLOCK)
    if after.alloc_retries > before.alloc_retries:
        found.append(_ALLOC_RETRIES)
    if before.foreign_processes or after.foreign_processes:
        found.append(FOREIGN_PROCESS)
    if (host_delay(before.run_delays, after.run_delays) or 0.0) > MOST_HOST_DELAY:
        found.append(HOST_LOAD)
    return tuple(found)


def _kin() -> frozenset[int]:
    """Returns the ids of this process's parent and all its descendants: amptune's workers are siblings."""
    import psutil

    try:
        parent = psutil.Process().parent()
        return frozenset() if parent is None else frozenset({parent.pid, *(p.pid for p in parent.children(True))})
    except psutil.Error:  # it has ended, or access is denied
        return frozenset()


_Codes = tuple[str, ...]

_WORDS = {
    POWER_CAP: "the GPU ran at its power cap",
    "hw-slowdown": "the GPU was slowed down (HW slowdown)",
    "sw-thermal": "the GPU was thermally throttled (SW thermal)",
    "hw-thermal": "the GPU was thermally throttled (HW thermal)",
    "power-brake": "the GPU was slowed down from outside (HW power brake)",
    LOW_CLOCK: "the GPU's clock was under 75 % of its highest, for no reason NVML gives,",
    _ALLOC_RETRIES: "the GPU's memory was so short that the allocator had to empty its cache",
    FOREIGN_PROCESS: "another process was on the GPU",
    COMPILING: "graphs were compiling beside it (they stand still for two seconds at most, and not if time is short)",
    HOST_LOAD: "threads had to wait for a CPU (other programs were running, or there are more threads than CPUs)",
}


def noticed(outcomes: Iterable[Outcome]) -> tuple[Finding, ...]:
    """Returns findings: `own-load` states, then disturbances, then `unsteady`.

    The disturbances are `throttled`, `foreign-process`, `host-load`, `beside-compiling` and `allocator-thrashing`. On a
    machine that does not count how long threads wait for a CPU, or always counts 0, there is no `host-load`. Figures
    count blocks of steps; those of `own-load` and `unsteady` count trials. Trials abandoned early are left out.
    """
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measurement) and not outcome.abandoned]
    found = (
        *_own_load(measured),
        _disturbed("throttled", CLOCK_CODES - OWN_LOAD, measured),
        _disturbed("foreign-process", {FOREIGN_PROCESS}, measured),
        _disturbed("host-load", {HOST_LOAD}, measured),
        _disturbed("beside-compiling", {COMPILING}, measured),
        _disturbed("allocator-thrashing", {_ALLOC_RETRIES}, measured),
        _unsteady(measured),
    )
    return tuple(finding for finding in found if finding is not None)


def _own_load(measured: Sequence[Measurement]) -> Iterator[Finding]:
    for code in sorted(OWN_LOAD):
        if count := sum(code in measurement.contaminated_by for measurement in measured):
            yield Finding(
                code="own-load",
                message=f"{_WORDS[code]} in {count} of {len(measured)} measurements; so will training",
                figures={"state": code, "kept": count, "of": len(measured)},
            )


def _disturbed(code: str, causes: Collection[str], measured: Sequence[Measurement]) -> Finding | None:
    discarded = [_among(causes, why.split("+")) for m in measured for why in m.discarded]
    kept = [_among(causes, m.contaminated_by) for m in measured]
    if not any(discarded) and not any(kept):
        return None
    return Finding(
        code=code,
        message=_message(discarded, kept),
        figures={
            "discarded": sum(map(bool, discarded)),
            "kept": sum(map(bool, kept)),
            "of": len(discarded) + len(kept),
        },
    )


def _message(discarded: Sequence[_Codes], kept: Sequence[_Codes]) -> str:
    repeated, disturbed = sum(map(bool, discarded)), sum(map(bool, kept))
    words = [f"{repeated} timing{'s' * (repeated > 1)} repeated"] if repeated else []
    if disturbed:
        words.append(f"{disturbed} of {len(kept)} disturbed{' nevertheless' if repeated else ''}")
    return f"{_in_words([*discarded, *kept])} while steps were timed: {', '.join(words)}"


def _in_words(blocks: Sequence[_Codes]) -> str:
    """Returns the causes in words, the most frequent first."""
    counts = Counter(code for block in blocks for code in block)
    return ", ".join(_WORDS[code] for code, _ in counts.most_common())


def _among(causes: Collection[str], codes: Iterable[str]) -> _Codes:
    return tuple(code for code in codes if code in causes)


def _unsteady(measured: Sequence[Measurement]) -> Finding | None:
    count = sum(not measurement.steady for measurement in measured)
    if count == 0:
        return None
    return Finding(
        code="unsteady",
        message=f"in {count} of {len(measured)} measurements the step time was not steady when its warm-up ran out of "
        "time",
        figures={"discarded": 0, "kept": count, "of": len(measured)},
    )
