"""Timing of the user's training loop, and findings on what limits it besides the step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from amptune.policy.findings import Finding

__all__ = ["MOST_WAITING", "WORTH_SAYING", "LoopTiming", "is_host_late", "limits_of", "waiting_in_words"]

# A smaller share of the loop's time is less than two processes, or two runs of a few seconds, differ by.
WORTH_SAYING = 0.02
# If a loop waits for its data for more than this share of its time, a faster step shows in the step alone.
MOST_WAITING = 0.1
# A host that needs less than this part of a step's time to enqueue the step is ahead of the device, so the device does
# not wait for it. In the few steps that measure `busy_ms` the device's clock may be a few percent higher than in the
# loop; without this threshold those percents would be blamed on the host.
HOST_AT_ITS_LIMIT = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopTiming:
    """A training loop, timed for a moment by wall clock. All `_ms` are means per optimizer step.

    - `wait_ms`: time the host was blocked in `next(loader)`. A GPU may have worked meanwhile.
    - `copy_ms`: time the device copied batches to itself. `pinned` tells if all were pinned (None on a CPU, where it
      does not matter).
    - `step_ms`: time from the arrival of a batch on the device to the end of its work on it, on the device's clock.
    - `idle_ms`: the rest of the wall-clock time: the device had no batch to work on.
    - `host_ms`: time the host needs to issue a step's work to an idle device. If the step itself waits for the device
      (as with GradScaler), that time is included.
    - `busy_ms`: time the device needs for a step when all its work was enqueued ahead. None on a CPU.

    `source` tells what was iterated over: the workload's `loader`, or without one its `batch`, called for every step.
    """

    samples_per_s: float
    steps: int
    seconds: float
    wait_ms: float
    copy_ms: float
    step_ms: float
    idle_ms: float
    host_ms: float
    busy_ms: float | None = None
    pinned: bool | None = True
    source: Literal["loader", "batch"] = "loader"

    @property
    def wall_ms(self) -> float:
        """Wall-clock time of one step."""
        return 1000 * self.seconds / self.steps

    @property
    def wait_share(self) -> float:
        """Share of the loop's time in which the device was idle because no batch was there."""
        return min(self.wait_ms, self.idle_ms) / self.wall_ms

    @property
    def copy_share(self) -> float:
        return self.copy_ms / self.wall_ms

    @property
    def host_share(self) -> float:
        """Share of the loop's time in which the device was idle although a batch was there."""
        between = max(0.0, self.idle_ms - self.wait_ms)
        within = 0.0
        if self.busy_ms is not None and is_host_late(self.host_ms, self.busy_ms, self.step_ms):
            within = max(0.0, self.step_ms - self.busy_ms)
        return (between + within) / self.wall_ms

    @property
    def input_bound(self) -> bool:
        """True if the input pipeline is the limit: a faster step would wait for its data."""
        return self.wait_share > WORTH_SAYING


def is_host_late(host_ms: float, busy_ms: float, step_ms: float) -> bool:
    """Returns True if a device that is busy for so long waits for its host in a step, as both were measured apart."""
    return HOST_AT_ITS_LIMIT * host_ms > busy_ms or host_ms >= HOST_AT_ITS_LIMIT * step_ms


def limits_of(timing: LoopTiming) -> Iterator[Finding]:
    """Yields findings on what keeps the device idle: the input, copies, the host."""
    if timing.input_bound:
        yield _reason("input-bound", timing.wait_share, _input_bound(timing), wait_ms=timing.wait_ms)
    if timing.copy_share > WORTH_SAYING:
        yield _reason("copy-bound", timing.copy_share, _copy_bound(timing), copy_ms=timing.copy_ms)
    if timing.host_share > WORTH_SAYING:
        yield _reason("host-bound", timing.host_share, _host_bound(timing), host_ms=timing.host_ms)


def _reason(code: str, share: float, message: str, **figures: float) -> Finding:
    return Finding(code=code, message=message, figures={"share": share, **figures})


def _input_bound(timing: LoopTiming) -> str:
    share = _percent(timing.wait_share)
    if timing.source == "batch":
        return (
            f"waiting for batch() takes {share} of the loop's time: it was called for every step, since the workload "
            "has no loader; give it the DataLoader you train with, as loader=lambda batch_size: …"
        )
    return waiting_in_words(timing.wait_share, pins=timing.pinned is not None)


def waiting_in_words(share: float, *, pins: bool = True) -> str:
    """Returns what to do about a loader that the loop waits for during `share` of its time."""
    pinning = "pin_memory=True, " if pins else ""
    return (
        f"waiting for the loader takes {_percent(share)} of the loop's time, which no faster step wins back: try more "
        f"DataLoader workers, persistent_workers=True, {pinning}or less work per sample"
    )


def _copy_bound(timing: LoopTiming) -> str:
    advice = (
        "they are pinned already: copy the next batch on a side stream while this one is worked on, or copy a "
        "smaller type (uint8 images) and convert on the device"
        if timing.pinned
        else "they are not pinned: DataLoader(pin_memory=True) and .to(device, non_blocking=True)"
    )
    return f"copying batches to the device takes {_percent(timing.copy_share)} of the loop's time; {advice}"


def _host_bound(timing: LoopTiming) -> str:
    return (
        f"the device has nothing to do for {_percent(timing.host_share)} of the loop's time although its batch is "
        f"there: the host needs {timing.host_ms:.3g} ms to give it a step's work; try a larger batch, or where the "
        "policy has none, CUDA graphs (cuda_graphs: true)"
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
