"""A study's answer as one self-contained HTML page: no script, no other file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from itertools import chain, repeat
from typing import Any

from amptune.measure.results.outcome import Failure, Measurement
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy, amp_recipe
from amptune.report.chart import ChartMark, Kind, scatter
from amptune.report.result_tables import HOW_TO_READ
from amptune.search.decide.pareto import ParetoPoint, front_of
from amptune.search.decide.study_report import StudyReport, command_of
from amptune.search.table.ablation import Ablated
from amptune.search.table.contenders import Contender
from amptune.search.table.gains import FIGURES
from amptune.search.table.ratio import Ratio
from amptune.search.table.trial import Trial

__all__ = ["bullets", "page_of", "section", "table", "whole_page"]

_ROLES = {"winner": "answer", "baseline": "baseline", "recipe": "AMP recipe"}
Rows = Iterable[Sequence[str]]


def page_of(study_report: StudyReport, findings: Sequence[Finding]) -> str:
    """Returns the page, from the answer down to the single trials. All text is escaped."""
    last = study_report.record.last
    title = f"{last.workload} on {last.hardware}"
    return whole_page(title, _sections(study_report, findings, title))


def whole_page(title: str, content: Iterable[str]) -> str:
    """Returns a page that stands alone; `content` is HTML."""
    style = (files("amptune.report") / "page.css").read_text(encoding="utf-8")
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>",
            *content,
            "</main>\n</body>\n</html>\n",
        ]
    )


def _sections(study_report: StudyReport, findings: Sequence[Finding], title: str) -> Iterator[str]:
    yield from _heading(study_report, title)
    if study_report.contenders:
        yield section("Measured more than once", _finalists(study_report))
    yield from _charts(study_report)
    if study_report.ablation:
        yield section("What each setting buys", _settings(study_report))
    if findings:
        yield section("Findings", bullets(map(str, findings)))
    yield section(f"All {len(study_report.record.trials)} trials", _trials(study_report))
    if study_report.failures:
        yield section("Failures", _failures(study_report))
    if study_report.record.timeline:
        yield section("What was done when", _timeline(study_report.record.timeline))


def _heading(study_report: StudyReport, title: str) -> Iterator[str]:
    last = study_report.record.last
    state = "proven" if study_report.is_proven else "unproven"
    badge = "nothing better" if study_report.keeps_the_baseline else "confirmed" if study_report.is_proven else "likely"
    yield f'<header>\n<p class="eyebrow">amptune · {escape(study_report.objective.name)}</p>\n<h1>{escape(title)}</h1>'
    yield f'<div class="answer {state}">\n<p class="sentence">{escape(study_report.sentence)}</p>'
    yield f'<p><span class="badge">{badge}</span> {escape(study_report.grounds)}</p>'
    if not study_report.is_proven:
        yield f"<p>To prove or refute it:</p>\n<pre>{escape(command_of(study_report))}</pre>"
    began = last.began[:16].replace("T", " ")
    yield f'</div>\n<p class="small">batch size {escape(str(last.batch_size))} · '
    yield f"baseline {escape(str(last.baseline))} · "
    yield f"study {escape(study_report.record.name)} · last tuned {escape(began)} UTC</p>\n</header>"


def _finalists(study_report: StudyReport) -> str:
    used = study_report.objective.name != "throughput"
    headings = ["", "policy", "samples/s", "ms/step", "peak MiB", "J/sample", "speed vs. baseline", "95 %"]
    headings += [f"{FIGURES[study_report.objective.name]} vs. baseline", "95 %"] if used else []
    recipe = _recipe_of(study_report)
    kinds = [_kind_of(study_report, contender.policy, recipe)[0] for contender in study_report.contenders]
    cells = (_contender_cells(contender, used=used) for contender in study_report.contenders)
    rows = ([_ROLES.get(kind, ""), *row] for kind, row in zip(kinds, cells, strict=True))
    return table(headings, rows, kinds) + f'\n<p class="small">{escape(HOW_TO_READ)}</p>'


def _contender_cells(contender: Contender, *, used: bool) -> list[str]:
    policy = str(contender.policy)
    if contender.failure is not None:
        return [policy, contender.failure.kind]
    gain = contender.gain.inverse if contender.gain is not None and contender.merit else None
    slow = " (too slow)" if contender.too_slow else ""
    own = [_value(gain), _interval(gain)] if used else []
    return [
        policy,
        _number(contender.samples_per_s),
        _number(contender.step_ms),
        _number(contender.peak_memory_mib),
        _number(contender.energy_j_per_sample),
        _value(contender.vs_baseline) + slow,
        _interval(contender.vs_baseline),
        *own,
    ]


def _charts(study_report: StudyReport) -> Iterator[str]:
    """Yields charts of throughput over peak memory, and over energy if it was measured."""
    memory = [(point, point.peak_memory_mib) for point in _plotted(study_report)]
    yield section("Throughput and peak memory", _chart(study_report, memory, "peak memory, MiB") + _KEY)
    energy = [(p, p.energy_j_per_sample) for p in _plotted(study_report) if p.energy_j_per_sample is not None]
    if energy:
        yield section("Throughput and energy", _chart(study_report, energy, "energy, J per sample") + _KEY)


def _plotted(study_report: StudyReport) -> list[ParetoPoint]:
    """Returns all trials that ran, including those the numerics gate rejected."""
    return [
        ParetoPoint(
            policy=trial.policy,
            samples_per_s=trial.outcome.samples_per_s,
            peak_memory_mib=trial.outcome.peak_allocated_mib,
            energy_j_per_sample=trial.outcome.energy_j_per_sample,
        )
        for trial in study_report.record.trials
        if isinstance(trial.outcome, Measurement)
    ]


def _chart(study_report: StudyReport, points: Sequence[tuple[ParetoPoint, float]], x_label: str) -> str:
    sound = {point.policy for point in study_report.points}
    plane = [replace(p, peak_memory_mib=x, energy_j_per_sample=None) for p, x in points if p.policy in sound]
    front = {point.policy for point in front_of(plane)}
    recipe = _recipe_of(study_report)
    marks = []
    for point, x in points:
        kind, label = _kind_of(study_report, point.policy, recipe)
        if kind == "trial":
            kind = "rejected" if point.policy not in sound else "front" if point.policy in front else "trial"
        title = f"{point.policy}: {point.samples_per_s:,.4g} samples/s, {x:,.4g} {x_label.split(', ')[1]}"
        marks.append(ChartMark(x=x, y=point.samples_per_s, kind=kind, title=title, label=label))
    return f"<figure>\n{scatter(marks, x_label, 'samples per second')}\n</figure>"


def _kind_of(study_report: StudyReport, policy: Policy, recipe: Policy | None) -> tuple[Kind, str]:
    if policy == study_report.policy:
        return "winner", "baseline: keep it" if study_report.keeps_the_baseline else f"answer: {_short(policy)}"
    if policy == study_report.baseline.policy:
        return "baseline", f"baseline: {_short(policy)}"
    if policy == recipe:
        return "recipe", f"AMP recipe: {_short(policy)}"
    return "trial", ""


def _recipe_of(study_report: StudyReport) -> Policy | None:
    """Returns the faster of the AMP recipes that were tried and ran, or None."""
    size = study_report.baseline.policy.batch_size
    recipes = [amp_recipe("bf16", batch_size=size), amp_recipe("fp16", batch_size=size)]
    ran = [point for point in study_report.points if point.policy in recipes]
    return max(ran, key=lambda point: point.samples_per_s).policy if ran else None


def _settings(study_report: StudyReport) -> str:
    used = study_report.objective.name != "throughput"
    headings = ["setting", "value", "speed with it / without", "95 %"]
    headings += [f"{FIGURES[study_report.objective.name]} with it / without", "95 %"] if used else []
    return table(headings, (_bought(one, used=used) for one in study_report.ablation))


def _bought(one: Ablated, *, used: bool) -> list[str]:
    value = "" if isinstance(one.variant.value, list) else str(one.variant.value)
    own = [_value(one.buys.inverse), _interval(one.buys.inverse)] if used else []
    return [one.variant.setting, value, _value(one.speed), _interval(one.speed), *own]


def _trials(study_report: StudyReport) -> str:
    """Returns a table of all trials, the best for the objective first, failures last."""

    def place(trial: Trial) -> tuple[bool, float]:
        failed = isinstance(trial.outcome, Failure)
        return failed, 0.0 if isinstance(trial.outcome, Failure) else -(
            study_report.objective.score(trial.outcome) or 0.0
        )

    headings = ["#", "policy", "samples/s", "ms/step", "peak MiB", "J/sample", "numerics"]
    trials = sorted(study_report.record.trials, key=place)
    return table(headings, (_trial(trial, _numerics(study_report, trial.policy)) for trial in trials))


def _trial(trial: Trial, numerics: str) -> list[str]:
    outcome, head = trial.outcome, [str(trial.number + 1), str(trial.policy)]
    if isinstance(outcome, Failure):
        return [*head, outcome.kind]
    figures = (outcome.samples_per_s, outcome.mean_ms, outcome.peak_allocated_mib, outcome.energy_j_per_sample)
    return [*head, *map(_number, figures), numerics]


def _numerics(study_report: StudyReport, policy: Policy) -> str:
    """Returns the numerics gate's result for a policy, as text."""
    judged = study_report.record.judgements.known(policy)
    if study_report.record.judgements.bars(policy):
        return "rejected"
    if judged is not None and judged.passes:
        return f"passed, {judged.used:.0%} of what is allowed"
    return "as FP32" if study_report.record.judgements.passes(policy) else "not judged"


