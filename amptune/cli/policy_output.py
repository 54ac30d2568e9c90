"""The output of `amptune tune`: writes the policy and the page, prints the result, protects files of others."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from amptune.cli.options import print_json, say
from amptune.errors import OutputError
from amptune.policy.artifact_file import beside, is_artifact_file
from amptune.policy.file_io import require_writable, write, write_bytes
from amptune.policy.file_mark import mark_of, marked

if TYPE_CHECKING:
    from amptune.search.decide.decision import Decision
    from amptune.search.request import TuningRequest

__all__ = ["deliver", "require_outputs", "require_replaceable", "write_policy"]


def require_outputs(output: str, report: str | None) -> None:
    """Raises an error if a file cannot be written: `OutputError`, or `click.BadParameter` if both are one file."""
    require_writable(output)
    if report is not None:
        require_writable(report)
        if Path(report).resolve() == Path(output).resolve():
            raise click.BadParameter(f"{report} is where the policy is written (-o)", param_hint="--report")


def require_replaceable(output: str, target: str, *, force: bool) -> None:
    """Raises `OutputError` if the policy cannot be written there, or would replace what `tune` did not write.

    It may replace an empty file, and what it wrote for the same target if nobody has edited that since.
    """
    require_writable(output)
    reason = None if force else _reason_to_keep(Path(output), target)
    if reason is not None:
        raise OutputError(f"{output} {reason}; write to another file with -o, or replace this one with --force")


def write_policy(text: str, output: str, target: str) -> None:
    """Writes the text of a policy file, with the mark by which `require_replaceable` knows it. Raises `OutputError`."""
    write(marked(text, target), output)


def _reason_to_keep(path: Path, target: str) -> str | None:
    from amptune.search.request import place_of

    if not path.is_file() or path.stat().st_size == 0:
        return None
    mark = mark_of(path.read_text(encoding="utf-8", errors="replace"))
    if mark is None:
        return "exists, and `amptune tune` did not write it"
    if not mark.is_intact:
        return f"was edited since `amptune tune` wrote it for {mark.target}"
    if place_of(None, mark.target) != place_of(None, target):
        return f"holds the policy of {mark.target}, not of {target}"
    return None


def deliver(
    decision: Decision,
    *,
    request: TuningRequest,
    target: str,
    output: str,
    report: str | None,
    as_json: bool,
    verbose: bool,
    quiet: bool,
) -> None:
    """Writes the policy and the page, then prints the result; if the policy cannot be written, prints that.

    Findings go to stderr, unless `quiet`. With `as_json`, stdout gets one object at most: the policy then goes to
    stderr, and an error comes before a result.
    """
    from amptune.policy.file_io import dumps
    from amptune.report.terminal import print_decision, print_findings
    from amptune.workload.script import line_for_training

    try:
        write_policy(dumps(decision.policy_file), output, target)
    except OutputError:
        say(dumps(decision.policy_file), err=as_json)
        raise
    artifacts = _place_artifacts(decision, request, output)
    _write_report(decision, request, report)
    if as_json:
        print_json("amptune.tune/1", {**_as_data(decision, output), "artifacts": artifacts})
    else:
        training = line_for_training(target, output, request.source.arguments)
        print_decision(decision, output, sys.stdout, training=training, verbose=verbose)
        if not quiet:
            print_findings(decision, sys.stderr, artifacts=artifacts, verbose=verbose)


def _place_artifacts(decision: Decision, request: TuningRequest, output: str) -> str | None:
    """Puts what was compiled for the winner beside its policy, and removes what belonged to others.

    Returns the file's path; None if there is none, or if it cannot be written, which is said on stderr.
    """
    kept, place = decision.artifacts, beside(output)
    try:
        for other in request.artifacts.glob("*") if request.artifacts.is_dir() else ():
            if other != kept:
                other.unlink(missing_ok=True)
        is_ours = is_artifact_file(place)
        if kept is None or not Path(output).is_file():  # no file lies beside a pipe or a terminal
            if is_ours:
                place.unlink()
            return None
        if place.exists() and not is_ours:
            raise OutputError(f"{place} exists, and `amptune tune` did not write it")
        write_bytes(kept.read_bytes(), place)
    except (OSError, OutputError) as error:
        say(f"what torch.compile made was not written: {error}", err=True)
        return None
    return str(place)


def _write_report(decision: Decision, request: TuningRequest, output: str | None) -> None:
    """Writes the HTML page, if one was requested."""
    if output is None:
        return
    from amptune.cli.report import write_page
    from amptune.report.page import page_of
    from amptune.search.decide.study_report import concluded
    from amptune.search.sampler.storage import recall

    record = recall(request.study, run=request.run)
    write_page(page_of(concluded(record, decision.verdict), decision.findings), output)
    say(f"report written to {output}", err=True)


def _as_data(decision: Decision, output: str) -> dict[str, Any]:
    from amptune.policy.serialization import policy_to_dict

    speedup, gain = decision.speedup, decision.gain
    return {
        "output": output,
        "objective": decision.objective.name,
        "policy": policy_to_dict(decision.policy),
        "speedup": speedup.value,
        "speedup_ci95": [speedup.low, speedup.high],
        "gain": gain.value,
        "gain_ci95": [gain.low, gain.high],
        "confidence": decision.verdict.confidence,
        "provisional": decision.provisional,
        "evidence": decision.policy_file.evidence,
        "valid_for": decision.policy_file.valid_for,
        "findings": [finding.as_dict() for finding in decision.findings],
        "timeline": list(decision.timeline),
    }
