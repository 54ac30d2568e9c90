"""The answer of a study for an objective, from its table, without new measurements. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property

from amptune.errors import ObjectiveError, StudyError
from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.findings import Finding
from amptune.policy.settings import Autocast, Policy, amp_recipe
from amptune.search.decide.pareto import ParetoPoint, front_of, points_of
from amptune.search.sampler.records import StudyRecord
from amptune.search.table.ablation import Ablated, ablated
from amptune.search.table.contenders import Contender
from amptune.search.table.gains import counted, gain_in_words, goal_of
from amptune.search.table.objective import Objective
from amptune.search.table.ratio import chance_in_words
from amptune.search.table.trial import Trial
from amptune.search.table.verdict import Verdict, verdict_of

__all__ = ["StudyReport", "command_of", "findings_of", "study_report_of", "tuning_command"]

HALVES: tuple[Autocast, ...] = ("bf16", "fp16")
# Findings of a tuning that the answer of its study says too, for any objective.
_OF_THE_ANSWER = {
    "faster", "less-memory", "less-energy", "keep", "provisional", "undecided", "rejected", "not-judged",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StudyReport:
    """The policy that a study chooses for an objective, and the measurements behind that choice.

    `points` are the trials that ran and were not rejected.
    """

    record: StudyRecord
    verdict: Verdict
    points: tuple[ParetoPoint, ...]

    @property
    def objective(self) -> Objective:
        return self.verdict.objective

    @property
    def baseline(self) -> Contender:
        return self.verdict.baseline

    @property
    def policy(self) -> Policy:
        """The answer."""
        return self.verdict.winner.policy

    @cached_property
    def contenders(self) -> tuple[Contender, ...]:
        """The policies that were measured more than once, the best first."""
        return tuple(one for one in self.verdict.contenders if one.rows > 1)

    @cached_property
    def ablation(self) -> tuple[Ablated, ...]:
        return ablated(self.verdict, self.policy)

    @cached_property
    def front(self) -> tuple[ParetoPoint, ...]:
        """The points that no other policy beats in speed, memory and energy at once, the fastest first."""
        return front_of(self.points)

    @cached_property
    def failures(self) -> tuple[tuple[Trial, Failure], ...]:
        """The trials that failed, sorted by kind of failure."""
        failed = [(trial, trial.outcome) for trial in self.record.trials if isinstance(trial.outcome, Failure)]
        return tuple(sorted(failed, key=lambda pair: (pair[1].kind, pair[0].number)))

    @cached_property
    def amp_recipe(self) -> Contender | None:
        """The better of the AMP recipes that were tried and ran; one that trains worse than FP32 if no other did."""
        sizes = {None, self.baseline.policy.batch_size}
        recipes = {amp_recipe(dtype, batch_size=size) for dtype in HALVES for size in sizes}
        ran = [one for one in self.verdict.contenders if one.policy in recipes and one.failure is None]
        return min(ran, key=lambda one: self.record.judgements.bars(one.policy), default=None)

    def numerics_of(self, policy: Policy) -> str:
        """Returns the numerics gate's result for a policy, in words."""
        judgements = self.record.judgements
        judged = judgements.known(policy)
        if judgements.bars(policy):
            return "rejected"
        if judged is not None and judged.passes:
            return f"passed, {judged.used:.0%} of what is allowed"
        return "as FP32" if judgements.passes(policy) else "not judged"

    @property
    def keeps_the_baseline(self) -> bool:
        return self.verdict.keeps_the_baseline

    @property
    def is_proven(self) -> bool:
        """True if the answer is confirmed, or claims nothing."""
        return self.keeps_the_baseline or self.verdict.confidence == "confirmed"

    @property
    def sentence(self) -> str:
        """The answer in words."""
        if self.keeps_the_baseline:
            return f"keep what you have: no policy was shown {goal_of(self.objective)}"
        return f"{self.policy}: {gain_in_words(self.objective, self.verdict.gain, self.verdict.speedup)}"

    @property
    def grounds(self) -> str:
        """The measurements that the answer rests on, in words."""
        if self.keeps_the_baseline:
            return f"{self.verdict.confidence}, by {len(self.record.trials)} trials"
        winner = self.verdict.winner
        by = f"{counted(winner.rows, 'measurement')} in {counted(self.verdict.gain.launches, 'process')}"
        return f"{self.verdict.confidence}, {chance_in_words(winner.chance)} sure, by {by}"


