"""The verdict: the policy that wins, and what may be claimed of it. Pure: computed from rounds of outcomes."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.table.gains import gain_in_words, goal_of
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.ratio import (
    ENOUGH_LAUNCHES,
    Ratio,
    Round,
    Spread,
    best_among,
    is_fast_enough,
    launches_of,
    ratio_between,
    ratio_of,
    spread_of_ratios,
    spread_of_times,
)

__all__ = [
    "NARROW",
    "NEGLIGIBLE",
    "Contender",
    "Verdict",
    "contenders_of",
    "departure_count",
    "is_worth_a_change",
    "level_with_the_best",
    "settled",
    "speed_not_shown",
    "verdict_of",
]

# An interval this narrow (half its width, relative) needs no further rounds.
NARROW = 0.01
ENOUGH_TO_STOP = 5
# To a user, two policies that differ by at most `NEGLIGIBLE` are equal. The simpler one is preferred, if the interval
# also excludes that they differ by more than `CLOSE`.
NEGLIGIBLE, CLOSE = 0.005, 0.01
# A ratio that differs by more than this from round to round is reported.
NOISY = 0.05
# The code of the finding that a policy is better, and the words for several such policies.
_BETTER = {"throughput": "faster", "memory": "less-memory", "energy": "less-energy"}
_BEST = {"throughput": "fastest", "memory": "that use least memory", "energy": "that use least energy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One policy's figures in a comparison. They are None if it failed, and `failure` says how.

    `vs_baseline` compares samples per second in the rounds that both finished, `gain` the figure of the objective.
    `step_ms` is as measured, so drift changes it and its interval; drift does not change a ratio. A policy that is
    `too_slow` for the objective cannot win.
    """

    policy: Policy
    samples_per_s: float | None = None
    step_ms: float | None = None
    step_ms_ci95: tuple[float, float] | None = None
    peak_memory_mib: float | None = None
    energy_j_per_sample: float | None = None
    vs_baseline: Ratio | None = None
    gain: Ratio | None = None
    too_slow: bool = False
    rounds: int = 0
    failure: Failure | None = None

    @property
    def speedup(self) -> float:
        """The ratio of its samples per second to the baseline's; 0 if it failed or the ratio is unknown."""
        return _value(self.vs_baseline)

    @property
    def merit(self) -> float:
        """The gain over the baseline by the objective; 0 if it failed or the gain is unknown."""
        return _value(self.gain)

    @property
    def place(self) -> tuple[bool, bool, float, float]:
        """The sort key of contenders: the best first, then policies that are too slow, failures last."""
        return self.failure is not None, self.too_slow, -self.merit, -(self.samples_per_s or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The winner among the contenders, the baseline it is compared with, and the reasons."""

    winner: Contender
    baseline: Contender
    contenders: tuple[Contender, ...]
    findings: tuple[Finding, ...]
    objective: Objective = THROUGHPUT

    @property
    def speedup(self) -> Ratio:
        """Samples per second under the winner over those of the baseline."""
        return self._of_winner(self.winner.vs_baseline)

    @property
    def gain(self) -> Ratio:
        """The gain by the objective: speedup, or peak memory or energy a sample, the baseline's over the winner's."""
        return self._of_winner(self.winner.gain)

    def _of_winner(self, ratio: Ratio | None) -> Ratio:
        return Ratio(value=1.0, low=1.0, high=1.0) if self.keeps_the_baseline or ratio is None else ratio

    @property
    def keeps_the_baseline(self) -> bool:
        return self.winner.policy == self.baseline.policy


def departure_count(policy: Policy) -> int:
    """Returns how many settings differ from stock PyTorch. Each FP32 rule counts; the batch size does not.

    Settings that keep half weights sound do not count either: a policy must not be preferred for lacking them.
    """
    own = {"batch_size", "accumulate", "master_weights", "keep_batchnorm_fp32"}
    settings = {name for name, _ in policy.departures()} - own
    return len(settings) + max(0, len(policy.fp32_modules) - 1) + max(0, len(policy.half_modules) - 1)


def verdict_of(
    rounds: Sequence[Round],
    baseline: Policy,
    eligible: Callable[[Policy], bool] = lambda _: True,
    *,
    doubt: float = 1.0,
) -> Verdict | None:
    """Returns a verdict for the best policy that is shown to be better; among equals, the one closest to stock PyTorch.

    The objective of the rounds says which is best. Only the baseline and `eligible` policies can win, and only if they
    were still measured in the last round: a beaten policy is not. Returns None if the baseline failed. Intervals are
    made `doubt` times as wide before they have to exclude 1.
    """
    contenders = contenders_of(rounds, baseline)
    of = {contender.policy: contender for contender in contenders}
    if baseline not in of or not of[baseline].merit:
        return None
    objective = rounds[-1].objective
    alive = [s for s in contenders if s.failure is None and (s.policy == baseline or eligible(s.policy))]
    unbeaten = _unbeaten(rounds, {s.policy for s in alive} - {baseline})
    shown = [s for s in alive if s.policy in unbeaten and _is_shown_better(s, objective, doubt)]
    level = level_with_the_best(rounds, shown)
    winner = min(level, key=lambda s: (departure_count(s.policy), -s.merit), default=of[baseline])
    verdict = Verdict(winner=winner, baseline=of[baseline], contenders=contenders, findings=(), objective=objective)
    best = max(alive, key=lambda s: s.merit)
    reasons = _reasons(verdict, best, len(level), launches_of(rounds), spread_of_ratios(rounds))
    if not is_fast_enough(rounds, winner.policy, baseline, surely=True):
        reasons.append(speed_not_shown(winner, objective))
    return replace(verdict, findings=tuple(reasons))


def speed_not_shown(winner: Contender, objective: Objective) -> Finding:
    """Returns the finding that the winner may be too slow for the objective."""
    return Finding(
        code="speed-not-shown",
        message=f"its speed, {winner.vs_baseline} that of the baseline, is not shown to be the "
        f"{objective.least_speed:g} times that it has to be; more --budget makes that interval narrower",
    )


def level_with_the_best(rounds: Sequence[Round], contenders: Sequence[Contender]) -> list[Contender]:
    """Returns the policies that are level with the best by the objective and, among those, with the fastest.

    A little less memory is not worth a loss of speed.
    """
    for by in dict.fromkeys((rounds[-1].objective, THROUGHPUT)) if contenders else ():
        best = best_among(rounds, [contender.policy for contender in contenders], by=by)
        contenders = [contender for contender in contenders if _is_level(rounds, best, contender.policy, by)]
    return list(contenders)


def contenders_of(rounds: Sequence[Round], baseline: Policy) -> tuple[Contender, ...]:
    """Returns every policy of the rounds, the best first; then those too slow for the objective, failures last."""
    policies = dict.fromkeys(policy for one in rounds for policy in one.outcomes)
    contenders = [_contender_of(rounds, policy, baseline) for policy in policies]
    return tuple(sorted(contenders, key=lambda contender: contender.place))


def settled(rounds: Sequence[Round], baseline: Policy) -> bool:
    """Returns whether the ratio of the best to each rival that is still measured is known to ±1 %.

    If the objective needs a speed, each policy's speed must be known as well as that. Both must have been so before
    the last launch too, after `ENOUGH_TO_STOP` launches or more: the spread over few launches often looks small by
    chance, and stopping whenever it does would make the intervals too narrow.
    """
    launches = sorted({one.launch for one in rounds})
    if len(launches) < ENOUGH_TO_STOP:
        return False
    before = [one for one in rounds if one.launch != launches[-1]]
    return _is_narrow(rounds, baseline) and _is_narrow(before, baseline)


def is_worth_a_change(ratio: Ratio) -> bool:
    """Returns whether the ratio is shown to be above 1, and its value exceeds 1 by more than is negligible."""
    return ratio.low > 1 and ratio.value > 1 + NEGLIGIBLE


def _is_narrow(rounds: Sequence[Round], baseline: Policy) -> bool:
    alive = {contender.policy for contender in contenders_of(rounds, baseline) if contender.failure is None}
    measured = [policy for policy in rounds[-1].outcomes if policy in alive]
    if not measured:  # everything failed: more rounds will not help
        return True
    best = best_among(rounds, measured)
    ratios = [ratio_between(rounds, best, rival) for rival in measured]
    if rounds[-1].objective.needs_speed:
        ratios += [ratio_between(rounds, policy, baseline, by=THROUGHPUT) for policy in measured]
    return all(ratio.half_width < NARROW for ratio in ratios)


def _unbeaten(rounds: Sequence[Round], policies: Set[Policy]) -> Set[Policy]:
    """Returns the policies in the last round that has any of them; the others were dropped before."""
    return next((found for one in reversed(rounds) if (found := policies & one.outcomes.keys())), frozenset())


def _is_shown_better(contender: Contender, objective: Objective, doubt: float) -> bool:
    gain = contender.gain
    return gain is not None and not contender.too_slow and gain.shows_more_than(1 + objective.least_gain, doubt=doubt)


def _is_level(rounds: Sequence[Round], best: Policy, other: Policy, by: Objective) -> bool:
    """Returns whether no difference is shown and none that matters is seen; if unclear, the better policy is kept."""
    ratio, least_gain = ratio_between(rounds, best, other, by=by), by.least_gain
    near = ratio.value <= 1 + NEGLIGIBLE and ratio.high <= 1 + CLOSE
    return other == best or (near and not ratio.low > 1 + least_gain and not ratio.high < 1 - least_gain)


def _value(ratio: Ratio | None) -> float:
    return ratio.value if ratio is not None and ratio.value > 0 else 0.0


def _contender_of(rounds: Sequence[Round], policy: Policy, baseline: Policy) -> Contender:
    outcomes = [one.outcomes[policy] for one in rounds if policy in one.outcomes]
    failure = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
    if failure is not None:  # one failure is enough: a policy that sometimes fails is useless for training
        return Contender(policy=policy, failure=failure, rounds=len(outcomes))
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measurement)]
    energies = [m.energy_j_per_sample for m in measured if m.energy_j_per_sample is not None]
    step_ms, interval = _step_ms(rounds, policy)
    speedup = ratio_between(rounds, policy, baseline, by=THROUGHPUT)
    return Contender(
        policy=policy,
        samples_per_s=1000 * measured[0].samples_per_step / step_ms,
        step_ms=step_ms,
        step_ms_ci95=interval,
        peak_memory_mib=max(outcome.peak_allocated_mib for outcome in measured),
        energy_j_per_sample=statistics.median(energies) if energies else None,
        vs_baseline=speedup,
        gain=speedup if rounds[-1].objective == THROUGHPUT else ratio_between(rounds, policy, baseline),
        too_slow=not is_fast_enough(rounds, policy, baseline),
        rounds=len(measured),
    )


def _step_ms(rounds: Sequence[Round], policy: Policy) -> tuple[float, tuple[float, float] | None]:
    """Returns (step time, its 95 % interval or None after a single block), by the same statistics as a ratio."""
    blocks: dict[int, list[float]] = defaultdict(list)
    for one in rounds:
        if isinstance(outcome := one.outcomes.get(policy), Measurement):
            blocks[one.launch].append(outcome.median_ms)
    found = ratio_of(list(blocks.values()), spread_of_times(rounds))
    return found.value, None if math.isinf(found.high) else (found.low, found.high)


def _reasons(verdict: Verdict, best: Contender, equals: int, launches: int, spread: Spread | None) -> list[Finding]:
    found = [_few_launches(launches)] if launches < ENOUGH_LAUNCHES else []
    winner, objective = verdict.winner, verdict.objective
    if verdict.keeps_the_baseline:
        rival = "" if best is verdict.baseline else f"; the best rival: {best.policy}, {_rivalry(best, objective)}"
        message = f"keep what you have: no policy was shown {goal_of(objective)}{rival}"
        noise = () if objective.name == "memory" else _noise(spread)
        return [Finding(code="keep", message=message), *found, *noise]
    message = f"{winner.policy}: {gain_in_words(objective, winner.gain, winner.vs_baseline)}"
    better = Finding(code=_BETTER[objective.name], message=message)
    if equals > 1:
        message = (
            f"no difference shown between the {equals} {_BEST[objective.name]}; the one with the fewest departures wins"
        )
        found.insert(0, Finding(code="simplest", message=message, figures={"equals": equals}))
    return [better, *found]


def _noise(spread: Spread | None) -> Iterator[Finding]:
    if spread is not None and spread.deviation > NOISY:
        yield Finding(
            code="noisy",
            message=f"the ratio of two policies differs by {spread.deviation:.0%} from round to round (standard "
            "deviation over all that were compared), so that small differences take many rounds to tell: as a rule the "
            "host is busy, or too slow for its device",
            figures={"deviation": spread.deviation},
        )


def _rivalry(rival: Contender, objective: Objective) -> str:
    if objective.name == "throughput":
        return str(rival.vs_baseline)
    return gain_in_words(objective, rival.gain, rival.vs_baseline)


def _few_launches(launches: int) -> Finding:
    times = "one process launch" if launches == 1 else f"{launches} process launches"
    return Finding(
        code="few-launches",
        message=f"the budget held {times} of each contender, of {ENOUGH_LAUNCHES} wanted: what differs from one "
        "start of a process to the next is not in the intervals; give more with --budget",
        figures={"launches": launches, "wanted": ENOUGH_LAUNCHES},
    )
