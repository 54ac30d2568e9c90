"""The check before the search that each precision trains as well as FP32, and the modules it needs in FP32 if not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from amptune.measure.results.subject import Subject
from amptune.policy.findings import Finding
from amptune.policy.settings import Fp32Rule, Policy
from amptune.search.gate import Judgement
from amptune.search.judging import Judge, OutOfTimeError
from amptune.search.numeric_findings import findings_of
from amptune.search.repairing import Cure, cure_of, traces_of

__all__ = ["Guard", "examined", "guard_against"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The rules that each precision needs if it fails without them; None if no rules help."""

    safeguards: Mapping[str, tuple[Fp32Rule, ...] | None]
    findings: tuple[Finding, ...] = ()


def guard_against(judge: Judge, recipes: Sequence[Policy], subject: Subject) -> Guard:
    """Judges the recipe of each precision while there is time; if it fails, looks for the modules that cure it."""
    safeguards: dict[str, tuple[Fp32Rule, ...] | None] = {}
    findings: list[Finding] = []
    for recipe in recipes:
        judgement = judge.judgement_of(recipe) if judge.has_time else None
        if judge.failure is not None:
            message = f"numerics could not be judged, as there is no FP32 reference: {judge.failure}"
            return Guard(safeguards=safeguards, findings=(*findings, Finding(code="not-judged", message=message)))
        if judgement is not None and not judgement.passes:
            cure, found = examined(judge, judgement, subject)
            safeguards[recipe.precision] = None if cure is None else cure.rules
            findings += found
    return Guard(safeguards=safeguards, findings=tuple(findings))


def examined(judge: Judge, judgement: Judgement, subject: Subject) -> tuple[Cure | None, tuple[Finding, ...]]:
    """Returns the cure of a policy that did not pass, None if there is none, and the findings about the policy."""
    traces = traces_of(judge, judgement.policy)
    cure, out_of_time = None, False
    try:
        cure = cure_of(judge, judgement.policy, subject, traces)
    except OutOfTimeError:
        out_of_time = True
    return cure, tuple(findings_of(judgement, cure, traces, out_of_time=out_of_time))
