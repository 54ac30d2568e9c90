"""Groundwork: is each precision as good as FP32, which modules does it need in FP32, and how fast is each module?

The precision that leads is judged; one that trains worse than FP32 gets the modules it needs in FP32. The times of the
modules are kept with the study.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from amptune.measure.evaluator import Evaluator
from amptune.measure.results.half_effects import Sensitivity
from amptune.measure.results.outcome import Failure, Measurement
from amptune.measure.results.subject import Prepared, Subject
from amptune.measure.results.training_runs import THOROUGHNESS
from amptune.policy.findings import Finding
from amptune.policy.serialization import adapter_for
from amptune.policy.setting_effects import ordered_as
from amptune.policy.settings import Fp32Math, Fp32Rule, Policy
from amptune.search.gate.judge import Judge, OutOfTimeError, raised_by
from amptune.search.gate.judgement import Judgement
from amptune.search.gate.numeric_findings import findings_of
from amptune.search.gate.repair import Cure, cure_of
from amptune.search.plan.budget import SHORT_S
from amptune.search.plan.compile_costs import judged_graph_s
from amptune.search.plan.plan import Step
from amptune.search.sampler.study import Study
from amptune.search.sampler.suggestion import UNTRIED_GAIN
from amptune.search.space.exclusions import Ladder, ladder_by_time
from amptune.search.space.knobs import Space
from amptune.search.table.next_rows import UNSEEN
from amptune.search.table.trial import Trial
from amptune.search.trials import best_of

__all__ = ["Modules", "Numerics", "examined"]


# Timing every module takes about this long for each: 3.6 s for 1,000 modules (reports/numerics/h200/sensing.txt).
MODULE_S = 0.004
# A cure takes as many judgements.
CURE_JUDGEMENTS = 10
# The chance that an unsound precision can be cured, and that a sound policy's graph is unsound.
CURABLE, GRAPH_RISK = 0.5, 0.05


@dataclass
class Numerics:
    """The judgements that a run's answer rests on: of the precision that leads, and of the graph of the leader.

    `safeguards` are the rules that each precision needs, None if none were found to help; `changed` is called when they
    change. `recipes` are the plain policies of the precisions, which are judged in the leader's memory format.
    """

    judge: Judge
    subject: Subject
    study: Callable[[], Study]
    recipes: Sequence[Policy]
    changed: Callable[[], None]
    findings: tuple[Finding, ...] = ()
    safeguards: dict[str, tuple[Fp32Rule, ...] | None] = field(default_factory=dict)
    _uncured: set[str] = field(default_factory=set)

    def wants(self, free_s: float) -> Step | None:
        """Returns the step that judges what leads. Until it has passed, its lead over the best sound policy is none."""
        leading = self._leading() or self._broken()
        if leading is None or self.judge.judgements.failure is not None:
            return None
        policy, lead = leading
        recipe = self._recipe_of(policy) or policy
        judgement_s = self.judge.last_s or self._guessed_s
        unjudged = next(
            (one for one in (ordered_as(recipe, policy), recipe) if self.judge.judgements.is_open(one)), None
        )
        if unjudged is not None:
            seconds = min(judgement_s, free_s)
            return Step(stage="numerics", what=str(unjudged), seconds=seconds, worth=lead, policies=(unjudged,))
        if self.judge.judgements.rejection_of(recipe) is not None and policy.precision in self._uncured:
            seconds = min(CURE_JUDGEMENTS * judgement_s, max(0.0, free_s / 2))
            worth = CURABLE * lead
            return Step(stage="cure", what=str(recipe), seconds=seconds, worth=worth, policies=(recipe,))
        return None

    @property
    def _guessed_s(self) -> float:
        """The seconds of the first judgement: of the fewest steps that tell, in FP32 and in half, and all besides."""
        measured = (trial.outcome for trial in self.study().trials)
        step_ms = max((one.mean_ms for one in measured if isinstance(one, Measurement)), default=0.0)
        least = THOROUGHNESS[-1]
        return SHORT_S + 3 * (least.gradient_steps + least.curve_steps) * step_ms / 1000

    def graph(self, _free_s: float) -> Step | None:
        """Returns the step that judges the leader together with its graph, which is compiled anew for that."""
        best, judgements = best_of(self.study()), self.judge.judgements
        if best is None or not judgements.is_graph_open(best.policy) or judgements.is_open(best.policy):
            return None
        eager = [self._score(trial) for trial in self.study().trials if trial.policy.compile == "off"]
        lead = math.log(self._score(best) / max(eager)) if max(eager, default=0.0) > 0.0 else 0.0
        seconds = judged_graph_s(best.policy, self.study().history.outcomes)
        if seconds > self.judge.longest_graph_s:
            return None
        worth = GRAPH_RISK * lead
        return Step(stage="graph", what=str(best.policy), seconds=seconds, worth=worth, policies=(best.policy,))

    def _leading(self) -> tuple[Policy, float] | None:
        """Returns the best policy of a precision that is not judged, or not cured yet, and its lead over sound ones.

        The lead is on the logarithm of the score; None if a sound policy leads.
        """
        ranked = sorted((trial for trial in self.study().trials if self._score(trial) > 0.0), key=self._score)
        best: Trial | None = None
        for trial in reversed(ranked):
            recipe = self._recipe_of(trial.policy)
            if trial.policy.precision == "off" or (recipe is not None and self.judge.judgements.rounds_well(recipe)):
                return None if best is None else (best.policy, math.log(self._score(best) / self._score(trial)))
            if (
                best is None
                and recipe is not None
                and (self.judge.judgements.is_open(recipe) or recipe.precision in self._uncured)
            ):
                best = trial
        return None

    def _broken(self) -> tuple[Policy, float] | None:
        """Returns a plain policy that raised what FP32 does not, if that is not cured yet, and what a cure may gain."""
        for recipe in self.recipes:
            trial = self.study().trial_of(recipe)
            failed = trial is not None and isinstance(trial.outcome, Failure) and raised_by(recipe, trial.outcome)
            if failed and (self.judge.judgements.is_open(recipe) or recipe.precision in self._uncured):
                return recipe, UNTRIED_GAIN
        return None

    def _recipe_of(self, policy: Policy) -> Policy | None:
        """Returns the plain policy that a policy's precision is judged by; None for FP32, and outside the space."""
        return next((one for one in self.recipes if one.precision == policy.precision), None)

    def _score(self, trial: Trial) -> float:
        yardstick = self.study().yardstick
        return (yardstick.score(trial.outcome) or 0.0) if yardstick.allows(trial.outcome) else 0.0

    def take(self, step: Step, _limit_s: float) -> None:
        """Judges a precision; one that is not as good as FP32 is left out of the search until it is cured.

        It is judged as the leader takes its sums, since the answer may; if that fails, in stock PyTorch's order.
        """
        (policy,) = step.policies
        judgement = self.judge.judgement_of(policy)
        if judgement is not None and not judgement.passes and policy in self.recipes:
            self._uncured.add(policy.precision)
            self.safeguards[policy.precision] = None
            self.changed()
        if self.judge.judgements.failure is not None:
            message = f"numerics could not be judged, as there is no FP32 reference: {self.judge.judgements.failure}"
            self.findings += (Finding(code="no-reference", message=message),)

    def cure(self, step: Step, limit_s: float) -> None:
        """Looks for the modules that a rejected precision needs in FP32, in no more than half of the time."""
        (policy,) = step.policies
        judgement = self.judge.judgements.rejection_of(policy)
        if judgement is None:
            return
        self.judge.cures_until_s = self.judge.budget.spent_s + limit_s / 2
        cure, found = examined(self.judge, judgement, self.subject)
        self.judge.cures_until_s = math.inf
        self._uncured.remove(policy.precision)
        self.safeguards[policy.precision] = None if cure is None else cure.rules
        self.findings += found
        self.changed()


