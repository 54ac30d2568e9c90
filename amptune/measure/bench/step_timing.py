"""Times steps: warms up until the step time is steady, then times one undisturbed block of steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from amptune.measure.bench.clocks import Clock
from amptune.measure.bench.readings import (
    COMPILING,
    NOT_REPEATED,
    PASSING,
    Instruments,
    Readings,
    contamination,
    with_busy_clocks,
)
from amptune.measure.bench.run_delay import host_delay
from amptune.measure.bench.stillness import Stillness, StoppedTrees
from amptune.measure.results.outcome import ENERGY_S, Effort

__all__ = ["Sample", "StepTimer", "TimedBlock", "WarmUp", "is_steady", "median_half_width"]

# Warm-up is over when the medians of three successive stretches of steps lie this close together.
STEADY = 0.03
# Intended time of a stretch of steps, timed without a break; at most 50 steps, so that a wrong first guess is cheap.
STRETCH_S = 0.1
STRETCH_STEPS = 50
# A disturbed block is timed again up to this often in a trial. A disturbance that remains then is permanent.
MAX_REPEATS = 2
# No block is timed again after this share of the trial's time limit: the limit includes the worker's start.
REPEAT_UNTIL = 0.5

Step = Callable[[], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """A finished warm-up: the step time at its end, its number of steps, and whether the step time was steady."""

    step_ms: float
    steps: int = 0
    steady: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedBlock:
    """Steps timed in a row, the readings before and after them, and the codes of what these show.

    The clocks and the temperature of `after` were read while the device was busy. `untimed` steps ran before the block.
    """

    step_ms: tuple[float, ...]
    before: Readings
    after: Readings
    contaminated_by: tuple[str, ...]
    untimed: int = 0

    @property
    def host_delay(self) -> float | None:
        """The time that the longest waiting thread waited for a CPU, in seconds per second; None if it is unknown."""
        return host_delay(self.before.run_delays, self.after.run_delays)

    @property
    def energy_j(self) -> float | None:
        """Energy of these steps, to within the counter's interval of 0.1 s; None if they took less than `ENERGY_S`."""
        before_j, after_j = self.before.energy_j, self.after.energy_j
        if before_j is None or after_j is None or sum(self.step_ms) < 1000 * ENERGY_S:
            return None
        return after_j - before_j


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The block to use, the reason why each earlier one was discarded, and the number of steps in and before them."""

    kept: TimedBlock
    discarded: tuple[str, ...]
    steps: int


class StepTimer:
    """A timer of steps for one trial after another that remembers lasting disturbances.

    A cause that came back in every repeat is the machine's steady state. Later trials are not repeated for it, and none
    for a state that the load itself brings about, such as the power cap.
    """

    def __init__(self, clock: Clock, instruments: Instruments) -> None:
        self._clock = clock
        self._instruments = instruments
        self._lasting: frozenset[str] = frozenset()

    def warm_up(self, step: Step, step_ms: float, effort: Effort) -> WarmUp:
        """Runs stretches of steps until they agree; `step_ms` is a first guess at a step's time."""
        steps, deadline_s = 0, self._clock.now_s() + effort.warmup_s
        medians: list[float] = []
        while not is_steady(medians) and self._clock.now_s() < deadline_s:
            times = self._clock.time_steps(step, _stretch(step_ms))
            steps += len(times)
            step_ms = statistics.median(times)
            medians.append(step_ms)
        return WarmUp(step_ms=step_ms, steps=steps, steady=is_steady(medians))

    def sample(
        self, step: Step, step_ms: float, effort: Effort, started_s: float, stillness: Stillness | None = None
    ) -> Sample:
        """Times one block of steps, again while a new disturbance is seen; the trial began at `started_s`.

        What compiles beside it is stopped for each block.
        """
        stillness = stillness or Stillness()
        blocks: list[TimedBlock] = []
        reasons: list[str] = []
        while True:
            block_start_s = self._clock.now_s()
            with stillness.pause() as beside:
                blocks.append(self._block(step, step_ms, effort, beside))
            new = self._new_causes(blocks[-1])
            again_until_s = 2 * self._clock.now_s() - block_start_s
            if not new or again_until_s >= started_s + REPEAT_UNTIL * effort.time_limit_s:
                break
            if len(reasons) == MAX_REPEATS:
                self._lasting |= frozenset.intersection(*(frozenset(block.contaminated_by) for block in blocks))
                break
            reasons.append("+".join(new))
        steps = sum(block.untimed + len(block.step_ms) for block in blocks)
        return Sample(kept=blocks[-1], discarded=tuple(reasons), steps=steps)

    def _new_causes(self, block: TimedBlock) -> tuple[str, ...]:
        """Returns the disturbances not known to last. A `PASSING` one counts as lasting until a block without it."""
        self._lasting -= PASSING - set(block.contaminated_by)
        return tuple(code for code in block.contaminated_by if code not in self._lasting | NOT_REPEATED)

    def _block(self, step: Step, step_ms: float, effort: Effort, beside: StoppedTrees) -> TimedBlock:
        # The GPU finishes what the stopped processes had given it while these steps run.
        untimed = len(self._clock.time_steps(step, _stretch(step_ms))) if beside.has_stopped else 0
        before = self._instruments.read()
        least_s = 0.0 if before.energy_j is None else min(effort.energy_s, effort.measure_s)
        busy: list[Readings] = []
        times: list[float] = []
        while not _enough(times, effort, least_s):
            count = min(_stretch(step_ms), effort.max_steps - len(times))
            times += self._clock.time_steps(step, count, lambda: busy.append(self._instruments.clocks()))
            step_ms = statistics.median(times)
        after = with_busy_clocks(self._instruments.read(), busy)
        codes = contamination(before, after, self._instruments.sm_clock_max_mhz())
        codes += () if beside.is_quiet else (COMPILING,)
        return TimedBlock(step_ms=tuple(times), before=before, after=after, contaminated_by=codes, untimed=untimed)


