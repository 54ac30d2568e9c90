"""Ratios between policies with their intervals, computed from rounds of measurements. Pure."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from amptune.measure.results.outcome import Measurement, Outcome
from amptune.policy.settings import Policy
from amptune.search.table.objective import SPEED_SLACK, THROUGHPUT, Objective

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

# With this many launches the spread between them can be estimated; with fewer, only the spread within them.
ENOUGH_LAUNCHES = 3
# Rounds of fewer launches do not show what differs between launches. Their interval is made this many times as wide,
# and widened by the known difference of a ratio between launches: a standard deviation of 0.1 to 0.6 % was measured on
# an H200 where the GPU is the limit (reports/h200/trust). With the spread that all contenders share, it then holds the
# truth in 96 to 100 % of simulated comparisons of three or six policies (tests/search/test_ratio.py).
FEW_LAUNCHES_DOUBT = 2.0
LAUNCHES_DIFFER = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One measurement of every contender, in turn, to be compared by the objective.

    Rounds with the same `launch` ran in the same processes.
    """

    launch: int
    outcomes: Mapping[Policy, Outcome]
    objective: Objective = THROUGHPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A ratio with its 95 % interval; above 1 is better; `launches` is the number of launches behind it."""

    value: float
    low: float
    high: float
    launches: int = 0

    @property
    def shows_a_difference(self) -> bool:
        return self.low > 1 or self.high < 1

    def shows_more_than(self, value: float, *, doubt: float = 1.0) -> bool:
        """Returns True if even an interval `doubt` times as wide, on the logarithm, would be above the value."""
        return self.low > 0 and self.value * (self.low / self.value) ** doubt > value

    @property
    def half_width(self) -> float:
        """Half the width of the interval, relative to the value."""
        return (self.high - self.low) / 2 / self.value

    @property
    def inverse(self) -> Ratio:
        """The ratio of the same two policies in the other order."""
        high = 1 / self.low if self.low > 0 else math.inf
        return Ratio(value=1 / self.value, low=1 / self.high, high=high, launches=self.launches)

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.value:.2f}× (measured once, which claims nothing)"
        digits = 2 if abs(self.value - 1) >= 0.05 else 3
        return f"{self.value:.{digits}f}× [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A standard deviation on the logarithm, with its degrees of freedom."""

    deviation: float
    freedom: int


NO_RATIO = Ratio(value=math.nan, low=0.0, high=math.inf)


def ratio_between(rounds: Iterable[Round], a: Policy, b: Policy, *, by: Objective | None = None) -> Ratio:
    """Returns the score of `a` over that of `b`, from the rounds that have both.

    Scores are by the rounds' own objective, or by another one: samples per second of `a` over those of `b`, or peak
    memory or energy per sample of `b` over that of `a`.
    """
    rounds = list(rounds)
    pairs = _pairs(rounds, a, b, by)
    if a == b or len(pairs) >= ENOUGH_LAUNCHES:
        return ratio_of(pairs)
    objective = by or (rounds[-1].objective if rounds else THROUGHPUT)
    differ = 0.0 if objective.name == "memory" else LAUNCHES_DIFFER  # peaks do not differ between launches
    return ratio_of(pairs, spread_of_ratios(rounds, by), launches_differ=differ)


def spread_of_ratios(rounds: Sequence[Round], by: Objective | None = None) -> Spread | None:
    """Returns how much a ratio of two policies varies between rounds, from all policies present in every round.

    It takes the residual of each score after its policy's and its round's mean are removed: a two-way layout without
    replication (Scheffé, "The Analysis of Variance", 1959, section 4.2). A ratio has two scores: twice the variance.
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
    """Returns how much a policy's time varies between rounds, drift included, from policies present in every round."""
    table = _scores_in_all(rounds, THROUGHPUT)
    if not table or len(rounds) < 2:
        return None
    deviation = math.sqrt(statistics.fmean(map(statistics.variance, table)))
    return Spread(deviation=deviation, freedom=len(table) * (len(rounds) - 1))


def _scores_in_all(rounds: Sequence[Round], by: Objective | None) -> list[list[float]]:
    """Returns the logarithms of scores, one list per policy, for policies with a score in every round."""
    policies = dict.fromkeys(policy for one in rounds for policy in one.outcomes)
    table = ([_score(one.outcomes.get(policy), by or one.objective) for one in rounds] for policy in policies)
    logs = ([math.log(score) for score in row if score is not None] for row in table)
    return [row for row in logs if len(row) == len(rounds)]


def _pairs(rounds: Iterable[Round], a: Policy, b: Policy, by: Objective | None = None) -> list[list[float]]:
    """Returns the ratios of `a` to `b`, one list per launch."""
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
    """Returns the ratio of pairs measured side by side, with a 95 % interval; `launches` has one list per launch.

    A pair's two measurements are neighbours in time, so drift cancels. A launch counts by its median pair, so outliers
    cancel too. Launches differ by more than the pairs within one, so the interval is Student's t over launches, on
    logarithms. With few launches it is over their pairs, by the `common` spread of all policies measured in them or by
    the pairs' own spread if that is larger: two pairs tell almost nothing of their spread. `launches_differ` is the
    standard deviation between launches, which few launches cannot show.
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
        low, high = min(middle - half, *centres), max(middle + half, *centres)  # the interval holds every launch
    return Ratio(value=math.exp(middle), low=_exp(low), high=_exp(high), launches=len(centres))


def best_among(rounds: Sequence[Round], policies: Sequence[Policy], *, by: Objective | None = None) -> Policy:
    """Returns the best policy by direct comparison, in the rounds that two share: a third would add its noise."""
    best = policies[0]
    for policy in policies[1:]:
        if ratio_between(rounds, policy, best, by=by).value > 1:
            best = policy
    return best


def is_fast_enough(rounds: Sequence[Round], policy: Policy, baseline: Policy, *, surely: bool = False) -> bool:
    """Returns True if the rounds' objective lets a policy of this speed win; `surely` demands that this is known.

    By default doubt is in its favour: its ratio to the baseline looks high enough, and its interval reaches the needed
    speed. A policy that was never measured beside the baseline is not called too slow.
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
    """Returns the number of launches that the rounds ran in."""
    return len({one.launch for one in rounds})


def places_in(rounds: Sequence[Round]) -> int:
    """Returns the number of processes started for the rounds: the contenders of each launch."""
    return sum({one.launch: len(one.outcomes) for one in reversed(rounds)}.values())


def spread_within_launches(rounds: Sequence[Round], baseline: Policy) -> float:
    """Returns the standard deviation of a ratio to the baseline between rounds of one launch: the policies' median.

    It is that of speeds if the objective needs a speed: speeds have more noise than peaks.
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
    """Returns the mean and half of its 95 % interval by Student's t; the half is infinite for one value."""
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
