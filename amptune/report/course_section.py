"""The page's section on the course of the tuning: what was done when, the best so far, what disturbed it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from amptune.measure.bench.readings import noticed
from amptune.measure.results.outcome import Measurement
from amptune.report.markup import bullets, note, seconds, section, table
from amptune.report.plot import ChartLine, lines
from amptune.search.decide.study_report import StudyReport
from amptune.search.sampler.records import StudyRecord
from amptune.search.table.trial import Trial

__all__ = ["course_section"]

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
# Pieces of one lane that are nearer than this share of the whole are drawn as one.
NEAR = 0.004
# (start, end, words), in seconds from the start of the run
Piece = tuple[float, float, str]


def course_section(record: StudyRecord, study_report: StudyReport | None) -> str:
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
    rows = []
    for stage, own in pieces.items():
        if own:
            drawn = "".join(_drawn(piece, end_s, stage) for piece in _joined(own, NEAR * end_s))
            took = seconds(sum(end - start for start, end, _ in own))
            name = escape(LANES.get(stage, stage))
            rows.append(
                f'<div class="bar"><span>{name}</span><span class="track">{drawn}</span><span class="figure">{took}</span></div>'
            )
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
    kind = {"compile": "recipe soft", "wait": "warn", "comparison": "winner"}.get(stage, "")
    style = f"left:{100 * start / end_s:.2f}%;width:{100 * (stop - start) / end_s:.2f}%"
    return f'<i class="{kind}" style="{style}" title="{escape(f"{start:.0f} to {stop:.0f} s: {words}")}"></i>'


def _best_so_far(study_report: StudyReport) -> Iterator[str]:
    """Yields a line of the best speed so far, by trial, of those that may win."""
    base, sound = study_report.baseline.samples_per_s, {point.policy for point in study_report.points}
    trials = [one for one in study_report.record.trials if isinstance(one.outcome, Measurement)]
    if not base or len(trials) < 2:
        return
    points: list[tuple[float, float]] = []
    best = 0.0
    for count, trial in enumerate(trials, 1):
        speed = _speed(trial) / base
        if trial.policy in sound and speed > best:
            points += [(count, best)] if best else []
            points.append((count, speed))
            best = speed
    if points:
        drawn = [ChartLine(points=[*points, (len(trials), best)], kind="best", title="the best so far")]
        yield "<h3>The best so far</h3>"
        yield lines(drawn, "trials that ran", "times the baseline's speed, by single trials")


def _speed(trial: Trial) -> float:
    return trial.samples_per_s
