"""The answer of a study for an objective, from its table, without new measurements; the command to go on. Pure."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property

from amptune.errors import ObjectiveError, StudyError
from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.findings import Finding
from amptune.policy.settings import Autocast, Policy, amp_recipe
from amptune.search.decide.caveats import numeric_caveats
from amptune.search.decide.conclusion import Conclusion
from amptune.search.sampler.records import StudyRecord, TuningRecord
from amptune.search.table.objective import Objective
from amptune.search.table.trial import Trial
from amptune.search.table.verdict import Verdict, verdict_of

__all__ = ["StudyReport", "command_of", "concluded", "findings_of", "study_report_of", "tuning_command"]

HALVES: tuple[Autocast, ...] = ("bf16", "fp16")
# Findings of a tuning that the answer of its study says too, for any objective.
_OF_THE_ANSWER = {
    "faster", "less-memory", "less-energy", "keep", "provisional", "undecided", "rejected", "not-judged",
    "budget-too-small",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class StudyReport(Conclusion):
    """The conclusion of a study for an objective, with its record."""

    record: StudyRecord

    @cached_property
    def failures(self) -> tuple[tuple[Trial, Failure], ...]:
        """The trials that failed, sorted by kind of failure."""
        failed = [(trial, trial.outcome) for trial in self.trials if isinstance(trial.outcome, Failure)]
        return tuple(sorted(failed, key=lambda pair: (pair[1].kind, pair[0].number)))


def concluded(record: StudyRecord, verdict: Verdict) -> StudyReport:
    """Returns the report on a study whose verdict this is."""
    sizes = {None, verdict.baseline.policy.batch_size}
    recipes = tuple(amp_recipe(dtype, batch_size=size) for dtype in HALVES for size in sizes)
    judgements = record.judgements
    return StudyReport(record=record, verdict=verdict, trials=record.trials, judgements=judgements, recipes=recipes)


def study_report_of(record: StudyRecord, objective: Objective) -> StudyReport:
    """Returns the report on a study's whole table.

    Raises `StudyError` if the baseline was not measured, `ObjectiveError` if the study lacks the objective's figure.
    """

    def bar(policy: Policy) -> str | None:
        return record.judgements.bar(policy, is_outside=policy in record.outside)

    verdict = verdict_of(record.table, record.last.baseline, record.machine, objective, bar)
    if verdict is None:
        raise _nothing_to_compare(record, objective)
    return concluded(record, verdict)


def findings_of(study_report: StudyReport) -> tuple[Finding, ...]:
    """Returns the answer as a finding, then its limits: no proof, numerics that were not judged, rejected policies.

    Then what the last tuning noticed besides.
    """
    verdict, record = study_report.verdict, study_report.record
    figures = {"gain": verdict.gain.value, "speedup": verdict.speedup.value, "confidence": verdict.confidence}
    found = [Finding(code="answer", message=f"{verdict.sentence} ({verdict.grounds})", figures=figures)]
    is_proven = verdict.keeps_the_baseline or verdict.confidence == "confirmed"
    if not is_proven or verdict.is_open:
        message = "more measurements confirm or refute it: " + command_of(study_report)
        found.append(Finding(code="not-proven", message=message))
    caveats = [one for one in numeric_caveats(study_report, {}, ()) if one.code in _OF_THE_ANSWER]
    return (*found, *caveats, *(one for one in record.findings if one.code not in _OF_THE_ANSWER))


def command_of(study_report: StudyReport) -> str:
    """Returns the command that measures more: it tunes for the objective, in the same study."""
    return tuning_command(study_report.record.last, study_report.objective, study_report.record.where)


def tuning_command(
    last: TuningRecord, objective: Objective | None = None, where: str | None = None, *, budget_s: float | None = None
) -> str:
    """Returns the command that tunes as the `last` tuning did, in its study `where`; without one from the start.

    It repeats the options of the last tuning: other options would make it another study.
    """
    objective = objective or last.objective
    least = objective.least_speed if objective.needs_speed and objective.least_speed != 1 else None
    if last.target is None:
        settings = [f'objective="{objective.name}"'] + ([] if least is None else [f"least_speed={least:g}"])
        settings += [] if where is None else [f'study="{where}"']
        settings += [] if budget_s is None else [f"budget_s={budget_s:.0f}"]
        return f"amptune.tune(workload, {', '.join(settings)})"
    words = ["amptune", "tune", last.target, *last.options, "--objective", objective.name]
    words += [] if least is None else ["--least-speed", f"{least:g}"]
    words += [] if budget_s is None else ["--budget", f"{budget_s:.0f}s"]
    words += ["--study", "NEW" if where is None else where]
    return shlex.join([*words, "--", *last.arguments] if last.arguments else words)


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