def findings_of(study_report: StudyReport) -> tuple[Finding, ...]:
    """Returns the answer as a finding, then its limits: no proof, numerics that were not judged, rejected policies.

    Then what the last tuning noticed besides.
    """
    verdict, record = study_report.verdict, study_report.record
    figures = {"gain": verdict.gain.value, "speedup": verdict.speedup.value, "confidence": verdict.confidence}
    found = [Finding(code="answer", message=f"{study_report.sentence}, {study_report.grounds}", figures=figures)]
    if not study_report.is_proven:
        message = "more measurements confirm or refute it: " + command_of(study_report)
        found.append(Finding(code="not-proven", message=message))
    if not record.judgements.passes(study_report.policy):
        message = f"the numerics of {study_report.policy} were not judged: watch its loss beside FP32's, or tune for it"
        found.append(Finding(code="not-judged", message=message))
    rejected = {judged.policy: judged for judged in record.judged if not judged.passes}
    found += [Finding(code="rejected", message=f"{one.policy} cannot win: {one.words}") for one in rejected.values()]
    return (*found, *(one for one in record.findings if one.code not in _OF_THE_ANSWER))


def command_of(study_report: StudyReport) -> str:
    """Returns the command that measures more: it tunes for the objective, in the same study.

    It repeats the options of the last tuning: other options would make it another study.
    """
    return _command(study_report.record, study_report.objective, study_report.record.where)


def tuning_command(record: StudyRecord) -> str:
    """Returns the command that tunes the same workload from the start, in a study of its own."""
    return _command(record, record.last.objective, None)


def _command(record: StudyRecord, objective: Objective, where: str | None) -> str:
    last, share = record.last, objective.least_speed
    if last.target is None:
        least = f", least_speed={share:g}" if objective.needs_speed and share != 1 else ""
        study = "" if where is None else f', study="{where}"'
        return f'amptune.tune(workload, objective="{objective.name}"{least}{study})'
    least = f" --least-speed {share:g}" if objective.needs_speed and share != 1 else ""
    return (
        shlex.join(["amptune", "tune", last.target, *last.options, "--objective", objective.name])
        + least
        + (" --study NEW" if where is None else f" --study {shlex.quote(where)}")
        + (f" -- {shlex.join(last.arguments)}" if last.arguments else "")
    )


def study_report_of(record: StudyRecord, objective: Objective) -> StudyReport:
    """Returns the verdict on a study's whole table.

    Raises `StudyError` if the baseline was not measured, `ObjectiveError` if the study lacks the objective's figure.
    """
    judgements = record.judgements

    def bar(policy: Policy) -> str | None:
        return judgements.bar(policy, is_outside=policy in record.outside)

    verdict = verdict_of(record.table, record.last.baseline, record.machine, objective, bar)
    if verdict is None:
        raise _nothing_to_compare(record, objective)
    return StudyReport(record=record, verdict=verdict, points=points_of(record.trials, verdict, judgements))


def _nothing_to_compare(record: StudyRecord, objective: Objective) -> StudyError | ObjectiveError:
    policy = record.last.baseline
    outcomes = [trial.outcome for trial in record.trials if trial.policy == policy]
    if not any(isinstance(outcome, Measurement) for outcome in outcomes):
        how = f"failed ({outcomes[-1]})" if outcomes else "was not measured"
        return StudyError(f"the baseline of the study {record.name} ({policy}) {how}: nothing can be held against it")
    return ObjectiveError(
        f"the study {record.name} knows of no {objective.name}: {record.last.hardware} reported none, or steps too "
        "short for its counter were not timed for long; `amptune tune --objective energy` with the same study does that"
    )