def examined(judge: Judge, judgement: Judgement, subject: Subject) -> tuple[Cure | None, tuple[Finding, ...]]:
    """Returns the cure of a policy that did not pass, None if there is none, and the findings about the policy."""
    if judgement.parity.failure is not None and judgement.parity.failure.in_update:
        return None, tuple(findings_of(judgement, None, ()))
    traces = judge.traces_of(judgement.policy)
    cure, out_of_time = None, False
    try:
        cure = cure_of(judge, judgement.policy, subject, traces)
    except OutOfTimeError:
        out_of_time = True
    return cure, tuple(findings_of(judgement, cure, traces, out_of_time=out_of_time))


FILE = "sensitivity.json"


@dataclass
class Modules:
    """The times of the modules by themselves, from which the ladder of modules to keep in FP32 is made.

    They are measured once for a study: other times would give other rules, and so other policies than were tried.
    `timed` is called when they are known, or cannot be. `trial_s` returns the seconds of a trial, without which the
    times are of no use.
    """

    evaluator: Evaluator
    prepared: Prepared
    space: Space
    folder: Path
    timed: Callable[[], None]
    trial_s: Callable[[], float]

    def __post_init__(self) -> None:
        self._key = _key(self.prepared)
        self._known = _known(self.folder / FILE, self._key)
        excludes = any(map(bool, self.space.choices("fp32_exclusions")))
        entries = self._entries() if self.space.half_dtypes and excludes else {}
        self._left = [entry for entry in entries if entry not in self._known]

    @property
    def are_open(self) -> bool:
        """True if modules are still to be timed."""
        return bool(self._left)

    def ladder(self) -> Ladder | None:
        """Returns the ladder by measured times; None if no module was timed."""
        sensed = {layout: self._known[entry] for entry, (layout, _) in self._entries().items() if entry in self._known}
        return ladder_by_time(self.prepared.subject, sensed) if sensed else None

    def wants(self, free_s: float) -> Step | None:
        """Returns the step that times the modules in every memory format, if a trial has time behind it."""
        seconds = len(self._left) * (1.0 + MODULE_S * len(self.prepared.subject.leaves))
        if not self._left or free_s < seconds + self.trial_s():
            return None
        what = f"{len(self.prepared.subject.leaves)} modules by themselves"
        return Step(stage="modules", what=what, seconds=seconds, worth=UNSEEN)

    def _entries(self) -> dict[str, tuple[str, Policy]]:
        """Returns the memory format and the policy of each entry of the file."""
        math_mode, found = _math(self.prepared, self.space), {}
        for layout in map(str, self.space.choices("memory_format") or ("contiguous",)):
            policy = Policy(fp32_math=math_mode, memory_format=layout)  # type: ignore[arg-type]
            found[f"{policy}, {' '.join(self.space.half_dtypes)}"] = layout, policy
        return found

    def take(self, _step: Step, limit_s: float) -> None:
        """Times the modules."""
        entries, left, self._left = self._entries(), self._left, []
        for entry in left:
            found = self.evaluator.sense(entries[entry][1], self.space.half_dtypes, limit_s / len(left))
            self._known |= {} if isinstance(found, Failure) else {entry: found}
        if self._known:
            _write(self.folder / FILE, self._key, self._known)
        self.timed()


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
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # missing or another version's
        return {}


def _write(path: Path, key: str, sensed: dict[str, Sensitivity]) -> None:
    content = {"key": key, "sensed": {entry: asdict(one) for entry, one in sensed.items()}}
    try:
        path.write_text(json.dumps(content), encoding="utf-8")
    except OSError:
        return  # the next run measures them again
