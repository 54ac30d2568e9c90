"""Which policy wins, and what may be claimed of it. Pure: from outcomes to a verdict."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from amptune.measure.outcome import Failure, Measurement, Outcome
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy

__all__ = [
    "Ratio",
    "Round",
    "Standing",
    "Verdict",
    "departure_count",
    "ratio_of",
    "settled",
    "standings_of",
    "verdict_of",
]

BOOTSTRAP = 2000
# An interval this narrow (half its width, as a ratio) is worth no further rounds.
NARROW = 0.01

Round = Mapping[Policy, Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A speed ratio with its 95 % interval: above 1 is faster."""

    value: float
    low: float
    high: float

    @property
    def shows_a_difference(self) -> bool:
        return self.low > 1 or self.high < 1

    def __str__(self) -> str:
        if math.isinf(self.high):
            return f"{self.value:.2f}× (measured once, which claims nothing)"
        return f"{self.value:.2f}× [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One policy in the final comparison. Figures are None where it failed, and `failure` says how.

    `vs_baseline` compares samples per second in the rounds that both finished.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The winner among the finalists, the baseline it is held against, and why."""

    winner: Standing
    baseline: Standing
    standings: tuple[Standing, ...]
    findings: tuple[Finding, ...]

    @property
    def speedup(self) -> Ratio:
        return self.winner.vs_baseline or Ratio(value=1.0, low=1.0, high=1.0)


def departure_count(policy: Policy) -> int:
    """How many settings differ from stock PyTorch, each FP32 rule counting; the batch size is the user's own."""
    settings = dict(policy.departures())
    settings.pop("batch_size", None)
    return len(settings) + max(0, len(policy.fp32_modules) - 1)


def verdict_of(
    rounds: Sequence[Round], baseline: Policy, eligible: Callable[[Policy], bool] = lambda _: True
) -> Verdict | None:
    """The fastest policy that is shown to be faster; among equals, the one with the fewest departures from stock.

    Only the baseline and `eligible` policies can win. None if the baseline failed.
    """
    standings = standings_of(rounds, baseline)
    of = {standing.policy: standing for standing in standings}
    if of[baseline].samples_per_s is None:
        return None
    alive = [s for s in standings if s.samples_per_s is not None and (s.policy == baseline or eligible(s.policy))]
    fastest = max(alive, key=lambda standing: standing.samples_per_s or 0.0)
    equals = [s for s in alive if _may_win(s, baseline) and _is_level(rounds, fastest, s)]
    winner = min(equals, key=lambda s: (s.policy != baseline, departure_count(s.policy), -(s.samples_per_s or 0.0)))
    return Verdict(
        winner=winner,
        baseline=of[baseline],
        standings=standings,
        findings=tuple(_reasons(winner, fastest, baseline, len(equals))),
    )


def standings_of(rounds: Sequence[Round], baseline: Policy) -> tuple[Standing, ...]:
    """Every policy of the rounds, fastest first, failures last."""
    policies = dict.fromkeys(policy for final_round in rounds for policy in final_round)
    standings = [_standing(rounds, policy, baseline) for policy in policies]
    return tuple(sorted(standings, key=lambda standing: -(standing.samples_per_s or 0.0)))


def settled(rounds: Sequence[Round], baseline: Policy) -> bool:
    """Whether further rounds could hardly change the verdict: every rival of the fastest is beaten, or equal to 1 %.

    A rival that the last round left out is beaten.
    """
    alive = [standing for standing in standings_of(rounds, baseline) if standing.samples_per_s is not None]
    if not alive:
        return True
    ratios = [_ratio(rounds, alive[0].policy, rival.policy) for rival in alive[1:] if rival.policy in rounds[-1]]
    return all(ratio.low > 1 or (ratio.high - ratio.low) / 2 < NARROW for ratio in ratios)


def ratio_of(faster: Sequence[float], slower: Sequence[float]) -> Ratio:
    """The ratio of paired figures, one pair a round, with a 95 % interval.

    Student's t on the logarithms of the pairs' ratios: drift and noise that hit both of a pair cancel, and few
    rounds claim little. A single pair has no spread to speak of, and claims nothing.
    """
    from scipy.special import stdtrit

    logs = np.log(np.asarray(faster)) - np.log(np.asarray(slower))
    if len(logs) == 1:
        return Ratio(value=float(np.exp(logs[0])), low=0.0, high=math.inf)
    half = float(stdtrit(len(logs) - 1, 0.975)) * float(logs.std(ddof=1)) / math.sqrt(len(logs))
    low, high = (math.exp(min(logs.mean() + side * half, 700.0)) for side in (-1, 1))
    return Ratio(value=float(np.exp(logs.mean())), low=low, high=high)


def _may_win(standing: Standing, baseline: Policy) -> bool:
    return standing.policy == baseline or (standing.vs_baseline is not None and standing.vs_baseline.low > 1)


def _is_level(rounds: Sequence[Round], fastest: Standing, other: Standing) -> bool:
    return other is fastest or not _ratio(rounds, fastest.policy, other.policy).shows_a_difference


def _ratio(rounds: Sequence[Round], a: Policy, b: Policy) -> Ratio:
    pairs = [
        (one.samples_per_s, other.samples_per_s)
        for final_round in rounds
        if isinstance(one := final_round.get(a), Measurement) and isinstance(other := final_round.get(b), Measurement)
    ]
    if not pairs:
        return Ratio(value=math.nan, low=0.0, high=math.inf)
    return ratio_of([pair[0] for pair in pairs], [pair[1] for pair in pairs])


def _standing(rounds: Sequence[Round], policy: Policy, baseline: Policy) -> Standing:
    outcomes = [final_round[policy] for final_round in rounds if policy in final_round]
    failure = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
    if failure is not None:  # once is enough: a policy that fails now and then is no policy to train with
        return Standing(policy=policy, failure=failure, rounds=len(outcomes))
    measured = [outcome for outcome in outcomes if isinstance(outcome, Measurement)]
    blocks = [outcome.median_ms for outcome in measured]
    step_ms = statistics.median(blocks)
    energies = [m.energy_j_per_sample for m in measured if m.energy_j_per_sample is not None]
    return Standing(
        policy=policy,
        samples_per_s=1000 * measured[0].samples_per_step / step_ms,
        step_ms=step_ms,
        step_ms_ci95=_median_interval(blocks),
        peak_memory_mib=max(outcome.peak_allocated_mib for outcome in measured),
        energy_j_per_sample=statistics.median(energies) if energies else None,
        vs_baseline=_ratio(rounds, policy, baseline),
        rounds=len(measured),
    )


def _median_interval(values: Sequence[float]) -> tuple[float, float]:
    draws = np.random.default_rng(0).choice(np.asarray(values), size=(BOOTSTRAP, len(values)))
    low, high = np.quantile(np.median(draws, axis=1), [0.025, 0.975])
    return float(low), float(high)


def _reasons(winner: Standing, fastest: Standing, baseline: Policy, equals: int) -> list[Finding]:
    if winner.policy == baseline:
        rival = "" if fastest.policy == baseline else f"; the best rival: {fastest.policy}, {fastest.vs_baseline}"
        return [Finding(code="keep", message=f"keep what you have: no policy was shown to be faster{rival}")]
    found = [Finding(code="faster", message=f"{winner.policy}: {winner.vs_baseline} the speed of the baseline")]
    if equals > 1:
        found.append(
            Finding(
                code="simplest",
                message=f"no difference shown between the {equals} fastest; the one with the fewest departures wins",
                figures={"equals": equals},
            )
        )
    return found
