"""Before the search: does autocast in each dtype train as well as FP32, and if not, with which modules in FP32?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from amptune.measure.subject import Subject
from amptune.policy.findings import Finding
from amptune.policy.settings import Fp32Rule, Policy
from amptune.search.gate import Judgement
from amptune.search.judging import Judge, OutOfTimeError
from amptune.search.repairing import Cure, cure_of

__all__ = ["Guard", "guard_against"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """What was found of each dtype that fails by itself: the rules it needs, None where no rules help."""

    safeguards: Mapping[str, tuple[Fp32Rule, ...] | None]
    findings: tuple[Finding, ...] = ()


def guard_against(judge: Judge, dtypes: Sequence[Policy], subject: Subject) -> Guard:
    """Judges the AMP recipe in each dtype; where it fails, looks for the modules that cure it."""
    safeguards: dict[str, tuple[Fp32Rule, ...] | None] = {}
    findings: list[Finding] = []
    for recipe in dtypes:
        judgement = judge.judgement_of(recipe)
        if judge.failure is not None:
            break
        if judgement is None or judgement.passes:
            continue
        try:
            cure = cure_of(judge, recipe, subject)
        except OutOfTimeError:
            findings.append(_unsafe(recipe, judgement, "there was no time to find the modules behind it"))
            safeguards[recipe.autocast] = None
            continue
        safeguards[recipe.autocast] = None if cure is None else cure.rules
        findings.append(
            _unsafe(recipe, judgement, "no modules in FP32 cure it")
            if cure is None
            else _cured(recipe, judgement, cure)
        )
    if judge.failure is not None:
        message = f"numerics could not be judged, as the FP32 reference could not be made: {judge.failure}"
        findings.append(Finding(code="not-judged", message=message))
    return Guard(safeguards=safeguards, findings=tuple(findings))


def _unsafe(recipe: Policy, judgement: Judgement, why: str) -> Finding:
    message = f"autocast {recipe.autocast} is not as good as FP32 ({judgement}) and is left out: {why}"
    return Finding(code="unsafe-dtype", message=message, figures={"autocast": recipe.autocast})


def _cured(recipe: Policy, judgement: Judgement, cure: Cure) -> Finding:
    rules = " + ".join(map(str, cure.rules))
    message = f"autocast {recipe.autocast} alone is not as good as FP32 ({judgement}); with {rules} in FP32 it is"
    figures = {"autocast": recipe.autocast, "modules": list(cure.modules), "judgements": cure.judgements}
    return Finding(code="safeguarded", message=message, module=cure.modules[0], figures=figures)
