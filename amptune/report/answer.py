"""The answer of a tuning in three lines, and the order of its findings. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from amptune.search.table.gains import counted, gain_in_words, goal_of
from amptune.search.table.ratio import chance_in_words

if TYPE_CHECKING:
    from amptune.policy.findings import Finding
    from amptune.search.decide.decision import Decision

__all__ = ["answer_of", "important", "ranked"]

# Findings that the three lines say already.
_SAID = {"faster", "less-memory", "less-energy", "keep", "provisional", "undecided", "budget-too-small"}
# Findings about whether the policy can be trusted.
_GRAVE = {
    "not-judged", "graph-not-judged", "yardstick-unseen", "no-reference", "rejected", "unsound", "cure",
    "speed-not-shown", "loader-failed",
}  # fmt: skip
# Findings that change nothing for the user; so do those that count blocks.
_DETAILS = {"simplest", "noisy", "compile-costs", "compile-not-needed", "sound"}
# Of the important findings, the most that are shown without being asked for.
MOST_SHOWN = 5


def answer_of(decision: Decision, output: str, training: str | None = None) -> tuple[str, str, str]:
    """Returns what was found, how sure that is, and what to do next; `training` is the line that training needs."""
    sure = f"{_sure(decision)}, {counted(len(decision.trials), 'trial')}, {decision.seconds:.0f} s"
    return _found(decision), sure, _next(decision, output, training or f'amptune.apply("{output}", model)')


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings, the most important first."""
    return sorted(findings, key=lambda one: (one.code not in _SAID, one.code not in _GRAVE, _is_detail(one)))


def important(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings to show beside the answer, the most important first."""
    return [one for one in ranked(findings) if one.code not in _SAID and not _is_detail(one)][:MOST_SHOWN]


def _is_detail(finding: Finding) -> bool:
    return finding.code in _DETAILS or "kept" in finding.figures


def _found(decision: Decision) -> str:
    verdict, objective = decision.verdict, decision.objective
    if verdict.keeps_the_baseline:
        return f"keep what you have: no policy was shown {goal_of(objective)}"
    return f"{verdict.winner.policy}: {gain_in_words(objective, verdict.gain, verdict.speedup)}"


def _sure(decision: Decision) -> str:
    verdict, winner, leader = decision.verdict, decision.verdict.winner, decision.verdict.leader
    if verdict.keeps_the_baseline:
        if len(verdict.contenders) == 1:
            return "only the baseline was measured"
        if leader is None or verdict.confidence != "undecided":
            return f"{verdict.confidence}: none of {len(verdict.contenders) - 1} others is better"
        return f"undecided: {leader.policy} is better with a probability of {chance_in_words(leader.chance)}"
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
