"""What measuring gives: a `Measurement`, or a `Failure` that says why there is none. Values, kept as evidence."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from amptune.policy.wire import adapter_for

__all__ = [
    "ENERGY_S",
    "Effort",
    "Failure",
    "FailureKind",
    "Measurement",
    "Outcome",
    "outcome_from_dict",
    "outcome_to_dict",
]

# A GPU's counter of energy moves once in 100 ms (seen on an H200): of a block shorter than this it says next to
# nothing.
ENERGY_S = 0.3

FailureKind = Literal["oom", "nonfinite", "unsupported", "timeout", "crash", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How long to look at one policy.

    Warm-up ends when the step time is steady or after `warmup_s`; the very first steps, where compiling and
    cudnn.benchmark's search are paid for, come before and are not limited by it. Then steps are timed until
    the 95 % interval on their median is narrow, half its width being `precision` of the median, or for
    `measure_s`; `min_steps` at least and `max_steps` at most. On a device that counts its energy, not for less than
    `energy_s`, which its counter needs (`max_steps` and `measure_s` hold all the same). A step slower than
    `abandon_above_ms` ends it early with what is there. `time_limit_s` is the hard end, the worker's start included,
    enforced from outside.
    """

    warmup_s: float = 5.0
    measure_s: float = 0.5
    precision: float = 0.02
    min_steps: int = 5
    max_steps: int = 200
    energy_s: float = 0.0
    abandon_above_ms: float | None = None
    time_limit_s: float = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One policy, timed in one process.

    `step_ms` holds every timed step in order; a step is one optimizer step over `samples_per_step` samples.
    They are one block of steps without a break. Blocks that something else disturbed were timed again:
    `discarded` says why, one entry for each, its codes (`amptune.measure.readings`) joined by "+".
    `contaminated_by` are the codes of the block that was kept, because they came back in every repeat or there
    was no time for one. `steady` is False where `warmup_s` ran out before the step time was steady.
    Peaks are of the whole trial, warm-up and weights included: on a GPU those of PyTorch's allocator, on a
    CPU the process's peak resident set, as both. `losses` are those of the first steps from the initial
    weights, on the same batches for every policy; `gradient_norm` is the L2 norm over all parameters at the
    first of them, None for a workload with a step of its own. `skipped_share` is the share of steps that the
    loss scaler skipped. Energy is the kept block's alone, and so are the readings of the busy GPU: all of
    NVML's `clock_event_reasons` (a bit mask), the lowest `sm_clock_mhz`, the highest `temperature_c`.
    `startup_s` is what the first steps took beyond a later one's time: compiling, above all, where nothing lay
    in a cache. Where the model is compiled, `graph_breaks` says why it is not one graph, and `recompiled` counts
    the graphs compiled after those first steps: shapes that go on changing.
    """

    samples_per_step: int
    step_ms: tuple[float, ...]
    warmup_s: float
    warmup_steps: int
    peak_allocated_mib: float
    peak_reserved_mib: float
    losses: tuple[float, ...]
    gradient_norm: float | None = None
    skipped_share: float = 0.0
    alloc_retries: int = 0
    energy_j_per_sample: float | None = None
    clock_event_reasons: int | None = None
    abandoned: bool = False
    steady: bool = True
    discarded: tuple[str, ...] = ()
    contaminated_by: tuple[str, ...] = ()
    startup_s: float = 0.0
    graph_breaks: tuple[str, ...] = ()
    recompiled: int = 0
    sm_clock_mhz: int | None = None
    temperature_c: int | None = None

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_ms)

    @property
    def samples_per_s(self) -> float:
        return 1000 * self.samples_per_step / self.median_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a policy could not be measured; `where` is `file:line` in the user's code where an exception came from it."""

    kind: FailureKind
    message: str
    where: str | None = None
    exception: str | None = None

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" + (f" ({self.where})" if self.where else "")


Outcome = Measurement | Failure


def outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    """The outcome as plain data for a journal; `outcome_from_dict` is the inverse."""
    return {"failed": isinstance(outcome, Failure), **asdict(outcome)}


def outcome_from_dict(data: Mapping[str, Any]) -> Outcome:
    """The outcome that `outcome_to_dict` wrote; raises `ValueError` where it is not one."""
    fields = {key: value for key, value in data.items() if key != "failed"}
    return adapter_for(Failure if data["failed"] else Measurement).validate_python(fields)  # type: ignore[no-any-return]
