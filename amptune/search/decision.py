"""Which policy wins, and what may be claimed of it. Pure: from rounds of outcomes to a verdict."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

from amptune.measure.outcome import Failure, Measurement
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.ratios import ENOUGH_LAUNCHES, Ratio, Round, fastest_of, launches_of, ratio_between, ratio_of

__all__ = [
    "NARROW",
    "Standing",
    "Verdict",
    "departure_count",
    "is_worth_a_change",
    "settled",
    "standings_of",
    "verdict_of",
]

# An interval this narrow (half its width, relative) is worth no further rounds.
NARROW = 0.01
ENOUGH_TO_STOP = 5
# Two policies no further apart than this are of one speed to a user, and the simpler is preferred, where they are
# known not to be `CLOSE` apart either.
NEGLIGIBLE, CLOSE = 0.005, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One policy in a comparison. Figures are None where it failed, and `failure` says how.

    `vs_baseline` compares samples per second in the rounds that both finished. `step_ms` is as measured, so drift
    moves it and its interval; a ratio it does not.
    """

    policy: Policy
    samples_per_s: float | None = None
    step_ms: float | None = None
    step_ms_ci95: tuple[float, float] | None = None
    peak_memory_mib: float | None = None
    energy_j_per_sample: float | None = None
    vs_baseline: Ratio | None = None
    rounds: int = 0
    failure: Failure | None = None

    @property
    def speedup(self) -> float:
        """Over the baseline, 0 where it failed or nothing can be said: what standings are ordered by."""
        ratio = self.vs_baseline
        return ratio.value if ratio is not None and ratio.value > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The winner among the contenders, the baseline it is held against, and why."""

    winner: Standing
    baseline: Standing
    standings: tuple[Standing, ...]
    findings: tuple[Finding, ...]

    @property
    def speedup(self) -> Ratio:
        if self.winner.policy == self.baseline.policy or self.winner.vs_baseline is None:
            return Ratio(value=1.0, low=1.0, high=1.0)
        return self.winner.vs_baseline

    @property
    def keeps_the_baseline(self) -> bool:
        return self.winner.policy == self.baseline.policy


def departure_count(policy: Policy) -> int:
    """How many settings differ from stock PyTorch, each FP32 rule counting; the batch size is the user's own."""
    settings = dict(policy.departures())
    settings.pop("batch_size", None)
    return len(settings) + max(0, len(policy.fp32_modules) - 1) + max(0, len(policy.half_modules) - 1)


def verdict_of(
    rounds: Sequence[Round],
    baseline: Policy,
    eligible: Callable[[Policy], bool] = lambda _: True,
    *,
    doubt: float = 1.0,
) -> Verdict | None:
    """The fastest policy that is shown to be faster; among equals, the one with the fewest departures from stock.

    Only the baseline and `eligible` policies can win, and none that was left out of the last round, being beaten.
    None if the baseline failed. With more `doubt` the intervals that have to exclude 1 are so many times as wide.
    """
    standings = standings_of(rounds, baseline)
    of = {standing.policy: standing for standing in standings}
    if baseline not in of or of[baseline].samples_per_s is None:
        return None
    alive = [s for s in standings if s.failure is None and (s.policy == baseline or eligible(s.policy))]
    unbeaten = _unbeaten(rounds, {s.policy for s in alive} - {baseline})
    shown = [s for s in alive if s.policy in unbeaten and _is_shown_faster(s, doubt)]
    fastest = fastest_of(rounds, [baseline, *(s.policy for s in shown)])
    level = [s for s in shown if _is_level(rounds, fastest, s.policy)]
    winner = min(level, key=lambda s: (departure_count(s.policy), -s.speedup), default=of[baseline])
    return Verdict(
        winner=winner,
        baseline=of[baseline],
        standings=standings,
        findings=tuple(_reasons(winner, alive[0], of[baseline], len(level), launches_of(rounds))),
    )


def standings_of(rounds: Sequence[Round], baseline: Policy) -> tuple[Standing, ...]:
    """Every policy of the rounds, fastest first, failures last."""
    policies = dict.fromkeys(policy for one in rounds for policy in one.outcomes)
    standings = [_standing(rounds, policy, baseline) for policy in policies]
    return tuple(sorted(standings, key=lambda s: (s.failure is not None, -s.speedup, -(s.samples_per_s or 0.0))))


