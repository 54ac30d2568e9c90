"""The figures of a policy that is applied to a model: its first steps, its warm-up, its timed block."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from amptune.measure.bench.clocks import Clock
from amptune.measure.bench.compilation import Compilations
from amptune.measure.bench.failures import NonFiniteError
from amptune.measure.bench.peak_memory import PeakMemory
from amptune.measure.bench.step import FIRST_STEPS, Stepper
from amptune.measure.bench.step_timing import StepTimer, Surroundings, WarmUp
from amptune.measure.bench.stillness import Stillness
from amptune.measure.results.outcome import Effort, Measurement
from amptune.runtime.graphs.check import CHECK_EVERY
from amptune.runtime.graphs.dispatch import Recordings
from amptune.runtime.tuned import Tuned
from amptune.workload.workload import Workload

__all__ = ["LEAST_FIRST_STEPS", "PolicyTimer", "price_of_checks"]

# The losses of the `FIRST_STEPS` are kept to compare policies; fewer if a step is slow. CUDA graphs are recorded in the
# second step, so only a later step shows their step time.
LEAST_FIRST_STEPS, LEAST_FIRST_STEPS_COMPILED = 3, 5
FIRST_STEPS_S = 1.0
# Waiting for graphs that are still compiled or recorded takes at most this share of a trial's time limit, twice.
SETTLE_SHARE = 1 / 4
# A step too slow to be of interest is timed only this often.
SLOW_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTimer:
    """Takes the figures of policies. A trial whose peak is above `memory_mib` fails."""

    workload: Workload
    clock: Clock
    memory: PeakMemory
    steps: StepTimer
    compilations: Compilations
    memory_mib: float | None

    def measured(
        self,
        tuned: Tuned,
        stepper: Stepper,
        effort: Effort,
        *,
        begin: Callable[[], None],
        require_sound: Callable[[int], float],
        stillness: Stillness,
    ) -> Measurement:
        """Returns the figures of a policy that is applied; `begin` is called before each block.

        `require_sound` is called after so many steps; it returns the share that was skipped, or raises.
        Raises `NonFiniteError` or `MemoryError`, what the step raises, and `PolicyApplyError` if recordings differ.
        """
        around = Surroundings(begin=begin, prepared=partial(self._prepared, tuned), stillness=stillness)
        started_s = self.clock.now_s()
        effort = replace(effort, settle_s=min(effort.settle_s, SETTLE_SHARE * effort.time_limit_s))
        eager = tuned.policy.compile == "off" and not tuned.policy.cuda_graphs
        least = LEAST_FIRST_STEPS if eager else LEAST_FIRST_STEPS_COMPILED
        losses, norm, last_ms = self._first_steps(stepper, least)
        recordings = tuned.recordings
        price_ms = 0.0 if recordings is None else price_of_checks(self.clock, recordings, stepper, last_ms)
        warm_s = self.clock.now_s()
        compiled = self.compilations.graphs
        slow = effort.abandon_above_ms is not None and last_ms > effort.abandon_above_ms
        warm_up = WarmUp(step_ms=last_ms) if slow else self.steps.warm_up(stepper, last_ms, effort, around)
        warmup_s = self.clock.now_s() - warm_s
        effort = _glance(effort) if slow else effort
        sample = self.steps.sample(stepper, warm_up.step_ms, effort, started_s, around)
        warmup_steps = len(losses) + warm_up.steps
        steps = warmup_steps + sample.steps
        if not math.isfinite(stepper.last_loss):
            raise NonFiniteError(f"the loss is {stepper.last_loss} after {steps} steps")
        skipped = require_sound(steps)
        taken = tuned.accumulate if self.workload.step is None else 1  # batches; the user's own step takes one
        samples = (tuned.policy.batch_size or self.workload.batch_size) * taken
        allocated, reserved = self.memory.peak_mib()
        self._require_within_limit(allocated)
        kept = sample.kept
        return Measurement(
            samples_per_step=samples,
            step_ms=tuple(ms + price_ms for ms in kept.step_ms),
            warmup_s=warmup_s,
            warmup_steps=warmup_steps,
            peak_allocated_mib=allocated,
            peak_reserved_mib=reserved,
            losses=losses,
            gradient_norm=norm,
            skipped_share=skipped,
            alloc_retries=self.memory.alloc_retries(),
            energy_j_per_sample=None if kept.step_j is None else kept.step_j / samples,
            abandoned=slow,
            steady=warm_up.steady,
            discarded=sample.discarded,
            startup_s=max(0.0, warm_s - started_s - len(losses) * last_ms / 1000),
            graph_breaks=self.compilations.breaks,
            recompiled=self.compilations.graphs - compiled,
            settled=kept.settled,
            contaminated_by=kept.contaminated_by,
            host_delay=kept.host_delay,
        )

    def _prepared(self, tuned: Tuned) -> int:
        """Returns how many graphs were compiled or recorded so far."""
        recordings = tuned.recordings
        return self.compilations.begun + (0 if recordings is None else recordings.made)

    def _require_within_limit(self, peak_mib: float) -> None:
        """Raises `MemoryError` above the limit; only a CPU needs this, a GPU's allocator enforces its limit."""
        if self.memory_mib is not None and peak_mib > self.memory_mib:
            allowed = f"{self.memory_mib:,.0f}" if self.memory_mib >= 1 else f"{self.memory_mib:.2g}"
            raise MemoryError(f"its peak of {peak_mib:,.0f} MiB is above the {allowed} MiB allowed")

    def _first_steps(self, stepper: Stepper, least: int) -> tuple[tuple[float, ...], float | None, float]:
        """Returns (losses, gradient norm of the first step, time of the last step in ms)."""
        start_s = self.clock.now_s()
        loss, norm = stepper.first_step()
        losses = [loss]
        took_ms = 0.0
        while len(losses) < FIRST_STEPS and (len(losses) < least or self.clock.now_s() - start_s < FIRST_STEPS_S):
            (took_ms,) = self.clock.time_steps(lambda: losses.append(float(stepper())), 1)
        broken = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if broken is not None:
            raise NonFiniteError(f"the loss is {losses[broken]} at step {broken + 1}")
        return tuple(losses), norm, took_ms


def price_of_checks(clock: Clock, recordings: Recordings, step: Callable[[], object], step_ms: float) -> float:
    """Returns the time in ms that comparing recordings with the model adds to a step in a long training.

    Its memory counts too. Raises `PolicyApplyError` if nothing was recorded, or if a replay differs.
    """
    recordings.require_some()
    checked_ms, before = math.inf, recordings.calls
    for _ in range(2):
        recordings.check_next()
        checked_ms = min(checked_ms, *clock.time_steps(step, 1))
    calls_per_step = (recordings.calls - before) / 2
    if recordings.doubt() is not None:
        clock.time_steps(step, 1)
    recordings.require_agreement()
    return max(0.0, checked_ms - step_ms) * calls_per_step / CHECK_EVERY


def _glance(effort: Effort) -> Effort:
    """Returns the effort for a policy too slow to be of interest: `SLOW_STEPS` steps, not timed again."""
    return replace(effort, measure_s=0.0, settle_s=0.0, min_steps=SLOW_STEPS, time_limit_s=0.0)
