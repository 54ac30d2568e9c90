"""The page's section on trials: speed against memory, comparisons, failures. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from amptune.measure.results.outcome import Failure, FailureKind, Measurement
from amptune.policy.settings import Policy
from amptune.report.markup import interval, key, memory, note, number, section, table, times
from amptune.report.plot import ChartMark, Kind, scatter
from amptune.search.decide.pareto import front_of
from amptune.search.decide.study_report import StudyReport
from amptune.search.sampler.records import StudyRecord
from amptune.search.table.contenders import Contender
from amptune.search.table.gains import FIGURES
from amptune.search.table.trial import Trial

__all__ = ["trials_of", "trials_without_answer"]

_GIB = 1024
_LABELS: dict[Kind, str] = {"winner": "answer", "baseline": "baseline", "recipe": "AMP recipe"}
_KEY = (
    ("winner", "the answer"),
    ("baseline", "baseline"),
    ("recipe", "AMP recipe"),
    ("front", "no policy is faster with as little"),
    ("trial", "other trials"),
    ("rejected", "trains worse than FP32"),
)
# What to do about each kind of failure.
_REMEDIES: dict[FailureKind, str] = {
    "oom": "did not fit into memory: a smaller batch, or accumulate",
    "nonfinite": "gave NaN or infinity: `amptune diagnose TARGET` names the module",
    "unsupported": "cannot run here: this machine or this release of PyTorch lacks it",
    "timeout": "took longer than a trial may: give more with --budget",
    "killed": "was killed from outside, which says nothing about the policy: the next run tries it",
    "crash": "ended the worker process: workers.log in the study's folder has its last words",
    "error": "the training step raised an error, which stands below",
}


def trials_of(study_report: StudyReport) -> str:
    record = study_report.record
    ran = sum(isinstance(trial.outcome, Measurement) for trial in record.trials)
    lead = f"{ran} of {len(record.trials)} trials ran. Up and left is better; point at a mark to see what it is."
    return section(
        "trials", "Every trial", note(lead, ""), *_charts(study_report), "<h3>Why the others did not win</h3>",
        _compared(study_report), *failures(record), "<h3>All trials</h3>", _all(study_report),
    )  # fmt: skip


def trials_without_answer(record: StudyRecord) -> str:
    """Returns the section of a study without an answer: all of its trials."""
    rows = table(_headings(energy=False), (_trial(trial, "", energy=False) for trial in record.trials))
    return section("trials", "Every trial", *failures(record), "<h3>All trials</h3>", rows)


def _charts(study_report: StudyReport) -> Iterator[str]:
    """Yields charts of throughput over peak memory, and over energy if it was measured; their key."""
    points = [one for one in study_report.verdict.contenders if one.samples_per_s]
    peaks_mib = [(one, one.peak_memory_mib or 0.0) for one in points]
    in_gib = max(mib for _, mib in peaks_mib) >= _GIB
    unit, size = ("GiB", _GIB) if in_gib else ("MiB", 1)
    by_memory = _marks(study_report, [(one, mib / size) for one, mib in peaks_mib], unit)
    yield scatter(by_memory, f"peak memory, {unit}", "samples per second")
    energy = [(one, one.energy_j_per_sample) for one in points if one.energy_j_per_sample is not None]
    if len(energy) > 1:
        yield scatter(_marks(study_report, energy, "J a sample"), "energy, J a sample", "samples per second")
    kinds = {mark.kind for mark in by_memory}
    yield key((kind, words) for kind, words in _KEY if kind in kinds)


def _marks(study_report: StudyReport, points: Sequence[tuple[Contender, float]], unit: str) -> list[ChartMark]:
    """Returns a mark for each point, with its place on the horizontal axis in `unit`."""
    sound = {point.policy for point in study_report.points}
    plane = [replace(p, peak_memory_mib=x, energy_j_per_sample=None) for p, x in points if p.policy in sound]
    front = {point.policy for point in front_of(plane)}
    marks = []
    for point, x in points:
        role = kind_of(study_report, point.policy)
        kind = "front" if role == "trial" and point.policy in front else role
        kind = "rejected" if role in ("trial", "recipe") and point.policy not in sound else kind
        title = f"{point.policy}: {number(point.samples_per_s)} samples/s, {number(x)} {unit}"
        marks.append(ChartMark(x=x, y=point.samples_per_s or 0.0, kind=kind, title=title, label=_LABELS.get(role, "")))
    return marks


def kind_of(study_report: StudyReport, policy: Policy) -> Kind:
    """Returns the part that a policy plays on the page."""
    recipe = study_report.amp_recipe
    if policy == study_report.baseline.policy:
        return "baseline"
    if policy == study_report.winner:
        return "winner"
    return "recipe" if recipe is not None and policy == recipe.policy else "trial"


def _compared(study_report: StudyReport) -> str:
    """Returns a table of what was measured again or came near, with the reason why each policy did not win."""
    ranked = enumerate(study_report.verdict.contenders)
    near = [one for place, one in ranked if place < _FEWEST_COMPARED or one.rows > 1 or one.merit > 1]
    shown = near[:_MOST_COMPARED]
    if all(one.policy != study_report.baseline.policy for one in shown):
        shown.append(study_report.baseline)
    used = study_report.objective.name != "throughput"
    headings = ["", "policy", "ms/step", "speed", "95 %", *([FIGURES[study_report.objective.name]] if used else [])]
    headings += ["memory", "measured", "why not"]
    kinds = [kind_of(study_report, one.policy) for one in shown]
    rows = (
        [_LABELS.get(kind, ""), *_figures(one, used=used), _reason(study_report, one)]
        for kind, one in zip(kinds, shown, strict=True)
    )
    return table(headings, rows, ["" if kind in ("trial", "recipe") else kind for kind in kinds]) + note(
        "All figures are estimates from every measurement of the study; speed is relative to the baseline."
    )


_FEWEST_COMPARED, _MOST_COMPARED = 5, 20


def _figures(one: Contender, *, used: bool) -> list[str]:
    if one.failure is not None:
        return [str(one.policy)]
    gain = [times(one.gain.inverse if one.gain is not None and one.merit else None)] if used else []
    speed = [times(one.vs_baseline), interval(one.vs_baseline)]
    return [str(one.policy), number(one.step_ms), *speed, *gain, memory(one.peak_memory_mib), f"{one.rows}×"]


def _reason(study_report: StudyReport, one: Contender) -> str:
    """Returns why a policy did not win; the answer is not spelled out again."""
    answer = "the baseline" if study_report.keeps_the_baseline else "the answer"
    return one.lost.replace(str(study_report.winner), answer)


def failures(record: StudyRecord) -> Iterator[str]:
    """Yields the failures by their kind, with what to do about each."""
    kinds: dict[FailureKind, list[tuple[Trial, Failure]]] = defaultdict(list)
    for trial in record.trials:
        if isinstance(trial.outcome, Failure):
            kinds[trial.outcome.kind].append((trial, trial.outcome))
    if not kinds:
        return
    yield f"<h3>{sum(map(len, kinds.values()))} of {len(record.trials)} trials failed</h3>"
    for kind, failed in sorted(kinds.items(), key=lambda pair: -len(pair[1])):
        yield note(f"{kind}: {len(failed)} {_REMEDIES[kind]}.", "")
        rows = [(str(trial.policy), failure.message, failure.where or "") for trial, failure in failed]
        yield table(["policy", "message", "where"], rows)


def _headings(*, energy: bool) -> list[str]:
    return ["trial", "policy", "samples/s", "ms/step", "memory, MiB", *(["J/sample"] if energy else []), "numerics"]


def _all(study_report: StudyReport) -> str:
    """Returns a table of all trials, the best for the objective first, failures last."""
    contenders = {one.policy: one for one in study_report.verdict.contenders}
    energy = any(one.energy_j_per_sample for one in contenders.values())
    ranked = sorted(study_report.trials, key=lambda trial: contenders[trial.policy].place)
    rows = (_trial(one, study_report.numerics_of(one.policy), contenders[one.policy], energy=energy) for one in ranked)
    kinds = (kind_of(study_report, one.policy) for one in ranked)
    return table(_headings(energy=energy), rows, [kind if kind in ("winner", "baseline") else "" for kind in kinds])


def _trial(trial: Trial, numerics: str, known: Contender | None = None, *, energy: bool) -> list[str]:
    """Returns a row of a trial: the figures of its policy in the verdict, or without one those of the trial alone."""
    outcome, head = trial.outcome, [str(trial.number + 1), str(trial.policy)]
    if isinstance(outcome, Failure):
        return [*head, outcome.kind]
    joules = [number((known or outcome).energy_j_per_sample)] if energy else []
    figures: tuple[float | None, ...] = (outcome.samples_per_s, outcome.mean_ms, outcome.peak_allocated_mib)
    if known is not None:
        figures = known.samples_per_s, known.step_ms, known.peak_memory_mib
    return [*head, *map(number, figures), *joules, numerics]