def _failures(study_report: StudyReport) -> str:
    rows = (
        (failure.kind, str(trial.policy), failure.message, failure.where or "")
        for trial, failure in study_report.failures
    )
    return table(["kind", "policy", "message", "where"], rows)


def _timeline(timeline: Sequence[Mapping[str, Any]]) -> str:
    """Returns a table of the plan's steps: when each began, how long it took, and what was expected of it."""
    rows = (
        (
            f"{step['at_s']:.0f}",
            f"{step['seconds']:.1f}",
            f"{step['expected_s']:.1f}",
            "" if step["worth"] is None else f"{math.expm1(step['worth']):.1%}",
            step["stage"],
            step["what"],
            step["instead_of"] or "",
        )
        for step in timeline
    )
    headings = ["at, s", "took, s", "expected, s", "may gain", "stage", "what", "before"]
    return table(headings, rows)


def section(heading: str, content: str) -> str:
    return f"<section>\n<h2>{escape(heading)}</h2>\n{content}\n</section>"


def bullets(items: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{escape(item)}</li>" for item in items) + "\n</ul>"


def table(headings: Sequence[str], rows: Rows, classes: Sequence[str] = ()) -> str:
    """Returns a table; in a row with too few cells, the last cell spans the missing columns."""
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    lines = [
        f'<tr class="{escape(kind)}">{_cells(row, len(headings))}</tr>'
        for row, kind in zip(rows, chain(classes, repeat("")), strict=False)
    ]
    return (
        f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + ("\n</tbody>\n</table></div>")
    )


def _cells(row: Sequence[str], count: int) -> str:
    span = f' colspan="{count - len(row) + 1}"' if len(row) < count else ""
    cells = [f"<td>{escape(cell)}</td>" for cell in row[:-1]]
    return "".join(cells) + f"<td{span}>{escape(row[-1])}</td>"


def _short(policy: Policy) -> str:
    """Returns the policy's first 40 characters, as a label."""
    words = str(replace(policy, batch_size=None))
    return words if len(words) <= 40 else f"{words[:39]}…"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    digits = 0 if value >= 1000 else max(0, 3 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{min(digits, 6)}f}"


def _value(ratio: Ratio | None) -> str:
    return "" if ratio is None or not ratio.value > 0 else f"{ratio.value:.3f}×"


def _interval(ratio: Ratio | None) -> str:
    return "" if ratio is None or math.isinf(ratio.high) else f"{ratio.low:.3f} to {ratio.high:.3f}"


_KEY = """
<ul class="key">
<li class="winner"><i>●</i> the answer</li>
<li class="baseline"><i>■</i> baseline</li>
<li class="recipe"><i>◆</i> AMP recipe</li>
<li class="front"><i>●</i> nothing beats it here</li>
<li class="trial"><i>•</i> other trials</li>
<li class="rejected"><i>×</i> not as good as FP32</li>
</ul>"""
