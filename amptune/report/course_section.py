"""The page's section on the course of the tuning: what was done when, the best so far, what disturbed it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from amptune.measure.bench.readings import OWN_LOAD, noticed
from amptune.measure.results.outcome import Measurement
from amptune.report.markup import bullets, note, seconds, section, table
from amptune.report.plot import ChartLine, lane, lines
from amptune.search.decide.study_report import StudyReport
from amptune.search.sampler.records import StudyRecord

__all__ = ["course_of"]

# The stages of the plan in words that a user knows, in the order of a run.
LANES = {
    "build": "build the model",
    "batch size": "find the largest batch",
    "compile": "compile in the background",
    "trial": "measure policies",
    "numerics": "check numerics against FP32",
    "cure": "find modules to keep in FP32",
    "modules": "time single modules",
    "graph": "check the compiled graph",
    "wait": "wait for a graph",
    "comparison": "compare the best in turn",
}
_COLOURS = {"compile": "recipe soft", "wait": "warn", "comparison": "winner", "disturbed from outside": "bad"}
# Pieces of one lane that are nearer than this share of the whole are drawn as one.
NEAR = 0.004
# (start, end, words), in seconds from the start of the run
Piece = tuple[float, float, str]


def course_of(record: StudyRecord, study_report: StudyReport | None) -> str:
    parts = [*_runs(record), *_lanes(record)]
    if study_report is not None:
        parts += _best_so_far(study_report)
    disturbed = [str(finding) for finding in noticed(row.outcome for row in record.table)]
    parts += ["<h3>What disturbed it</h3>"]
    parts += [bullets(disturbed)] if disturbed else [note("Nothing that the instruments of this machine show.")]
    return section("course", "How the tuning went", *parts)


def _runs(record: StudyRecord) -> Iterator[str]:
    rows = []
    for tuning in record.tunings:
        own = [trial for trial in record.trials if trial.run == tuning.run]
        began = f"{tuning.began[:16].replace('T', ' ')} UTC"
        took = seconds(sum(trial.seconds for trial in own))
        rows.append((began, tuning.objective.name, str(len(own)), took))
    yield table(["began", "tuned for", "new trials", "in trials"], rows)


def _lanes(record: StudyRecord) -> Iterator[str]:
    timeline = record.timeline
    if not timeline:
        yield note("The last tuning left no course of what it did: it was killed, or is still running.")
        return
    end_s = max(step["at_s"] + step["seconds"] for step in timeline)
    yield f"<h3>The last tuning, {seconds(end_s)}</h3>"
    pieces = {stage: _pieces(timeline, stage, end_s) for stage in LANES}
    others = [step["stage"] for step in timeline if step["stage"] not in LANES]
    pieces |= {stage: _pieces(timeline, stage, end_s) for stage in others}
    pieces["disturbed from outside"] = [(max(0.0, a), min(b, end_s), what) for a, b, what in _disturbed(record)]
    rows = []
    for stage, own in pieces.items():
        if own:
            drawn = "".join(_drawn(piece, end_s, stage) for piece in _joined(own, NEAR * end_s))
            took = seconds(sum(end - start for start, end, _ in own))
            name = LANES.get(stage, stage)
            rows.append(lane(name, drawn, took))
    yield f'<div class="bars">{"".join(rows)}</div>'


def _pieces(timeline: Sequence[Mapping[str, Any]], stage: str, end_s: float) -> list[Piece]:
    """Returns the pieces of a stage; a graph compiles from its beginning until its trial, or to the end."""
    found = []
    for place, step in enumerate(timeline):
        if step["stage"] != stage:
            continue
        start, stop = step["at_s"], step["at_s"] + step["seconds"]
        if stage == "compile":
            came = (one["at_s"] for one in timeline[place:] if one["stage"] == "trial" and one["what"] == step["what"])
            stop = next(came, end_s)
        found.append((start, stop, step["what"]))
    return found


def _joined(pieces: Sequence[Piece], near_s: float) -> list[Piece]:
    found: list[Piece] = []
    for start, stop, words in sorted(pieces):
        if found and start - found[-1][1] < near_s and found[-1][1] - found[-1][0] < 5 * near_s:
            before = found.pop()
            found.append((before[0], max(stop, before[1]), f"{before[2].split(' … ')[0]} … {words}"))
        else:
            found.append((start, stop, words))
    return found


def _drawn(piece: Piece, end_s: float, stage: str) -> str:
    start, stop, words = piece
    kind = _COLOURS.get(stage, "")
    style = f"left:{100 * start / end_s:.2f}%;width:{100 * (stop - start) / end_s:.2f}%"
    return f'<i class="{kind}" style="{style}" title="{escape(f"{start:.0f} to {stop:.0f} s: {words}")}"></i>'


def _best_so_far(study_report: StudyReport) -> Iterator[str]:
    """Yields a line of the best speed so far, of the policies that may win: over time, or by trial if it is unknown."""
    record = study_report.record
    sound, moments = {point.policy for point in study_report.points}, _moments(record)
    ran = [one for one in record.trials if isinstance(one.outcome, Measurement)]
    base = next((one.samples_per_s for one in ran if one.policy == study_report.baseline.policy), 0.0)
    timed = [(moments[one.number], one) for one in ran if one.number in moments]
    placed = timed if len(timed) > 1 else [(float(count), one) for count, one in enumerate(ran, 1)]
    points: list[tuple[float, float]] = []
    for at, trial in placed:
        speed = trial.samples_per_s / base if base and trial.policy in sound else 0.0
        if speed > (points[-1][1] if points else 0.0):
            points += [(at, points[-1][1])] if points else []
            points.append((at, speed))
    if len(placed) > 1 and points:
        drawn = [ChartLine(points=[*points, (placed[-1][0], points[-1][1])], kind="best", title="the best so far")]
        yield "<h3>The best so far</h3>"
        label = "seconds" if placed is timed else "trials that ran"
        yield lines(drawn, label, "times the baseline's speed, by single trials")


def _moments(record: StudyRecord) -> dict[int, float]:
    """Returns when each trial of the last tuning ended, in seconds from its start, by the trial's number.

    Trials have the moments of the run's clock, whose start the study does not say: the timeline's first trial does.
    """
    own = [trial for trial in record.trials if trial.run == record.last.run]
    first = next((step["at_s"] + step["seconds"] for step in record.timeline if step["stage"] == "trial"), None)
    return {} if first is None or not own else {one.number: first + one.moment_s - own[0].moment_s for one in own}


def _disturbed(record: StudyRecord) -> list[Piece]:
    """Returns the trials of the last tuning during which something from outside disturbed a block."""
    moments, found = _moments(record), []
    for trial in record.trials:
        outcome = trial.outcome
        if trial.number in moments and isinstance(outcome, Measurement):
            codes = {code for why in (*outcome.discarded, *outcome.contaminated_by) for code in why.split("+")}
            if codes - OWN_LOAD:
                words = f"{', '.join(sorted(codes - OWN_LOAD))}: {trial.policy}"
                found.append((moments[trial.number] - trial.seconds, moments[trial.number], words))
    return found
