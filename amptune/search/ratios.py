"""How much better one policy is than another, and how sure that is. Pure: from rounds of measurements to intervals."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from amptune.measure.outcome import Measurement, Outcome
from amptune.policy.settings import Policy
from amptune.search.objective import SPEED_SLACK, THROUGHPUT, Objective

__all__ = [
    "ENOUGH_LAUNCHES",
    "FEW_LAUNCHES_DOUBT",
    "LAUNCHES_DIFFER",
    "Ratio",
    "Round",
    "Spread",
    "best_among",
    "is_fast_enough",
    "launches_of",
    "places_in",
    "ratio_between",
    "ratio_of",
    "spread_of_ratios",
    "spread_of_times",
    "spread_within_launches",
]

# With this many process launches the spread between them can be told; with fewer, only that within them.
ENOUGH_LAUNCHES = 3
# The rounds of fewer launches do not tell what differs between launches: their interval is made so many times as wide,
# and wider by what a ratio is known to differ by between launches: a standard deviation of 0.1 to 0.6 % was measured on
# an H200 where the GPU is the limit (reports/h200/trust). With the spread that all contenders share it then holds the
# truth in 96 to 100 % of simulated comparisons of three or six policies (tests/search/test_ratios.py).
FEW_LAUNCHES_DOUBT = 2.0
LAUNCHES_DIFFER = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Every contender measured once, in turn, to be compared by the objective.

    Rounds with the same `launch` ran in the same processes.
    """

    launch: int
    outcomes: Mapping[Policy, Outcome]
    objective: Objective = THROUGHPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio with its 95 % interval, above 1 is better; `launches` is how many process launches it rests on."""

    value: float
    low: float
    high: float
    launches: int = 0

    @property
    def shows_a_difference(self) -> bool:
        return self.low > 1 or self.high < 1

    def shows_more_than(self, value: float, *, doubt: float = 1.0) -> bool:
        """Whether even an interval `doubt` times as wide, on the logarithm, would be above the value."""
        return self.low > 0 and self.value * (self.low / self.value) ** doubt > value

    @property
    def half_width(self) -> float:
        """Of the interval, relative to the value."""
        return (self.high - self.low) / 2 / self.value

    @property
    def inverse(self) -> Ratio:
        """The other way round."""
        high = 1 / self.low if self.low > 0 else math.inf
        return Ratio(value=1 / self.value, low=1 / self.high, high=high, launches=self.launches)

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.value:.2f}× (measured once, which claims nothing)"
        digits = 2 if abs(self.value - 1) >= 0.05 else 3
        return f"{self.value:.{digits}f}× [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A standard deviation on the logarithm, and the degrees of freedom that it is known with."""

    deviation: float
    freedom: int


NO_RATIO = Ratio(value=math.nan, low=0.0, high=math.inf)


def ratio_between(rounds: Iterable[Round], a: Policy, b: Policy, *, by: Objective | None = None) -> Ratio:
    """The score of `a` over that of `b`, in the rounds that have both.

    By the rounds' own objective, or by another one: samples per second under `a` over those under `b`, or the peak
    memory or the energy a sample of `b` over that of `a`.
    """
    rounds = list(rounds)
    pairs = _pairs(rounds, a, b, by)
    if a == b or len(pairs) >= ENOUGH_LAUNCHES:
        return ratio_of(pairs)
    objective = by or (rounds[-1].objective if rounds else THROUGHPUT)
    differ = 0.0 if objective.name == "memory" else LAUNCHES_DIFFER  # peaks do not
    return ratio_of(pairs, spread_of_ratios(rounds, by), launches_differ=differ)


def spread_of_ratios(rounds: Sequence[Round], by: Objective | None = None) -> Spread | None:
    """How much the ratio of any two policies differs from round to round, by all those that stand in every round.

    What is left of each score once its policy and its round are taken out of it: the residual of a two-way layout
    without replication (Scheffé, "The Analysis of Variance", 1959, section 4.2), twice, as a ratio has two of them.
    """
    table = _scores_in_all(rounds, by)
    if len(table) < 2 or len(rounds) < 2:
        return None
    freedom = (len(table) - 1) * (len(rounds) - 1)
    by_policy = [statistics.fmean(row) for row in table]
    by_round = [statistics.fmean(column) for column in zip(*table, strict=True)]
    middle = statistics.fmean(by_policy)
    squares = (
        (log - own - common + middle) ** 2
        for row, own in zip(table, by_policy, strict=True)
        for log, common in zip(row, by_round, strict=True)
    )
    return Spread(deviation=math.sqrt(2 * sum(squares) / freedom), freedom=freedom)


def spread_of_times(rounds: Sequence[Round]) -> Spread | None:
    """How much the time of a policy differs from round to round, drift included, by all that stand in every round."""
    table = _scores_in_all(rounds, THROUGHPUT)
    if not table or len(rounds) < 2:
        return None
    deviation = math.sqrt(statistics.fmean(map(statistics.variance, table)))
    return Spread(deviation=deviation, freedom=len(table) * (len(rounds) - 1))


