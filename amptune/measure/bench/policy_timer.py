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
from amptune.measure.bench.step_timing import (
    ALONE,
    SETTLE_SHARE,
    TELLING_STEPS,
    StepTimer,
    Surroundings,
    WarmUp,
    is_far_behind,
)
from amptune.measure.bench.stillness import Stillness
from amptune.measure.results.outcome import Effort, Measurement
from amptune.policy.settings import Policy
from amptune.runtime.graphs.dispatch import Recordings
from amptune.runtime.graphs.step_recordings import StepRecordings
from amptune.runtime.tuned import Tuned
from amptune.workload.workload import Workload

__all__ = ["LEAST_FIRST_STEPS", "PolicyTimer", "price_of_checks"]

# The losses of the `FIRST_STEPS` are kept to compare policies; fewer if a step is slow. CUDA graphs of passes are
# recorded in the second step, of whole steps in the fourth, so only later ones show their step time.
LEAST_FIRST_STEPS, LEAST_FIRST_STEPS_PREPARING = 3, 6
FIRST_STEPS_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps:
    """The first steps of a trial: their losses, the first's gradient norm, the time of the last.

    `settled_ms` are the times of those that prepared nothing for later ones.
    """

    losses: tuple[float, ...]
    gradient_norm: float | None
    last_ms: float
    settled_ms: tuple[float, ...]


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
        around = Surroundings(
            begin=begin,
            prepared=partial(self._prepared, tuned),
            turns=self.workload.ended_epochs or ALONE.turns,
            stillness=stillness,
        )
        started_s = self.clock.now_s()
        effort = replace(effort, settle_s=min(effort.settle_s, SETTLE_SHARE * effort.time_limit_s))
        first = self._first_steps(stepper, effort, prepares=prepares(tuned.policy))
        recordings = tuned.recordings
        sample = self.steps.bound(stepper, first.settled_ms, effort, around)
        price_ms = 0.0
        if sample is None and recordings is not None:
            price_ms = price_of_checks(self.clock, recordings, stepper, first.last_ms)
        warm_s = self.clock.now_s()
        compiled = self.compilations.graphs
        warm_up = WarmUp(step_ms=first.last_ms)
        if sample is None:
            warm_up = self.steps.warm_up(stepper, first.last_ms, effort, around)
            sample = self.steps.bound(stepper, warm_up.behind_ms, effort, around)
        warmup_s, warmup_steps = self.clock.now_s() - warm_s, stepper.steps
        is_lost = sample is not None
        if sample is None:
            sample = self.steps.sample(stepper, warm_up.step_ms, effort, started_s, around)
        steps = stepper.steps
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
            losses=first.losses,
            gradient_norm=first.gradient_norm,
            skipped_share=skipped,
            alloc_retries=self.memory.alloc_retries(),
            energy_j_per_sample=None if kept.step_j is None else kept.step_j / samples,
            abandoned=is_lost,
            steady=warm_up.steady,
            discarded=sample.discarded,
            startup_s=max(0.0, warm_s - started_s - len(first.losses) * first.last_ms / 1000),
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

    def _first_steps(self, stepper: Stepper, effort: Effort, *, prepares: bool) -> FirstSteps:
        """Runs the first steps, no more of them than show that a policy is far behind the trial's limit."""
        least = LEAST_FIRST_STEPS_PREPARING if prepares else LEAST_FIRST_STEPS
        start_s = self.clock.now_s()
        loss, norm = stepper.first_step()
        losses, times_ms = [loss], [1000 * (self.clock.now_s() - start_s)]
        settled_ms = times_ms if not prepares and is_far_behind(times_ms, effort) else []
        while len(losses) < FIRST_STEPS and (len(losses) < least or self.clock.now_s() - start_s < FIRST_STEPS_S):
            if is_far_behind(settled_ms, effort):
                break
            times_ms += self.clock.time_steps(lambda: losses.append(float(stepper())), 1)
            settled_ms = times_ms[least - TELLING_STEPS :]
        broken = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if broken is not None:
            raise NonFiniteError(f"the loss is {losses[broken]} at step {broken + 1}")
        return FirstSteps(
            losses=tuple(losses),
            gradient_norm=norm,
            last_ms=times_ms[-1],
            settled_ms=tuple(settled_ms),
        )


def prepares(policy: Policy) -> bool:
    """Returns True if first steps compile, record or search for what later ones use."""
    return policy.compile != "off" or bool(policy.cuda_graphs) or policy.cudnn_benchmark


def price_of_checks(
    clock: Clock, recordings: Recordings | StepRecordings, step: Callable[[], object], step_ms: float
) -> float:
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
    return max(0.0, checked_ms - step_ms) * calls_per_step / recordings.gap(checked_ms, step_ms)
