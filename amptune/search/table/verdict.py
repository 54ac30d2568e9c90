"""The one verdict from the table: the policy that wins, how sure that is, and why each other one lost. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from amptune.policy.findings import Finding
from amptune.policy.settings import KNOBS, Policy
from amptune.search.table.contenders import PROCESSES, Contender, contenders_of
from amptune.search.table.effects import Machine
from amptune.search.table.gains import counted, gain_in_words, goal_of
from amptune.search.table.model import Estimates, fit
from amptune.search.table.objective import NEGLIGIBLE, THROUGHPUT, Objective
from amptune.search.table.ratio import LIKELY, Confidence, Ratio, chance_in_words, confidence_of
from amptune.search.table.row import Row, waits_for_data

__all__ = [
    "Bar",
    "Verdict",
    "departure_count",
    "verdict_of",
]

# Blocks of a typical policy that differ by more than this are reported.
REPORTED_NOISE = 0.05
# With a smaller probability a policy that may be better is not named.
WORTH_NAMING = 0.75
# The spread of figures that are no times: a GPU's peaks differ by the allocator's rounding, energy by its counter's.
MEMORY_SPREAD, ENERGY_SPREAD = {"cuda": 0.0005, "cpu": 0.01}, 0.02
_BETTER = {"throughput": "faster", "memory": "less-memory", "energy": "less-energy"}

# Returns why a policy cannot win, in words; None if it can.
Bar = Callable[[Policy], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The winner among the contenders, the baseline it is compared with, how sure that is, and the reasons.

    `leader` is the best policy that may win, shown to be better or not. `scores` and `speeds` hold the estimates by the
    objective and by samples per second. If the user's loop `waits_for_data`, they are of steps by themselves.
    """

    winner: Contender
    baseline: Contender
    leader: Contender | None
    contenders: tuple[Contender, ...]
    confidence: Confidence
    scores: Estimates = field(repr=False, compare=False)
    speeds: Estimates = field(repr=False, compare=False)
    objective: Objective = THROUGHPUT
    waits_for_data: bool = False

    @property
    def speedup(self) -> Ratio:
        """Samples per second under the winner over those of the baseline, in a later sitting."""
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

    @property
    def is_open(self) -> bool:
        """True if nothing was compared with the baseline, so that there is no answer yet."""
        others = (one for one in self.contenders if one.policy != self.baseline.policy)
        return all(one.failure is None and one.gain is None and one.at_most is None for one in others)

    @property
    def sentence(self) -> str:
        """The answer in words."""
        if self.is_open:
            return "no answer yet: the budget was enough for the baseline only"
        if self.keeps_the_baseline:
            return f"keep what you have: no policy was shown {goal_of(self.objective)}"
        return f"{self.winner.policy}: {gain_in_words(self.objective, self.gain, self.speedup)}"

    @property
    def grounds(self) -> str:
        """How sure the answer is, and the measurements that it rests on, in words."""
        if self.is_open:
            return "nothing to compare"
        if self.keeps_the_baseline:
            return f"{self.confidence}: {_why_kept(self, len(self.contenders) - 1)}"
        processes = counted(max(1, self.gain.launches), "process")
        by = f"{counted(self.winner.rows, 'measurement')} in {processes}"
        doubt = _doubt(self.winner, self.baseline) if self.confidence == "likely" else None
        if doubt:  # how sure the figures are says little then
            return f"{self.confidence}: {by}, {doubt}"
        return f"{self.confidence}, {chance_in_words(self.winner.chance)} sure: {by}"

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The answer, what keeps it from being sure, and noise."""
        return tuple(_findings(self))

    def contender_of(self, policy: Policy) -> Contender | None:
        return next((contender for contender in self.contenders if contender.policy == policy), None)


def departure_count(policy: Policy) -> int:
    """Returns how many settings differ from stock PyTorch. Each FP32 rule counts; the batch size does not.

    Settings that keep half weights sound do not count either: a policy must not be preferred for lacking them.
    """
    chosen = [knob.of(policy) for knob in KNOBS if knob.is_own_choice and knob.departs(policy)]
    return sum(len(value) if isinstance(value, tuple) else 1 for value in chosen)


def verdict_of(
    rows: Sequence[Row],
    baseline: Policy,
    machine: Machine,
    objective: Objective = THROUGHPUT,
    bar: Bar = lambda _: None,
) -> Verdict | None:
    """Returns the verdict of all rows: of the policies that are shown to be better, the best; of equals, the simplest.

    Only policies without a `bar` can win. Returns None if the baseline was never measured, or lacks the objective's
    figure.
    """
    speeds = fit(rows, baseline, THROUGHPUT.score, machine)
    spread = MEMORY_SPREAD[machine.device] if objective.name == "memory" else ENERGY_SPREAD
    scores = speeds if objective.name == "throughput" else fit(rows, baseline, objective.score, machine, spread)
    if speeds is None or scores is None:
        return None
    contenders = tuple(sorted(contenders_of(rows, scores, speeds, objective), key=lambda one: one.place))
    own = next(one for one in contenders if one.policy == baseline)
    able = [one for one in contenders if one is not own and one.may_win and bar(one.policy) is None]
    shown = [one for one in able if one.is_shown]
    winner = min(_level_with_the_best(shown, scores, speeds), key=_simplest, default=own)
    verdict = Verdict(
        winner=winner,
        baseline=own,
        leader=able[0] if able else None,
        contenders=contenders,
        confidence=_confidence_in(winner, own, [*able, *(one for one in contenders if one.at_most is not None)]),
        scores=scores,
        speeds=speeds,
        objective=objective,
        waits_for_data=waits_for_data(rows),
    )
    lost = tuple(replace(one, lost=_why(one, verdict, bar)) for one in contenders)
    return replace(verdict, contenders=lost)


def _confidence_in(winner: Contender, baseline: Contender, others: Sequence[Contender]) -> Confidence:
    """Returns how sure it is that the winner is better; for the baseline, that no other policy is.

    Nothing is confirmed by fewer than `PROCESSES`, if the winner may be too slow, or if one of the two was only
    measured beside a disturbance.
    """
    if winner is baseline:
        chances = [0.0 if one.gain is None else one.gain.chance_above(1 + NEGLIGIBLE) for one in others]
        better = [min(chance, one.fast_enough) for chance, one in zip(chances, others, strict=True)]
        return confidence_of(1 - max(better)) if better else "undecided"
    confidence = confidence_of(winner.chance)
    return "likely" if confidence == "confirmed" and _doubt(winner, baseline) else confidence


def _doubt(winner: Contender, baseline: Contender) -> str | None:
    """Returns why not even certainty confirms that the winner is better, in words; None if nothing speaks so."""
    if winner.gain is not None and winner.gain.launches < PROCESSES:
        return f"and it takes {PROCESSES} to confirm it"
    if winner.policy.batch_size != baseline.policy.batch_size and not winner.in_loop:
        return "but its batch size was never trained with the loader's own data"
    if winner.disturbed or baseline.disturbed:
        return "but never measured undisturbed beside the baseline"
    return "but maybe slower than it has to be" if winner.fast_enough < LIKELY else None


def _level_with_the_best(contenders: Sequence[Contender], scores: Estimates, speeds: Estimates) -> list[Contender]:
    """Returns the policies that are level with the best by the objective and, among those, with the fastest.

    A little less memory is not worth a loss of speed, and a simpler policy not a loss of confidence.
    """
    level = list(contenders)
    for found in dict.fromkeys((scores, speeds)) if contenders else ():
        own = {id(one): float(found.mean[found.place[one.policy]]) for one in level}
        best = max(own.values())
        level = [one for one in level if own[id(one)] >= best - NEGLIGIBLE]
    confirmed = [one for one in level if confidence_of(one.chance) == "confirmed"]
    return confirmed or level


def _simplest(one: Contender) -> tuple[int, int, bool, float]:
    """The sort key of policies that are level.

    Of equally simple ones, those come first whose graphs PyTorch guards at each step, then what the loop has timed.
    """
    graphs = (False, True, "step").index(one.policy.cuda_graphs)  # the last needs another loop
    return departure_count(one.policy), graphs, not one.in_loop, -one.merit


def _why(one: Contender, verdict: Verdict, bar: Bar) -> str:
    """Returns why a policy did not win, in words."""
    if one.policy == verdict.winner.policy:
        return ""
    if one.failure is not None:
        return f"failed: {one.failure}"
    if one.policy == verdict.baseline.policy:
        return f"{verdict.winner.policy} is better"
    if one.at_most is not None:
        return f"at most {one.at_most:.1g}× the speed of the baseline (ended early)"
    if one.too_slow:
        return f"too slow: {one.vs_baseline} the speed of the baseline"
    if one.gain is None:
        return f"has no figure of {verdict.objective.name}"
    if not one.settled:
        return "graphs were still compiled or recorded anew when its time was over: nobody knows its mean step"
    return bar(one.policy) or _beside(one, verdict)


def _beside(one: Contender, verdict: Verdict) -> str:
    if not one.believed:
        return "in the training loop graphs kept coming under another policy, and it has not timed this one"
    if not one.is_shown:
        return f"not shown to be better than the baseline: {one.gain}"
    fit = verdict.scores
    behind = float(fit.mean[fit.place[verdict.winner.policy]] - fit.mean[fit.place[one.policy]])
    if behind <= NEGLIGIBLE:
        return f"no better than {verdict.winner.policy}, and not simpler"
    return f"behind {verdict.winner.policy} by {math.expm1(behind):.1%}"


def _why_kept(verdict: Verdict, others: int) -> str:
    """Returns that no other policy is better than the baseline, or why nobody knows yet."""
    leader = verdict.leader
    if verdict.confidence != "undecided":
        return f"none of {others} others is better" if others > 1 else "the only other policy is not better"
    if leader is None or leader.gain is None:
        return f"none of {others} others can win" if others > 1 else "the only other policy cannot win"
    if leader.chance >= LIKELY and leader.gain.launches < PROCESSES:
        return f"{leader.policy} was faster in one process alone, and it takes {PROCESSES} to tell"
    if leader.chance >= WORTH_NAMING:
        words = gain_in_words(verdict.objective, leader.gain, leader.vs_baseline)
        return f"{leader.policy} may be better ({words}, {chance_in_words(leader.chance)} sure)"
    if leader.rows == 1 and 0 < leader.merit < 1 and verdict.objective.name == "throughput":
        return f"not enough measurements; {leader.policy} took {1 / leader.merit:.2g} times as long in its only one"
    able = sum(one.may_win for one in verdict.contenders if one.policy != verdict.baseline.policy)
    named = f"one of {able} others" if able > 1 else "the only other policy that runs"
    return f"too few measurements to tell if {named} is better"


def _findings(verdict: Verdict) -> Iterator[Finding]:
    winner, kept = verdict.winner, verdict.keeps_the_baseline
    if not verdict.is_open:
        yield Finding(code="keep" if kept else _BETTER[verdict.objective.name], message=verdict.sentence)
        if verdict.confidence == ("undecided" if kept else "likely"):
            message = f"{verdict.grounds}; more --budget, or a quieter machine, tells"
            figures = {"probability": winner.chance}
            yield Finding(code="undecided" if kept else "provisional", message=message, figures=figures)
    yield from _speed_not_shown(winner, verdict.objective)
    if verdict.objective.name != "memory":
        yield from _noise(verdict.speeds)


def _speed_not_shown(winner: Contender, objective: Objective) -> Iterator[Finding]:
    """Yields a finding if the winner may be too slow for the objective."""
    speed = winner.vs_baseline
    if objective.needs_speed and speed is not None and not objective.allows_speed(speed.low):
        yield Finding(
            code="speed-not-shown",
            message=f"its speed, {speed} that of the baseline, is not shown to be the "
            f"{objective.least_speed:g} times that it has to be; more --budget makes that interval narrower",
        )


def _noise(speeds: Estimates) -> Iterator[Finding]:
    deviation = speeds.block_deviation
    if deviation > REPORTED_NOISE:
        yield Finding(
            code="noisy",
            message=f"repeats of the same policy varied by {deviation:.0%}: too noisy for small gains; as a rule the "
            "host is busy, or too slow for its device",
            figures={"deviation": deviation},
        )