def _scores_in_all(rounds: Sequence[Round], by: Objective | None) -> list[list[float]]:
    """The logarithms of the scores of each policy that has one in every round, a list a policy."""
    policies = dict.fromkeys(policy for one in rounds for policy in one.outcomes)
    table = ([_score(one.outcomes.get(policy), by or one.objective) for one in rounds] for policy in policies)
    logs = ([math.log(score) for score in row if score is not None] for row in table)
    return [row for row in logs if len(row) == len(rounds)]


def _pairs(rounds: Iterable[Round], a: Policy, b: Policy, by: Objective | None = None) -> list[list[float]]:
    """The ratios of `a` to `b`, a list a launch."""
    pairs: dict[int, list[float]] = defaultdict(list)
    for one in rounds:
        first, second = (_score(one.outcomes.get(policy), by or one.objective) for policy in (a, b))
        if first is not None and second is not None:
            pairs[one.launch].append(first / second)
    return list(pairs.values())


def _score(outcome: Outcome | None, objective: Objective) -> float | None:
    return objective.score(outcome) if isinstance(outcome, Measurement) else None


def ratio_of(
    launches: Sequence[Sequence[float]], common: Spread | None = None, *, launches_differ: float = 0.0
) -> Ratio:
    """The ratio behind pairs measured side by side, one list of pairs' ratios a launch, with a 95 % interval.

    A pair's two measurements are neighbours in time, so drift cancels; a launch is worth its median pair, so an
    outlier does too; and since launches differ by more than the pairs within one, the interval is Student's t
    over launches, on logarithms. Over the pairs of few launches it is by the `common` spread of all that were measured
    in them, or by their own if that is larger: two pairs know next to nothing of their spread. `launches_differ` is the
    standard deviation between launches that they cannot show.
    """
    if not any(launches):
        return NO_RATIO
    logs = [[math.log(ratio) for ratio in launch] for launch in launches]
    centres = [statistics.median(launch) for launch in logs]
    enough = len(centres) >= ENOUGH_LAUNCHES
    if enough:
        middle, half = _mean_and_half_width(centres)
        low, high = middle - half, middle + half
    else:
        middle, half = _mean_and_half_width([log for launch in logs for log in launch], common)
        half = math.hypot(FEW_LAUNCHES_DOUBT * half, 2 * launches_differ / math.sqrt(len(centres)))
        low, high = min(middle - half, *centres), max(middle + half, *centres)  # those that were seen are held
    return Ratio(value=math.exp(middle), low=_exp(low), high=_exp(high), launches=len(centres))


def best_among(rounds: Sequence[Round], policies: Sequence[Policy], *, by: Objective | None = None) -> Policy:
    """By direct comparison, in the rounds that two have in common: what each is to a third has its noise too."""
    best = policies[0]
    for policy in policies[1:]:
        if ratio_between(rounds, policy, best, by=by).value > 1:
            best = policy
    return best


def is_fast_enough(rounds: Sequence[Round], policy: Policy, baseline: Policy, *, surely: bool = False) -> bool:
    """Whether the objective of the rounds lets a policy win that is so fast; `surely`, where that is known.

    By default the doubt is in its favour: its ratio to the baseline seems high enough, and the interval holds that it
    is. What was measured beside the baseline in no round is not said to be too slow.
    """
    objective = rounds[-1].objective if rounds else THROUGHPUT
    if not objective.needs_speed or policy == baseline:
        return True
    ratio = ratio_between(rounds, policy, baseline, by=THROUGHPUT)
    seems = objective.allows_speed(ratio.value) and ratio.high >= objective.least_speed
    if surely:
        return objective.allows_speed(ratio.low) or (seems and ratio.half_width < SPEED_SLACK)
    return seems or not ratio.launches


def launches_of(rounds: Sequence[Round]) -> int:
    """How many process launches the rounds ran in."""
    return len({one.launch for one in rounds})


def places_in(rounds: Sequence[Round]) -> int:
    """How many processes were started for the rounds: the contenders of each launch."""
    return sum({one.launch: len(one.outcomes) for one in reversed(rounds)}.values())


def spread_within_launches(rounds: Sequence[Round], baseline: Policy) -> float:
    """The standard deviation of a ratio to the baseline from round to round of one launch: the policies' median.

    Of speeds, where the objective needs a speed: those have more noise than peaks.
    """
    policies = {policy for one in rounds for policy in one.outcomes} - {baseline}
    by = THROUGHPUT if rounds and rounds[-1].objective.needs_speed else None
    spreads = []
    for policy in policies:
        launches = (launch for launch in _pairs(rounds, policy, baseline, by) if len(launch) > 1)
        variances = [statistics.variance(map(math.log, launch)) for launch in launches]
        if variances:
            spreads.append(math.sqrt(statistics.fmean(variances)))
    return statistics.median(spreads) if spreads else 0.0


def _mean_and_half_width(values: Sequence[float], common: Spread | None = None) -> tuple[float, float]:
    """The mean and half of its 95 % interval by Student's t; one value has no spread to speak of."""
    from scipy.special import stdtrit

    mean = statistics.fmean(values)
    if len(values) == 1:
        return mean, math.inf
    deviation, freedom = statistics.stdev(values), len(values) - 1
    if common is not None and common.freedom > freedom:
        deviation, freedom = max(deviation, common.deviation), common.freedom
    return mean, float(stdtrit(freedom, 0.975)) * deviation / math.sqrt(len(values))


def _exp(log: float) -> float:
    return math.inf if log > 700 else math.exp(log)
