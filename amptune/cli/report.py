"""The command `amptune report`: answers from a study, for any objective, without measuring."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amptune.cli.options import FILE, json_option, objective_options, print_json, say
from amptune.policy.findings import Finding

if TYPE_CHECKING:
    from amptune.search.decide.study_report import StudyReport
    from amptune.search.sampler.records import StudyRecord

__all__ = ["report_command"]


@click.command("report", short_help="Answer from a study's trials, for any objective; a page of them.")
@click.argument("study", type=FILE, metavar="STUDY")
@click.option("-o", "--output", type=FILE, metavar="F.html", help="Write a page that stands alone, instead of text.")
@objective_options(None, "What is to be best. Default: what the study was last tuned for.")
@click.option("--name", help="Which study, where the storage holds several. Default: the last.")
@json_option
def report_command(
    study: str,
    output: str | None,
    objective: str | None,
    least_speed: float | None,
    name: str | None,
    as_json: bool,
) -> None:
    """Say which policy the trials of STUDY speak for, for any objective, without measuring again.

    STUDY is a study's folder, a database URL, or the TARGET that was tuned. Trials, comparisons and what the numerics
    gate said are read back; what rests on a single trial is said to, with the command that proves it.
    """
    from amptune.errors import StudyError
    from amptune.policy.file_io import require_writable
    from amptune.report.page import page_of, page_without_answer
    from amptune.report.terminal import print_study_report
    from amptune.search.decide.study_report import findings_of
    from amptune.search.sampler.storage import recall

    if output is not None:
        require_writable(output)
    record = recall(_place(study), name)
    try:
        study_report = _study_report(record, objective, least_speed)
    except StudyError as error:
        if output is None:
            raise
        write_page(page_without_answer(record, str(error)), output)
        say(f"wrote {output}: {error}", err=True)
        if as_json:
            finding = Finding(code="study", message=str(error))
            print_json("amptune.report/1", {"output": output, "study": record.name, "findings": [finding.as_dict()]})
        return
    if output is not None:
        write_page(page_of(study_report, findings_of(study_report)), output)
    if as_json:
        print_json("amptune.report/1", {"output": output, **_as_data(study_report)})
    elif output is not None:
        say(f"wrote {output}: {study_report.verdict.sentence}")
    else:
        print_study_report(study_report, sys.stdout)


def write_page(page: str, output: str) -> None:
    """Writes the page. Raises `OutputError` if it cannot be written."""
    from amptune.errors import OutputError

    try:
        Path(output).write_text(page, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"the report cannot be written to {output}: {error}") from error


def _study_report(record: StudyRecord, objective: str | None, least_speed: float | None) -> StudyReport:
    from amptune.search.decide.study_report import study_report_of
    from amptune.search.table.objective import objective_of

    last = record.last.objective
    asked = objective_of(objective or last.name, least_speed) if objective or least_speed is not None else last
    return study_report_of(record, asked)


def _place(study: str) -> Path | str:
    """Returns the place of the trials: a folder, a database URL, or the folder of a target."""
    from amptune.search.request import place_of

    own, _ = place_of(None, study)
    if "://" in study:
        return study
    return own if own.is_dir() and not Path(study).is_dir() else Path(study)


def _as_data(study_report: StudyReport) -> dict[str, Any]:
    from amptune.policy.serialization import policy_to_dict
    from amptune.search.decide.study_report import command_of, findings_of

    verdict, record = study_report.verdict, study_report.record
    return {
        "study": record.name,
        "workload": record.last.workload,
        "hardware": record.last.hardware,
        "objective": study_report.objective.name,
        "least_speed": study_report.objective.least_speed if study_report.objective.needs_speed else None,
        "policy": policy_to_dict(study_report.winner),
        "gain": verdict.gain.value,
        "gain_ci95": [verdict.gain.low, verdict.gain.high],
        "speedup": verdict.speedup.value,
        "speedup_ci95": [verdict.speedup.low, verdict.speedup.high],
        "confidence": verdict.confidence,
        "pareto": study_report.pareto,
        "trials": len(record.trials),
        "failures": dict(Counter(failure.kind for _, failure in study_report.failures)),
        "command": command_of(study_report),
        "timeline": list(record.timeline),
        "findings": [finding.as_dict() for finding in findings_of(study_report)],
    }
