"""Which policy wins, and what may be claimed of it. Pure: from rounds of outcomes to a verdict."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from amptune.measure.outcome import Failure, Measurement
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.gains import gain_in_words, goal_of
from amptune.search.objective import THROUGHPUT, Objective
from amptune.search.ratios import (
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
    "Standing",
    "Verdict",
    "departure_count",
    "is_worth_a_change",
    "level_with_the_best",
    "settled",
    "speed_not_shown",
    "standings_of",
    "verdict_of",
]

# An interval this narrow (half its width, relative) is worth no further rounds.
NARROW = 0.01
ENOUGH_TO_STOP = 5
# Two policies no further apart than this are the same to a user, and the simpler is preferred, where they are known not
# to be `CLOSE` apart either.
NEGLIGIBLE, CLOSE = 0.005, 0.01
# Where a ratio differs by more than this from round to round, that is said.
NOISY = 0.05
# The code of the finding that a policy is better, and what several are that are so.
_BETTER = {"throughput": "faster", "memory": "less-memory", "energy": "less-energy"}
_BEST = {"throughput": "fastest", "memory": "that use least memory", "energy": "that use least energy"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One policy in a comparison. Figures are None where it failed, and `failure` says how.

    `vs_baseline` compares samples per second in the rounds that both finished, `gain` what the objective is about.
    `step_ms` is as measured, so drift moves it and its interval; a ratio it does not. One that is `too_slow` for the
    objective cannot win.
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
        """Over the baseline, 0 where it failed or nothing can be said."""
        return _value(self.vs_baseline)

    @property
    def merit(self) -> float:
        """What was gained over the baseline, 0 where it failed or nothing can be said."""
        return _value(self.gain)

    @property
    def place(self) -> tuple[bool, bool, float, float]:
        """What standings are ordered by: the best first, then what is too slow, failures last."""
        return self.failure is not None, self.too_slow, -self.merit, -(self.samples_per_s or 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The winner among the contenders, the baseline it is held against, and why."""

    winner: Standing
    baseline: Standing
    standings: tuple[Standing, ...]
    findings: tuple[Finding, ...]
    objective: Objective = THROUGHPUT

    @property
    def speedup(self) -> Ratio:
        """Samples per second under the winner over those of the baseline."""
        return self._of_winner(self.winner.vs_baseline)

    @property
    def gain(self) -> Ratio:
        """What the objective gained: the same, or the baseline's peak memory or energy a sample over the winner's."""
        return self._of_winner(self.winner.gain)

    def _of_winner(self, ratio: Ratio | None) -> Ratio:
        return Ratio(value=1.0, low=1.0, high=1.0) if self.keeps_the_baseline or ratio is None else ratio

    @property
    def keeps_the_baseline(self) -> bool:
        return self.winner.policy == self.baseline.policy