def is_steady(medians: Sequence[float]) -> bool:
    """Returns True if the last three agree to `STEADY` and do not rise or fall steadily by over half of it.

    Two may agree by chance on a slope. The end of a warm-up is often a slope, and so is a GPU's clock that sinks under
    its first load.
    """
    if len(medians) < 3:
        return False
    low, middle, high = sorted(medians[-3:])
    sloping = medians[-2] == middle and high - low > STEADY / 2 * low
    return high - low <= STEADY * low and not sloping


def median_half_width(values: Sequence[float]) -> float:
    """Returns half the width of the median's 95 % interval, relative to the median; infinite for under 6 values.

    The interval lies between order statistics, by the binomial distribution, for any distribution of the values
    (Conover, Practical Nonparametric Statistics, 3.2). It assumes independent values, and steps in a row are not
    independent. It therefore only decides when to stop; claims rest on rounds of trials.
    """
    rank = _rank_for_95_percent(len(values))
    if rank == 0:
        return math.inf
    ordered = sorted(values)
    return (ordered[-rank] - ordered[rank - 1]) / 2 / statistics.median(ordered)


def _rank_for_95_percent(count: int) -> int:
    """Returns the largest k such that the k-th smallest and k-th largest enclose the median with 95 %; 0 if none.

    The computation uses exact integers: importing scipy.stats would leave the device idle in the middle of a trial.
    """
    rank, tail = 0, 1
    while 40 * tail <= 2**count:  # P(at most `rank` of `count` values lie below the median) <= 2.5 %
        rank += 1
        tail += math.comb(count, rank)
    return rank


def _enough(times: Sequence[float], effort: Effort, least_s: float = 0.0) -> bool:
    """Returns True if the median is precise, after at least `least_s`, or if the time or steps are used up."""
    if len(times) < effort.min_steps:
        return len(times) >= effort.max_steps
    long_enough = sum(times) >= 1000 * effort.measure_s or len(times) >= effort.max_steps
    return long_enough or (sum(times) >= 1000 * least_s and median_half_width(times) <= effort.precision)


def _stretch(step_ms: float) -> int:
    """Returns the number of steps that take about `STRETCH_S`."""
    return max(1, min(STRETCH_STEPS, round(1000 * STRETCH_S / max(step_ms, 0.01))))
