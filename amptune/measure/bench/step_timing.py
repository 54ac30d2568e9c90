"""Times steps: warms up until the step time is steady, then times one undisturbed block of steps.

A figure is the mean of a whole block, since training pays for its slow steps too. A block is discarded only for a cause
from outside that was recorded.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from amptune.measure.bench.clocks import Clock
from amptune.measure.bench.readings import (
    COMPILING,
    HOST_LOAD,
    NOT_REPEATED,
    Instruments,
    Readings,
    contamination,
    with_busy_clocks,
)
from amptune.measure.bench.run_delay import host_delay
from amptune.measure.bench.stillness import Stillness, StoppedTrees
from amptune.measure.results.outcome import ENERGY_S, Effort

__all__ = [
    "SETTLE_SHARE",
    "TELLING_STEPS",
    "Sample",
    "StepTimer",
    "TimedBlock",
    "WarmUp",
    "is_far_behind",
    "is_steady",
    "mean_half_width",
]

# Warm-up is over when the medians of three successive stretches of steps lie this close together. Beside programs that
# are always there they never do: it then takes twice as many.
STEADY, STRETCHES = 0.03, 3
# Intended time of a stretch of steps, timed without a break; at most 50 steps, so that a wrong first guess is cheap.
STRETCH_S = 0.1
STRETCH_STEPS = 50
# A disturbed block is timed again up to this often in a trial. A disturbance of one block more in a row is the machine
# as it is, until as many in a row lack it.
MAX_REPEATS = 2
# Waiting for graphs that are still compiled or recorded takes at most this share of a trial's time limit, twice. No
# block is timed again later than that: the limit includes the worker's start.
SETTLE_SHARE = 1 / 4
# A trial is over if so many steps take `FAR` times as long as its limit; or one alone that takes longer than that by
# what a first step may take for loading kernels.
TELLING_STEPS, FAR, LOADING_S = 2, 2.0, 5.0

# A mean's interval is that of a Gaussian: it only decides when to stop. Fewer steps have none.
_GAUSSIAN_95, _FEWEST_TIMES = 1.96, 6

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """The work around the steps that are timed.

    `begin` is called before each block, `prepared` returns how many graphs were compiled or recorded so far, `turns`
    how often a script's epoch has ended within a step, and `stillness` stops the processes that compile beside a block.
    """

    begin: Callable[[], object] = lambda: None
    prepared: Callable[[], int] = lambda: 0
    turns: Callable[[], int] = lambda: 0
    stillness: Stillness = field(default_factory=Stillness)


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """A finished warm-up: the step time at its end, its number of steps, and whether the step time was steady.

    `behind_ms` are the last steps, if the warm-up ended early since all of them were above the limit of the trial.
    """

    step_ms: float
    steps: int = 0
    steady: bool = False
    behind_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBlock:
    """Steps timed in a row, the readings before and after them, and the codes of what these show.

    The clocks of `after` were read while the device was busy. `leads` steps between the readings are not timed: those
    that follow a wait. It is not `settled` if graphs were still compiled or recorded in its second half.
    """

    step_ms: tuple[float, ...]
    before: Readings
    after: Readings
    contaminated_by: tuple[str, ...]
    leads: int = 0
    settled: bool = True

    @property
    def steps(self) -> int:
        """The steps between the readings."""
        return self.leads + len(self.step_ms)

    @property
    def host_delay(self) -> float | None:
        """The time that the longest waiting thread waited for a CPU, in seconds per second; None if it is unknown."""
        return host_delay(self.before.run_delays, self.after.run_delays)

    @property
    def step_j(self) -> float | None:
        """Energy of a step, to within the counter's interval of 0.1 s; None if the block took less than `ENERGY_S`."""
        before_j, after_j = self.before.energy_j, self.after.energy_j
        if before_j is None or after_j is None or sum(self.step_ms) < 1000 * ENERGY_S:
            return None
        return (after_j - before_j) / self.steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The block to use, and the reason why each earlier one was discarded."""

    kept: TimedBlock
    discarded: tuple[str, ...]


ALONE = Surroundings()


class StepTimer:
    """A timer of steps for one trial after another that remembers lasting disturbances.

    A cause seen in `MAX_REPEATS` + 1 blocks in a row, of any trials, is the machine as it is: no block is repeated for
    it until as many in a row lack it. None is repeated for a state that the load itself brings about, as the power cap.
    """

    def __init__(self, clock: Clock, instruments: Instruments) -> None:
        self._clock = clock
        self._instruments = instruments
        self._latest: deque[frozenset[str]] = deque(maxlen=MAX_REPEATS + 1)
        self.lasting: frozenset[str] = frozenset()

    def warm_up(self, step: Step, step_ms: float, effort: Effort, around: Surroundings = ALONE) -> WarmUp:
        """Runs stretches of steps until they agree; `step_ms` is a first guess at a step's time.

        Stretches in which graphs were compiled or recorded are followed by others, as long as `effort` allows. Others
        in a row whose steps are all above the trial's limit end it.
        """
        steps, began_s = 0, self._clock.now_s()
        quiet_ms, medians, settling = 0.0, list[float](), Settling(around.prepared())
        behind_ms: list[float] = []
        most = 2 * STRETCHES if HOST_LOAD in self.lasting else math.inf
        while not ((is_steady(medians) or len(medians) >= most) and settling.is_over) and (
            quiet_ms < 1000 * effort.warmup_s and self._clock.now_s() < began_s + effort.warmup_s + effort.settle_s
        ):
            times = self._clock.time_steps(step, _stretch(step_ms))
            steps += len(times)
            step_ms = statistics.median(times)
            medians.append(step_ms)
            is_quiet = not settling.goes_on(times, around.prepared())
            quiet_ms += sum(times) if is_quiet else 0.0
            behind_ms = [*behind_ms, *times] if is_quiet and is_behind(times, effort) else []
            if len(behind_ms) >= TELLING_STEPS:
                break
        return WarmUp(step_ms=step_ms, steps=steps, steady=is_steady(medians), behind_ms=tuple(behind_ms))

    def bound(self, step: Step, times_ms: Sequence[float], effort: Effort, around: Surroundings) -> Sample | None:
        """Returns what is known of a policy whose last steps took `times_ms` if it is behind the trial's limit.

        If they are above it and not far above it, others may have disturbed them: as many more tell, while what
        compiles beside them stands still. Returns None if the policy is not behind.
        """
        if is_far_behind(times_ms, effort):
            none = Readings()
            kept = TimedBlock(step_ms=tuple(times_ms), before=none, after=none, contaminated_by=())
            return Sample(kept=kept, discarded=())
        if len(times_ms) < TELLING_STEPS or not is_behind(times_ms, effort):
            return None
        glance = replace(effort, measure_s=0.0, settle_s=0.0, min_steps=TELLING_STEPS)
        with around.stillness.pause() as beside:  # its batches are those of the steps before
            kept = self._block(step, min(times_ms), glance, replace(around, begin=ALONE.begin), beside)
        is_disturbed = COMPILING in kept.contaminated_by or self._new_causes(kept)
        return Sample(kept=kept, discarded=()) if is_behind(kept.step_ms, effort) and not is_disturbed else None

    def sample(
        self, step: Step, step_ms: float, effort: Effort, started_s: float, around: Surroundings = ALONE
    ) -> Sample:
        """Times one block of steps, again while a new disturbance is seen; the trial began at `started_s`.

        A block in which graphs were compiled or recorded is not timed again: those would be missing from the next.
        """
        reasons: list[str] = []
        while True:
            block_start_s, prepared = self._clock.now_s(), around.prepared()
            with around.stillness.pause() as beside:
                block = self._block(step, step_ms, effort, around, beside)
            self._remember(block)
            new = self._new_causes(block)
            took_s = self._clock.now_s() - block_start_s
            again_until_s = self._clock.now_s() + took_s
            has_time = again_until_s < started_s + 2 * SETTLE_SHARE * effort.time_limit_s
            is_short = took_s <= (1 + MAX_REPEATS) * effort.measure_s  # else it has few steps that take long
            is_last = not (has_time and is_short) or len(reasons) == MAX_REPEATS
            if not new or effort.beside_compiling or around.prepared() > prepared or is_last:
                break
            reasons.append("+".join(new))
        return Sample(kept=block, discarded=tuple(reasons))

    def _remember(self, block: TimedBlock) -> None:
        """Counts a cause as lasting once the latest blocks all have it, and no longer once they all lack it."""
        self._latest.append(frozenset(block.contaminated_by))
        if len(self._latest) == self._latest.maxlen:
            self.lasting &= frozenset.union(*self._latest)
            self.lasting |= frozenset.intersection(*self._latest)

    def _new_causes(self, block: TimedBlock) -> tuple[str, ...]:
        """Returns the disturbances that are not known to last."""
        return tuple(code for code in block.contaminated_by if code not in self.lasting | NOT_REPEATED)

    def _block(
        self, step: Step, step_ms: float, effort: Effort, around: Surroundings, beside: StoppedTrees
    ) -> TimedBlock:
        if beside.has_stopped:  # the GPU finishes what they had given it
            self._clock.time_steps(step, _stretch(step_ms))
        around.begin()
        before = self._instruments.read()
        least_s = 0.0 if before.energy_j is None else min(effort.energy_s, effort.measure_s)
        busy: list[Readings] = []
        times: list[float] = []
        settling = Settling(around.prepared())
        until_ms = 1000 * (effort.measure_s + effort.settle_s)
        while not _enough(times, effort, least_s) or not (settling.is_over or sum(times) >= until_ms):
            wanted = max(_stretch(step_ms), effort.min_steps - len(times))
            count = self._clock.lead + max(1, min(wanted, effort.max_steps - len(times)))
            turns = around.turns()
            stretch = self._clock.time_steps(step, count, lambda: busy.append(self._instruments.clocks()))
            settling.goes_on(stretch, around.prepared())
            times += _without_turns(stretch[self._clock.lead :], (1 + self._clock.lead) * (around.turns() - turns))
            step_ms = statistics.median(times)
        after = with_busy_clocks(self._instruments.read(), busy)
        codes = contamination(before, after, self._instruments.sm_clock_max_mhz())
        codes += () if beside.is_quiet else (COMPILING,)
        return TimedBlock(
            step_ms=tuple(times),
            before=before,
            after=after,
            contaminated_by=codes,
            leads=self._clock.lead * len(busy),
            settled=settling.is_over,
        )


class Settling:
    """Steps in a row, and whether graphs are still compiled or recorded between them.

    That is over once at least half of the time has passed without. `count` is the number of graphs before.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._before_last_ms = self._ms = 0.0

    def goes_on(self, times_ms: Sequence[float], count: int) -> bool:
        """Adds a stretch of steps, after which there are `count` graphs; returns True if it brought one."""
        self._ms += sum(times_ms)
        has_come = count > self._count
        if has_come:
            self._count, self._before_last_ms = count, self._ms
        return has_come

    @property
    def is_over(self) -> bool:
        return 2 * self._before_last_ms <= self._ms


