"""Outcomes of a trial: a `Measurement`, or a `Failure` with the reason. Both are values, kept as evidence."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from amptune.policy.serialization import adapter_for

__all__ = [
    "ENERGY_S",
    "LOADER_FAILED",
    "Effort",
    "Failure",
    "FailureKind",
    "Measurement",
    "Outcome",
    "outcome_from_dict",
    "outcome_to_dict",
]

# A GPU's energy counter is updated every 100 ms (seen on an H200), so it is too coarse for a shorter block than this.
ENERGY_S = 0.3

# The `exception` of a failure of the user's loader, which no policy is to blame for.
LOADER_FAILED = "LoaderFailed"

# More milliseconds, MiB or samples than any step takes.
_IMPOSSIBLE = 1e15

FailureKind = Literal["oom", "nonfinite", "unsupported", "timeout", "crash", "killed", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """Limits on the time and the steps of one trial.

    Warm-up ends when the step time is steady or after `warmup_s`. The very first steps, which include compiling and
    cudnn.benchmark's search, come before and do not count. Then steps are timed until half the width of their mean's
    95 % interval is at most `precision` of the mean, or for `measure_s`; at least `min_steps`, at most `max_steps`.
    While something is still compiled or recorded, warm-up and timing go on for up to `settle_s` each.
    A device with an energy counter is timed for at least `energy_s`, which the counter needs (`max_steps` and
    `measure_s` still hold). If steps take longer than `abandon_above_ms`, the trial ends after the first ones, or in
    its warm-up. `time_limit_s` is the hard limit, enforced from outside; it includes the worker's start.

    With `in_loop` the user's training loop is timed: every step gets a new batch, from the workload's loader if there
    is one. Otherwise steps take the same sequence of `batches` on the device again and again. Processes that compile
    stand still while steps are timed, unless `beside_compiling`.
    """

    warmup_s: float = 5.0
    measure_s: float = 0.5
    precision: float = 0.02
    min_steps: int = 5
    max_steps: int = 200
    settle_s: float = 5.0
    energy_s: float = 0.0
    abandon_above_ms: float | None = None
    time_limit_s: float = 60.0
    in_loop: bool = False
    batches: int | None = None
    beside_compiling: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One policy, timed in one process.

    `step_ms` holds every timed step in order: one block, with what it compiled or recorded; on a GPU the step after a
    wait is not timed. A step is one optimizer step over `samples_per_step` samples. Disturbed blocks were timed again:
    `discarded` has one entry for each, its codes of disturbances joined by "+". `contaminated_by` holds the codes of
    the kept block: disturbances that came back in every repeat or were not repeated for lack of time, and states of
    the GPU under this very load, such as its power cap. `steady` is False if `warmup_s` ran out before the step time
    was steady. If it was `abandoned`, a step takes longer than the trial's limit and `step_ms` holds the few steps that
    told so, perhaps the very first: a bound and no figure.

    Peaks cover the whole trial with warm-up and weights: on a GPU those of PyTorch's allocator, on a CPU the process's
    peak resident set for both. `losses` are those of the first steps from the initial weights, on the same batches for
    every policy. `gradient_norm` is the L2 norm over all parameters at the first step, None for a workload with its own
    step. `skipped_share` is the share of steps that the loss scaler skipped.

    Energy belongs to the kept block alone. `host_delay` is the share of the kept block for which a thread was ready to
    run and waited for a CPU, for the thread that waited longest. It is None if the system does not count this time, and
    always 0 on a machine whose counter stands still.

    `startup_s` is the extra time of the first steps over later ones: mainly compiling that no cache saved. For a
    compiled model, `graph_breaks` holds the reasons why it is not one graph; `recompiled` counts graphs compiled after
    the first steps, because shapes keep changing. If graphs were still compiled or recorded in the second half of the
    block, it is not `settled`: nobody knows the mean.

    An `in_loop` measurement is of the user's training loop, with new batches. `wait_share` is the share of its time for
    which the device had nothing to do because no batch was there.

    If several `devices` train together, samples are those of all, peaks the largest of any; all else is the first's.
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
    abandoned: bool = False
    steady: bool = True
    discarded: tuple[str, ...] = ()
    contaminated_by: tuple[str, ...] = ()
    startup_s: float = 0.0
    graph_breaks: tuple[str, ...] = ()
    recompiled: int = 0
    settled: bool = True
    in_loop: bool = False
    wait_share: float = 0.0
    host_delay: float | None = None
    devices: int = 1

    @property
    def mean_ms(self) -> float:
        """The mean time of a step: what training pays for each."""
        return statistics.fmean(self.step_ms)

    @property
    def samples_per_s(self) -> float:
        return 1000 * self.samples_per_step / self.mean_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A reason why a policy was not measured; `where` is `file:line` if the user's code raised an exception.

    `in_update` is True if the loss scaler, the optimizer or the clipping of gradients raised it: no module is at fault.
    `in_batches` is True if some batches break the loss by themselves, which the message names.
    """

    kind: FailureKind
    message: str
    where: str | None = None
    exception: str | None = None
    in_update: bool = False
    in_batches: bool = False

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}" + (f" ({self.where})" if self.where else "")


Outcome = Measurement | Failure


def outcome_to_dict(outcome: Outcome) -> dict[str, Any]:
    """Returns the outcome as plain data for a journal; `outcome_from_dict` is the inverse."""
    return {"failed": isinstance(outcome, Failure), **asdict(outcome)}


def outcome_from_dict(data: Mapping[str, Any]) -> Outcome:
    """Returns the outcome that `outcome_to_dict` wrote; raises `ValueError` if the data is not an outcome."""
    fields = {key: value for key, value in data.items() if key != "failed"}
    outcome: Outcome = adapter_for(Failure if data["failed"] else Measurement).validate_python(fields)
    if isinstance(outcome, Measurement):
        _require_possible(outcome)
    return outcome


def _require_possible(one: Measurement) -> None:
    """Raises `ValueError` for figures that no measurement can have."""
    sizes = {"samples_per_step": (one.samples_per_step,), "step_ms": one.step_ms, "devices": (one.devices,)}
    peaks = {name: (getattr(one, name),) for name in ("peak_allocated_mib", "peak_reserved_mib")}
    for name, values in (sizes | peaks).items():
        if not values or not all(0 < value < _IMPOSSIBLE for value in values):
            raise ValueError(f"{name}: no measurement has this figure")
    for name in ("warmup_s", "skipped_share", "startup_s", "wait_share", "host_delay", "energy_j_per_sample"):
        if not 0 <= (getattr(one, name) or 0) < _IMPOSSIBLE:
            raise ValueError(f"{name}: no measurement has this figure")
