"""How much faster one policy is than another, and how sure that is. Pure: from rounds of measurements to intervals."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from amptune.measure.outcome import Measurement, Outcome
from amptune.policy.settings import Policy

__all__ = ["ENOUGH_LAUNCHES", "Ratio", "Round", "fastest_of", "launches_of", "ratio_between", "ratio_of"]

# With this many process launches the spread between them can be told; with fewer, only that within them.
ENOUGH_LAUNCHES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Every contender measured once, in turn. Rounds with the same `launch` ran in the same processes."""

    launch: int
    outcomes: Mapping[Policy, Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A speed ratio with its 95 % interval, above 1 is faster; `launches` is how many process launches it rests on."""

    value: float
    low: float
    high: float
    launches: int = 0

    @property
    def shows_a_difference(self) -> bool:
        return self.low > 1 or self.high < 1

    @property
    def half_width(self) -> float:
        """Of the interval, relative to the value."""
        return (self.high - self.low) / 2 / self.value

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.value:.2f}× (measured once, which claims nothing)"
        digits = 2 if abs(self.value - 1) >= 0.05 else 3
        return f"{self.value:.{digits}f}× [{self.low:.{digits}f}, {self.high:.{digits}f}]"


NO_RATIO = Ratio(value=math.nan, low=0.0, high=math.inf)


def ratio_between(rounds: Iterable[Round], a: Policy, b: Policy) -> Ratio:
    """Samples per second under `a` over those under `b`, in the rounds that both finished."""
    pairs: dict[int, list[float]] = defaultdict(list)
    for one in rounds:
        first, second = one.outcomes.get(a), one.outcomes.get(b)
        if isinstance(first, Measurement) and isinstance(second, Measurement):
            pairs[one.launch].append(first.samples_per_s / second.samples_per_s)
    return ratio_of(list(pairs.values()))


def ratio_of(launches: Sequence[Sequence[float]]) -> Ratio:
    """The ratio behind pairs measured side by side, one list of pairs' ratios a launch, with a 95 % interval.

    A pair's two measurements are neighbours in time, so drift cancels; a launch is worth its median pair, so an
    outlier does too; and since launches differ by more than the pairs within one, the interval is Student's t
    over launches, on logarithms. A bootstrap over three launches would hold the truth in under 80 % of cases.
    """
    if not any(launches):
        return NO_RATIO
    logs = [[math.log(ratio) for ratio in launch] for launch in launches]
    centres = [statistics.median(launch) for launch in logs]
    enough = len(centres) >= ENOUGH_LAUNCHES
    middle, half = _mean_and_half_width(centres if enough else [log for launch in logs for log in launch])
    low, high = middle - half, middle + half
    if not enough:  # what launches do to a ratio cannot be told, but those seen are to be held
        low, high = min(low, *centres), max(high, *centres)
    return Ratio(value=math.exp(middle), low=_exp(low), high=_exp(high), launches=len(centres))


def fastest_of(rounds: Sequence[Round], policies: Sequence[Policy]) -> Policy:
    """By direct comparison, in the rounds that two have in common: what each is to a third has its noise too."""
    fastest = policies[0]
    for policy in policies[1:]:
        if ratio_between(rounds, policy, fastest).value > 1:
            fastest = policy
    return fastest


def launches_of(rounds: Sequence[Round]) -> int:
    """How many process launches the rounds ran in."""
    return len({one.launch for one in rounds})


def _mean_and_half_width(values: Sequence[float]) -> tuple[float, float]:
    """The mean and half of its 95 % interval by Student's t; one value has no spread to speak of."""
    from scipy.special import stdtrit

    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, math.inf
    return mean, float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))


def _exp(log: float) -> float:
    return math.inf if log > 700 else math.exp(log)