def is_behind(times_ms: Sequence[float], effort: Effort, by: float = 1.0) -> bool:
    """Returns True if all of these steps took more than `by` times as long as the trial's limit."""
    limit_ms = effort.abandon_above_ms
    return limit_ms is not None and min(times_ms, default=0.0) > by * limit_ms


def is_far_behind(times_ms: Sequence[float], effort: Effort) -> bool:
    """Returns True if these steps need no others to tell that a policy is behind the trial's limit."""
    spare_ms = 0.0 if len(times_ms) >= TELLING_STEPS else 1000 * LOADING_S
    return is_behind([ms - spare_ms for ms in times_ms], effort, by=FAR)


def is_steady(medians: Sequence[float]) -> bool:
    """Returns True if the last three agree to `STEADY` and do not rise or fall steadily by over half of it.

    Two may agree by chance on a slope. The end of a warm-up is often a slope, and so is a GPU's clock that sinks under
    its first load.
    """
    if len(medians) < STRETCHES:
        return False
    low, middle, high = sorted(medians[-STRETCHES:])
    sloping = medians[-2] == middle and high - low > STEADY / 2 * low
    return high - low <= STEADY * low and not sloping


def mean_half_width(values: Sequence[float]) -> float:
    """Returns half the width of the mean's 95 % interval, relative to the mean; infinite for under 6 values.

    It assumes independent values, and steps in a row are not independent. It therefore only decides when to stop;
    claims rest on rounds of trials.
    """
    if len(values) < _FEWEST_TIMES:
        return math.inf
    mean = statistics.fmean(values)
    return _GAUSSIAN_95 * statistics.stdev(values, mean) / math.sqrt(len(values)) / mean


def _enough(times: Sequence[float], effort: Effort, least_s: float = 0.0) -> bool:
    """Returns True if the mean is precise, after at least `least_s`, or if the time or steps are used up."""
    if len(times) < effort.min_steps:
        return len(times) >= effort.max_steps
    long_enough = sum(times) >= 1000 * effort.measure_s or len(times) >= effort.max_steps
    return long_enough or (sum(times) >= 1000 * least_s and mean_half_width(times) <= effort.precision)


def _without_turns(times_ms: Sequence[float], count: int) -> Sequence[float]:
    """Returns steps without the slowest, in which epochs ended, or came after that; all if these are half of them."""
    if not 0 < 2 * count < len(times_ms):
        return times_ms
    return sorted(times_ms)[:-count]


def _stretch(step_ms: float) -> int:
    """Returns the number of steps that take about `STRETCH_S`."""
    return max(1, round(min(STRETCH_STEPS, 1000 * STRETCH_S / step_ms if step_ms else math.inf)))
