"""`amptune diagnose` as a function: why a training step is slow, and where its numbers break in half precision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from amptune.hardware.machine import Hardware
from amptune.measure.bench.readings import noticed
from amptune.measure.breakdown.slow_findings import speed_findings
from amptune.measure.evaluator import Evaluator, WorkerEvaluator
from amptune.measure.results.half_effects import Half
from amptune.measure.results.loop_timing import WORTH_SAYING, waiting_in_words
from amptune.measure.results.outcome import Effort, Failure
from amptune.measure.results.step_profile import StepProfile
from amptune.measure.results.subject import Prepared, Subject
from amptune.policy.findings import Finding
from amptune.policy.settings import STOCK, LossScale, Policy, amp_recipe
from amptune.search.events import Observer, PolicyJudged
from amptune.search.gate.judge import SHORTEST_LIMIT_S, Judge, cure_of
from amptune.search.gate.judgement import Judgement, Unjudged
from amptune.search.gate.judgements import Found
from amptune.search.gate.numeric_findings import sound_finding, where_fp32_breaks, yardstick_findings
from amptune.search.gate.repair import Cure
from amptune.search.measuring import turn_of
from amptune.search.plan.budget import Budget
from amptune.search.request import source_of, workers_log
from amptune.search.space.islands import islands_finding
from amptune.search.table.trial import error_of_baseline
from amptune.workload.workload import Workload

__all__ = ["Diagnosis", "DtypeDiagnosis", "diagnose"]

# The share of the budget for finding what cures each dtype. The profiles and the loop have no share: they take seconds.
NUMERICS_SHARE = 0.6
# The share of the time for numerics that the reference may take: it is made once for all dtypes.
SHARE_OF_REFERENCE = 0.2
# What was begun in time may take so much longer.
OVERTIME_S = 5.0
# Findings about what disturbed the measurements.
DISTURBANCES = ("throttled", "foreign-process", "host-load", "beside-compiling", "allocator-thrashing")
# Enough steps to see if stock PyTorch runs, and if something disturbs it.
SHORT_RUN = Effort(warmup_s=0.5, measure_s=0.2, min_steps=3)


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeDiagnosis:
    """Training under autocast in one dtype: the judgement of the numerics gate, where training breaks, and the cure.

    `cure` is None if the dtype is sound, nothing cures it, or there was no time to find out: `findings` say which.
    """

    policy: Policy
    judgement: Judgement | None
    cure: Cure | None
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The problems of a workload. `findings` begin with what breaks training, then what makes it slow."""

    hardware: Hardware
    subject: Subject
    numerics: tuple[DtypeDiagnosis, ...]
    profiles: tuple[tuple[Policy, StepProfile], ...]
    findings: tuple[Finding, ...]
    seconds: float


def diagnose(
    workload: Workload | str,
    *,
    budget: Budget,
    arguments: Sequence[str] = (),
    device: str | None = None,
    observer: Observer | None = None,
    evaluator: Evaluator | None = None,
) -> Diagnosis:
    """Examines a workload under autocast in every dtype of the machine, and under stock PyTorch.

    The machine is this one unless an `evaluator` is given; `arguments` are those of a target's script. Raises the
    workload's own errors, and `NothingFeasibleError` if even stock PyTorch does not run.
    """
    source = source_of(workload, arguments)
    with (
        workers_log() as log,
        closing(evaluator or WorkerEvaluator(source, device, log)) as machine,
    ):
        return _Examination(machine, budget, observer or (lambda _: None)).result()


