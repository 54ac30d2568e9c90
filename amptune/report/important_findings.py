"""Findings by importance: their order, and those that are shown without being asked for. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amptune.policy.findings import Finding

__all__ = ["important", "ranked"]

# Findings that the answer's three lines say already.
_SAID = {"faster", "less-memory", "less-energy", "keep", "provisional", "undecided", "budget-too-small"}
# Findings about whether the policy can be trusted.
_GRAVE = {
    "not-judged", "graph-not-judged", "yardstick-unseen", "no-reference", "rejected", "unsound", "cure",
    "speed-not-shown", "loader-failed",
}  # fmt: skip
# Findings that change nothing for the user; so do those that count blocks.
_DETAILS = {"noisy", "sound"}
# Of the important findings, the most that are shown without being asked for.
MOST_SHOWN = 5


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings, the most important first."""
    return sorted(findings, key=lambda one: (one.code not in _SAID, one.code not in _GRAVE, _is_detail(one)))


def important(findings: Iterable[Finding]) -> list[Finding]:
    """Returns the findings to show beside the answer, the most important first."""
    return [one for one in ranked(findings) if one.code not in _SAID and not _is_detail(one)][:MOST_SHOWN]


def _is_detail(finding: Finding) -> bool:
    return finding.code in _DETAILS or "kept" in finding.figures
