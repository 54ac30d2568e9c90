"""The answer of a tuning in three lines. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amptune.search.table.contenders import PROCESSES
from amptune.search.table.gains import counted, gain_in_words, goal_of
from amptune.search.table.ratio import LIKELY, chance_in_words

if TYPE_CHECKING:
    from amptune.search.decide.decision import Decision

__all__ = ["answer_of"]

# With a smaller probability a policy that may be better is not named.
WORTH_NAMING = 0.75


def answer_of(decision: Decision, output: str, training: str | None = None) -> tuple[str, str, str]:
    """Returns what was found, how sure that is, and what to do next; `training` is the line that training needs."""
    sure = f"{_sure(decision)}, {counted(len(decision.trials), 'trial')}, {decision.seconds:.0f} s"
    return _found(decision), sure, _next(decision, output, training or f'amptune.apply("{output}", model)')


def _found(decision: Decision) -> str:
    verdict, objective = decision.verdict, decision.objective
    if len(verdict.contenders) == 1:
        return "no answer yet: there was time to measure the baseline only"
    if verdict.keeps_the_baseline:
        return f"keep what you have: no policy was shown {goal_of(objective)}"
    return f"{verdict.winner.policy}: {gain_in_words(objective, verdict.gain, verdict.speedup)}"


def _sure(decision: Decision) -> str:
    verdict, winner, leader = decision.verdict, decision.verdict.winner, decision.verdict.leader
    if verdict.keeps_the_baseline:
        others = counted(len(verdict.contenders) - 1, "other")
        if len(verdict.contenders) == 1:
            return "nothing to compare"
        if leader is None or verdict.confidence != "undecided":
            return f"{verdict.confidence}: none of {others} is better"
        if leader.chance >= LIKELY and leader.gain is not None and leader.gain.launches < PROCESSES:
            return f"undecided: {leader.policy} was faster in one process alone, and it takes {PROCESSES} to tell"
        if leader.chance < WORTH_NAMING:
            return f"undecided: too few measurements to tell if one of {others} is better"
        return f"undecided: {leader.policy} may be better ({chance_in_words(leader.chance)} sure)"
    launches = max(1, verdict.gain.launches)
    by = f"{counted(winner.rows, 'measurement')} in {counted(launches, 'process')}"
    return f"{verdict.confidence}, {chance_in_words(winner.chance)} sure: {by}"


def _next(decision: Decision, output: str, training: str) -> str:
    verdict = decision.verdict
    written = f"{'provisional policy' if decision.provisional else 'policy'} written to {output}"
    if len(verdict.contenders) == 1:
        return f"{written}; give more time with --budget"
    if verdict.keeps_the_baseline and verdict.confidence == "undecided":
        return f"{written}; run again to search on"
    if verdict.keeps_the_baseline:
        return f"{written}; " + (
            "run again to make it surer" if decision.provisional else "nothing to change in training"
        )
    return f"{written}. In training: {training}" + ("; run again to make it surer" if decision.provisional else "")