@dataclass
class _Examination:
    evaluator: Evaluator
    budget: Budget
    observer: Observer

    def result(self) -> Diagnosis:
        prepared = self.evaluator.prepare(self.budget.left_to_prepare_s)
        outcome = self.evaluator.measure(STOCK, replace(SHORT_RUN, time_limit_s=self._limit_s))
        numerics: tuple[DtypeDiagnosis, ...] = ()
        profiles: tuple[tuple[Policy, StepProfile], ...] = ()
        if isinstance(outcome, Failure):  # the step has to run before anything else is examined
            findings: tuple[Finding, ...] = (self._fp32_breaks(outcome),)
        else:
            numerics = tuple(self._numerics(prepared))
            profiles, slow = self._speed(prepared)
            unsound_first = sorted(numerics, key=lambda one: one.judgement is not None and one.judgement.passes)
            disturbances = (finding for finding in noticed([outcome]) if finding.code in DISTURBANCES)
            more = (*disturbances, *slow, *self._islands(prepared), *self._input(numerics, outcome.mean_ms))
            findings = (*(it for one in unsound_first for it in one.findings), *more)
        return Diagnosis(
            hardware=prepared.hardware,
            subject=prepared.subject,
            numerics=numerics,
            profiles=profiles,
            findings=(*prepared.noticed, *findings),
            seconds=self.budget.spent_s,
        )

    @property
    def _limit_s(self) -> float:
        return max(SHORTEST_LIMIT_S, self.budget.left_s)

    @property
    def _left_s(self) -> float:
        """The time limit of what the diagnosis can do without."""
        return max(OVERTIME_S, self.budget.left_s)

    def _fp32_breaks(self, failure: Failure) -> Finding:
        """Returns where the numbers of stock PyTorch break. Raises what else keeps it from running."""
        if failure.kind != "nonfinite":
            raise error_of_baseline(STOCK, failure)
        if failure.in_batches:  # the batches are named, which is all there is to say
            return Finding(code="fp32-breaks", message=f"training breaks in FP32 already: {failure.message}")
        traces = self.evaluator.trace(STOCK, STOCK, self._limit_s)
        module, where = (None, "") if isinstance(traces, Failure) else where_fp32_breaks(traces)
        message = f"training breaks in FP32 already: {failure.message}{where and f'; {where}'}"
        return Finding(code="fp32-breaks", module=module, message=message)

    @property
    def _numerics_s(self) -> float:
        """The seconds left to judge and cure."""
        return NUMERICS_SHARE * self.budget.seconds - self.budget.spent_s

    def _numerics(self, prepared: Prepared) -> Iterator[DtypeDiagnosis]:
        judge = Judge(self.evaluator, STOCK, prepared.subject.tolerance)
        for recipe in _recipes(prepared):
            found = self._judged(judge, recipe)
            if isinstance(found, Judgement):
                cure, findings = self._examined(judge, found, prepared.subject)
                yield DtypeDiagnosis(policy=recipe, judgement=found, cure=cure, findings=tuple(findings))
            else:
                because = found.because if isinstance(found, Unjudged) else found
                message = f"the numerics of {recipe} could not be judged: {because}"
                finding = Finding(code="not-judged", message=message, figures={"autocast": recipe.autocast})
                yield DtypeDiagnosis(policy=recipe, judgement=None, cure=None, findings=(finding,))

    def _judged(self, judge: Judge, policy: Policy) -> Found | None:
        seconds, limit_s = SHARE_OF_REFERENCE * self._numerics_s, max(SHORTEST_LIMIT_S, self._numerics_s)
        found = judge.judge(policy, seconds_for_reference=seconds, limit_s=limit_s)
        self._tell(found)
        return found

    def _tell(self, *found: Found | None) -> None:
        for one in found:
            if isinstance(one, Judgement):
                self.observer(PolicyJudged(judgement=one, left_s=self.budget.left_s))

    def _examined(self, judge: Judge, judgement: Judgement, subject: Subject) -> tuple[Cure | None, Sequence[Finding]]:
        """Returns the cure of a dtype that did not pass, None if there is none, and the findings about it."""
        if judgement.passes:
            return None, (sound_finding(judgement), *yardstick_findings(judgement))
        limit_s = max(SHORTEST_LIMIT_S, self._numerics_s)
        cure, findings, judged = cure_of(
            judge, judgement, subject, until=lambda: self._numerics_s <= 0, limit_s=limit_s
        )
        self._tell(*judged)
        failure = judgement.parity.failure
        is_explained = cure is not None or (failure is not None and failure.in_update)
        if is_explained or judgement.policy.autocast != "fp16" or self._numerics_s <= 0:
            return cure, findings
        return cure, (*findings, *self._of_scaler(judge, judgement.policy))

    def _of_scaler(self, judge: Judge, recipe: Policy) -> Iterator[Finding]:
        """Yields which of the two breaks fp16: autocast, or the loss scaler."""
        without = self._judged(judge, replace(recipe, loss_scale=LossScale(init=1.0, static=True)))
        if not isinstance(without, Judgement):
            return
        code = "scaler-breaks" if without.passes else "autocast-breaks"
        message = f"without a loss scaler autocast fp16 is no better ({without}), so autocast breaks training"
        if without.passes:
            message = (
                "without a loss scaler autocast fp16 is as good as FP32, so the scaler breaks training, or how the "
                "step uses it: gradients are scaled until scaler.unscale_(optimizer), and each step ends with "
                "scaler.update()"
            )
        yield Finding(code=code, message=message, figures={"autocast": recipe.autocast})

    def _speed(self, prepared: Prepared) -> tuple[tuple[tuple[Policy, StepProfile], ...], tuple[Finding, ...]]:
        """Profiles the AMP recipe, which most people use, and stock PyTorch."""
        profiles: list[tuple[Policy, StepProfile]] = []
        findings: list[Finding] = []
        for policy in (*_recipes(prepared)[:1], STOCK):
            profile = self._profile(policy)
            if isinstance(profile, str):
                findings.append(Finding(code="not-profiled", message=profile, figures={"policy": str(policy)}))
            else:
                profiles.append((policy, profile))
                findings += [_under(policy, one) for one in speed_findings(profile, prepared.hardware, policy)]
        return tuple(profiles), tuple(findings)

    def _profile(self, policy: Policy) -> StepProfile | str:
        """Returns the profile of a step, or in words why there is none."""
        if self.budget.left_s <= 0:
            return f"there was no time to profile the step under {policy}; give more with --budget"
        profile = self.evaluator.profile(policy, self._left_s)
        return f"the step could not be profiled: {profile}" if isinstance(profile, Failure) else profile

    def _islands(self, prepared: Prepared) -> Iterator[Finding]:
        """Yields where the model keeps products in FP32 under autocast, if there is time to look."""
        if (dtypes := _half_dtypes(prepared)) and self.budget.left_s > 0:
            sensed = self.evaluator.sense(STOCK, dtypes[:1], self._left_s)
            finding = None if isinstance(sensed, Failure) else islands_finding(sensed)
            yield from () if finding is None else (finding,)

    def _input(self, numerics: Sequence[DtypeDiagnosis], step_ms: float) -> Iterator[Finding]:
        """Yields whether the user's loop waits for its data, if there is time to look; a step takes about `step_ms`."""
        if self.budget.left_s <= 0:
            return
        sound = [one.policy for one in numerics if one.judgement is not None and one.judgement.passes]
        policy = sound[0] if sound else STOCK
        turn = self.evaluator.measure_alone(policy, replace(turn_of(step_ms), time_limit_s=self._left_s))
        if isinstance(turn, Failure):
            yield Finding(code="end-to-end-failed", message=f"the training loop with fresh data failed: {turn}")
        elif turn.wait_share > WORTH_SAYING:
            message, figures = waiting_in_words(turn.wait_share), {"share": turn.wait_share}
            yield _under(policy, Finding(code="input-bound", message=message, figures=figures))


def _recipes(prepared: Prepared) -> tuple[Policy, ...]:
    return tuple(map(amp_recipe, _half_dtypes(prepared)))


def _half_dtypes(prepared: Prepared) -> tuple[Half, ...]:
    """Returns the dtypes for autocast that this machine has, bf16 first; none for a model in float64.

    Any CPU computes both, if slowly.
    """
    gpu = prepared.hardware.gpu
    if not prepared.subject.castable:
        return ()
    return ("bf16", "fp16") if gpu is None or gpu.bf16 else ("fp16",)


def _under(policy: Policy, finding: Finding) -> Finding:
    """Returns the finding with the policy that it was seen under."""
    message = f"under {policy}, {finding.message}"
    return replace(finding, message=message, figures={"policy": str(policy), **finding.figures})