def settled(rounds: Sequence[Round], baseline: Policy) -> bool:
    """Whether the ratio of the fastest to each rival that is still measured is known to ±1 %.

    It must have been so before the last launch too, and the launches must be some: a spread over few looks small
    by chance, and to stop whenever it does would make the intervals too narrow.
    """
    launches = sorted({one.launch for one in rounds})
    if len(launches) < ENOUGH_TO_STOP:
        return False
    before = [one for one in rounds if one.launch != launches[-1]]
    return _is_narrow(rounds, baseline) and _is_narrow(before, baseline)


def is_worth_a_change(ratio: Ratio) -> bool:
    """Whether a policy is shown to be faster than another, and by more than is negligible."""
    return ratio.low > 1 and ratio.value > 1 + NEGLIGIBLE


def _is_narrow(rounds: Sequence[Round], baseline: Policy) -> bool:
    alive = {standing.policy for standing in standings_of(rounds, baseline) if standing.failure is None}
    measured = [policy for policy in rounds[-1].outcomes if policy in alive]
    if not measured:  # everything failed: more rounds will not help
        return True
    fastest = fastest_of(rounds, measured)
    return all(ratio_between(rounds, fastest, rival).half_width < NARROW for rival in measured)


def _unbeaten(rounds: Sequence[Round], policies: Set[Policy]) -> Set[Policy]:
    """Those of the policies that stood in the last round that any of them stood in; the others were left out before."""
    return next((found for one in reversed(rounds) if (found := policies & one.outcomes.keys())), frozenset())


def _is_shown_faster(standing: Standing, doubt: float) -> bool:
    return standing.vs_baseline is not None and standing.vs_baseline.shows_more_than(1, doubt=doubt)


def _is_level(rounds: Sequence[Round], fastest: Policy, other: Policy) -> bool:
    """Whether no difference is shown, and none that matters is seen either: what is unclear goes to the faster."""
    ratio = ratio_between(rounds, fastest, other)
    near = ratio.value <= 1 + NEGLIGIBLE and ratio.high <= 1 + CLOSE
    return other == fastest or (near and not ratio.shows_a_difference)


def _standing(rounds: Sequence[Round], policy: Policy, baseline: Policy) -> Standing:
    outcomes = [one.outcomes[policy] for one in rounds if policy in one.outcomes]
    failure = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
    if failure is not None:  # once is enough: a policy that fails now and then is no policy to train with
        return Standing(policy=policy, failure=failure, rounds=len(outcomes))
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measurement)]
    energies = [m.energy_j_per_sample for m in measured if m.energy_j_per_sample is not None]
    step_ms, interval = _step_ms(rounds, policy)
    return Standing(
        policy=policy,
        samples_per_s=1000 * measured[0].samples_per_step / step_ms,
        step_ms=step_ms,
        step_ms_ci95=interval,
        peak_memory_mib=max(outcome.peak_allocated_mib for outcome in measured),
        energy_j_per_sample=statistics.median(energies) if energies else None,
        vs_baseline=ratio_between(rounds, policy, baseline),
        rounds=len(measured),
    )


def _step_ms(rounds: Sequence[Round], policy: Policy) -> tuple[float, tuple[float, float] | None]:
    """(the step's time, its 95 % interval or None after one block alone), by the same statistics as a ratio."""
    blocks: dict[int, list[float]] = defaultdict(list)
    for one in rounds:
        if isinstance(outcome := one.outcomes.get(policy), Measurement):
            blocks[one.launch].append(outcome.median_ms)
    found = ratio_of(list(blocks.values()))
    return found.value, None if math.isinf(found.high) else (found.low, found.high)


def _reasons(winner: Standing, fastest: Standing, baseline: Standing, equals: int, launches: int) -> list[Finding]:
    found = [_few_launches(launches)] if launches < ENOUGH_LAUNCHES else []
    if winner is baseline:
        rival = "" if fastest is baseline else f"; the best rival: {fastest.policy}, {fastest.vs_baseline}"
        keep = Finding(code="keep", message=f"keep what you have: no policy was shown to be faster{rival}")
        return [keep, *found]
    faster = Finding(code="faster", message=f"{winner.policy}: {winner.vs_baseline} the speed of the baseline")
    if equals > 1:
        message = f"no difference shown between the {equals} fastest; the one with the fewest departures wins"
        found.insert(0, Finding(code="simplest", message=message, figures={"equals": equals}))
    return [faster, *found]


def _few_launches(launches: int) -> Finding:
    times = "one process launch" if launches == 1 else f"{launches} process launches"
    return Finding(
        code="few-launches",
        message=f"the budget held {times} of each contender, of {ENOUGH_LAUNCHES} wanted: what differs from one "
        "start of a process to the next is not in the intervals; give more with --budget",
        figures={"launches": launches, "wanted": ENOUGH_LAUNCHES},
    )