def departure_count(policy: Policy) -> int:
    """How many settings differ from stock PyTorch, each FP32 rule counting; the batch size is the user's own.

    What keeps half weights sound is no departure of its own, so that it is not left out for being one.
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
    """The best policy that is shown to be better; among equals, the one with the fewest departures from stock.

    What is best says the objective of the rounds. Only the baseline and `eligible` policies can win, and none that was
    left out of the last round, being beaten. None if the baseline failed. With more `doubt` the intervals that have to
    exclude 1 are so many times as wide.
    """
    standings = standings_of(rounds, baseline)
    of = {standing.policy: standing for standing in standings}
    if baseline not in of or not of[baseline].merit:
        return None
    objective = rounds[-1].objective
    alive = [s for s in standings if s.failure is None and (s.policy == baseline or eligible(s.policy))]
    unbeaten = _unbeaten(rounds, {s.policy for s in alive} - {baseline})
    shown = [s for s in alive if s.policy in unbeaten and _is_shown_better(s, objective, doubt)]
    level = level_with_the_best(rounds, shown)
    winner = min(level, key=lambda s: (departure_count(s.policy), -s.merit), default=of[baseline])
    verdict = Verdict(winner=winner, baseline=of[baseline], standings=standings, findings=(), objective=objective)
    best = max(alive, key=lambda s: s.merit)
    reasons = _reasons(verdict, best, len(level), launches_of(rounds), spread_of_ratios(rounds))
    if not is_fast_enough(rounds, winner.policy, baseline, surely=True):
        reasons.append(speed_not_shown(winner, objective))
    return replace(verdict, findings=tuple(reasons))


def speed_not_shown(winner: Standing, objective: Objective) -> Finding:
    """That a policy that wins may be too slow for the objective."""
    return Finding(
        code="speed-not-shown",
        message=f"its speed, {winner.vs_baseline} that of the baseline, is not shown to be the "
        f"{objective.least_speed:g} times that it has to be; more --budget makes that interval narrower",
    )


def level_with_the_best(rounds: Sequence[Round], standings: Sequence[Standing]) -> list[Standing]:
    """Those between which it does not matter: level with the best by the objective, and of those with the fastest.

    To use a little less memory is not worth a speed.
    """
    for by in dict.fromkeys((rounds[-1].objective, THROUGHPUT)) if standings else ():
        best = best_among(rounds, [standing.policy for standing in standings], by=by)
        standings = [standing for standing in standings if _is_level(rounds, best, standing.policy, by)]
    return list(standings)


def standings_of(rounds: Sequence[Round], baseline: Policy) -> tuple[Standing, ...]:
    """Every policy of the rounds, the best first; behind them what is too slow for the objective, failures last."""
    policies = dict.fromkeys(policy for one in rounds for policy in one.outcomes)
    standings = [_standing(rounds, policy, baseline) for policy in policies]
    return tuple(sorted(standings, key=lambda standing: standing.place))


def settled(rounds: Sequence[Round], baseline: Policy) -> bool:
    """Whether the ratio of the best to each rival that is still measured is known to ±1 %.

    So must its speed be, where the objective needs one. It must have been so before the last launch too, and the
    launches must be some: a spread over few looks small by chance, and to stop whenever it does would make the
    intervals too narrow.
    """
    launches = sorted({one.launch for one in rounds})
    if len(launches) < ENOUGH_TO_STOP:
        return False
    before = [one for one in rounds if one.launch != launches[-1]]
    return _is_narrow(rounds, baseline) and _is_narrow(before, baseline)


def is_worth_a_change(ratio: Ratio) -> bool:
    """Whether a policy is shown to be better than another, and by more than is negligible."""
    return ratio.low > 1 and ratio.value > 1 + NEGLIGIBLE


def _is_narrow(rounds: Sequence[Round], baseline: Policy) -> bool:
    alive = {standing.policy for standing in standings_of(rounds, baseline) if standing.failure is None}
    measured = [policy for policy in rounds[-1].outcomes if policy in alive]
    if not measured:  # everything failed: more rounds will not help
        return True
    best = best_among(rounds, measured)
    ratios = [ratio_between(rounds, best, rival) for rival in measured]
    if rounds[-1].objective.needs_speed:
        ratios += [ratio_between(rounds, policy, baseline, by=THROUGHPUT) for policy in measured]
    return all(ratio.half_width < NARROW for ratio in ratios)


def _unbeaten(rounds: Sequence[Round], policies: Set[Policy]) -> Set[Policy]:
    """Those of the policies that stood in the last round that any of them stood in; the others were left out before."""
    return next((found for one in reversed(rounds) if (found := policies & one.outcomes.keys())), frozenset())


def _is_shown_better(standing: Standing, objective: Objective, doubt: float) -> bool:
    gain = standing.gain
    return gain is not None and not standing.too_slow and gain.shows_more_than(1 + objective.least_gain, doubt=doubt)


def _is_level(rounds: Sequence[Round], best: Policy, other: Policy, by: Objective) -> bool:
    """Whether no difference is shown, and none that matters is seen either: what is unclear goes to the better."""
    ratio, least_gain = ratio_between(rounds, best, other, by=by), by.least_gain
    near = ratio.value <= 1 + NEGLIGIBLE and ratio.high <= 1 + CLOSE
    return other == best or (near and not ratio.low > 1 + least_gain and not ratio.high < 1 - least_gain)


def _value(ratio: Ratio | None) -> float:
    return ratio.value if ratio is not None and ratio.value > 0 else 0.0


def _standing(rounds: Sequence[Round], policy: Policy, baseline: Policy) -> Standing:
    outcomes = [one.outcomes[policy] for one in rounds if policy in one.outcomes]
    failure = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
    if failure is not None:  # once is enough: a policy that fails now and then is no policy to train with
        return Standing(policy=policy, failure=failure, rounds=len(outcomes))
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measurement)]
    energies = [m.energy_j_per_sample for m in measured if m.energy_j_per_sample is not None]
    step_ms, interval = _step_ms(rounds, policy)
    speedup = ratio_between(rounds, policy, baseline, by=THROUGHPUT)
    return Standing(
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
    """(the step's time, its 95 % interval or None after one block alone), by the same statistics as a ratio."""
    blocks: dict[int, list[float]] = defaultdict(list)
    for one in rounds:
        if isinstance(outcome := one.outcomes.get(policy), Measurement):
            blocks[one.launch].append(outcome.median_ms)
    found = ratio_of(list(blocks.values()), spread_of_times(rounds))
    return found.value, None if math.isinf(found.high) else (found.low, found.high)


def _reasons(verdict: Verdict, best: Standing, equals: int, launches: int, spread: Spread | None) -> list[Finding]:
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


def _rivalry(rival: Standing, objective: Objective) -> str:
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
