"""Groundwork before the search: times every module by itself, and judges the numerics of each precision.

A precision that trains worse than FP32 gets the modules it needs in FP32. The times are kept with the study.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from amptune.measure.evaluator import Evaluator
from amptune.measure.results.half_effects import Sensitivity
from amptune.measure.results.outcome import Failure
from amptune.measure.results.subject import Prepared, Subject
from amptune.policy.findings import Finding
from amptune.policy.serialization import adapter_for
from amptune.policy.settings import Fp32Math, Fp32Rule, Policy
from amptune.search.gate.judge import Judge, OutOfTimeError
from amptune.search.gate.limits import Judgement
from amptune.search.gate.numeric_findings import findings_of
from amptune.search.gate.repair import Cure, cure_of, traces_of
from amptune.search.plan.budget import MODULE_TIMES_SHARE, Budget
from amptune.search.space.exclusions import Ladder, ladder_by_time
from amptune.search.space.knobs import Space

__all__ = ["PrecisionCheck", "check_precision", "examined", "timed_ladder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionCheck:
    """The rules that each precision needs if it fails without them; None if no rules help."""

    safeguards: Mapping[str, tuple[Fp32Rule, ...] | None]
    findings: tuple[Finding, ...] = ()


def check_precision(judge: Judge, recipes: Sequence[Policy], subject: Subject) -> PrecisionCheck:
    """Judges the recipe of each precision while there is time; if it fails, looks for the modules that cure it."""
    safeguards: dict[str, tuple[Fp32Rule, ...] | None] = {}
    findings: list[Finding] = []
    for recipe in recipes:
        judgement = judge.judgement_of(recipe) if judge.has_time else None
        if judge.failure is not None:
            message = f"numerics could not be judged, as there is no FP32 reference: {judge.failure}"
            return PrecisionCheck(
                safeguards=safeguards, findings=(*findings, Finding(code="not-judged", message=message))
            )
        if judgement is not None and not judgement.passes:
            cure, found = examined(judge, judgement, subject)
            safeguards[recipe.precision] = None if cure is None else cure.rules
            findings += found
    return PrecisionCheck(safeguards=safeguards, findings=tuple(findings))


def examined(judge: Judge, judgement: Judgement, subject: Subject) -> tuple[Cure | None, tuple[Finding, ...]]:
    """Returns the cure of a policy that did not pass, None if there is none, and the findings about the policy."""
    traces = traces_of(judge, judgement.policy)
    cure, out_of_time = None, False
    try:
        cure = cure_of(judge, judgement.policy, subject, traces)
    except OutOfTimeError:
        out_of_time = True
    return cure, tuple(findings_of(judgement, cure, traces, out_of_time=out_of_time))


# A shorter budget is better spent on trials.
SHORTEST_BUDGET_S = 45.0
FILE = "sensitivity.json"


def timed_ladder(evaluator: Evaluator, prepared: Prepared, space: Space, budget: Budget, folder: Path) -> Ladder | None:
    """Returns the ladder by measured times, in every memory format of the space; None if it cannot be measured.

    Times are measured once for a study: other times would give other rules, and so other policies than were tried.
    """
    dtypes: Any = tuple(dtype for dtype in space.choices("autocast") if dtype != "off")
    if not dtypes or not any(map(bool, space.choices("fp32_exclusions"))):
        return None
    path, key = folder / FILE, _key(prepared)
    known = _known(path, key)
    sensed: dict[str, Sensitivity] = {}
    for memory_format in space.choices("memory_format") or ("contiguous",):
        policy = Policy(fp32_math=_math(prepared, space), memory_format=memory_format)  # type: ignore[arg-type]
        entry = f"{policy}, {' '.join(dtypes)}"
        if entry not in known and budget.seconds >= SHORTEST_BUDGET_S:
            found = evaluator.sense(policy, dtypes, MODULE_TIMES_SHARE * budget.seconds)
            known |= {} if isinstance(found, Failure) else {entry: found}
        if entry in known:
            sensed[str(memory_format)] = known[entry]
    if not sensed:
        return None
    _write(path, key, known)
    return ladder_by_time(prepared.subject, sensed)


def _math(prepared: Prepared, space: Space) -> Fp32Math:
    """Returns TF32 for modules kept in FP32 if the machine has it, as exclusions pay with TF32."""
    gpu = prepared.hardware.gpu
    return "tf32" if gpu is not None and gpu.tf32 and "tf32" in space.choices("fp32_math") else "stock"


def _key(prepared: Prepared) -> str:
    """Returns a hash of all that the times depend on."""
    hardware, subject = prepared.hardware, prepared.subject
    parts = (subject.source_digest, subject.model_digest, subject.batch_size, hardware.name, hardware.software)
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _known(path: Path, key: str) -> dict[str, Sensitivity]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["key"] != key:
            return {}
        return {entry: adapter_for(Sensitivity).validate_python(one) for entry, one in content["sensed"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # missing, or written by another version
        return {}


def _write(path: Path, key: str, sensed: dict[str, Sensitivity]) -> None:
    content = {"key": key, "sensed": {entry: asdict(one) for entry, one in sensed.items()}}
    try:
        path.write_text(json.dumps(content), encoding="utf-8")
    except OSError:
        return  # the next run measures them again
