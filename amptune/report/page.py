"""A study's answer as one HTML page that stands alone: the verdict first, down to the single trials. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from amptune.policy.file_io import dumps
from amptune.policy.findings import Finding
from amptune.policy.policy_file import PolicyFile
from amptune.report.findings_section import findings_section_of, repeated
from amptune.report.markup import code, escape, interval, memory, note, number, section, times, whole_page
from amptune.report.numerics_section import numerics_of
from amptune.report.plot import BEYOND, Bar, bars
from amptune.report.settings_section import settings_of
from amptune.report.trials_section import trials_of, trials_without_answer
from amptune.search.decide.study_report import StudyReport, command_of, tuning_command
from amptune.search.sampler.records import StudyRecord
from amptune.search.table.contenders import Contender
from amptune.search.table.gains import counted
from amptune.search.table.ratio import Ratio

__all__ = ["page_of", "page_without_answer"]

_USE = """tuned = amptune.apply("policy.yaml", model)
optimizer = tuned.optimizer(optimizer)"""
# A longer interval is cut where it is so many times as long as the longest bar.
MOST_OF_INTERVAL = 2.5
_NOT_MEASURED = "Not measured: without the baseline there is nothing to compare with."


def page_of(study_report: StudyReport, findings: Sequence[Finding]) -> str:
    """Returns the page. All text is escaped."""
    record = study_report.record
    return whole_page(
        _title(record),
        [
            _heading(record, study_report.objective.name),
            _verdict(study_report),
            _policy(study_report),
            settings_of(study_report),
            trials_of(study_report),
            numerics_of(study_report),
            findings_section_of(study_report, findings),
        ],
    )


def page_without_answer(record: StudyRecord, why: str) -> str:
    """Returns the page of a study in which the baseline has no figure, so that there is no answer."""
    command = tuning_command(record.last).replace(" --study NEW", "")
    verdict = [
        note("No answer: the baseline does not run.", "sentence"),
        f'<p><span class="badge">failed</span> {escape(why)}</p>',
        note("Mend what fails below, or name another --baseline or a smaller --batch-size; then run again:"),
        code(command),
    ]
    findings = section("findings", "Findings", "<p>" + escape(why) + "</p>", *repeated(record, command))
    return whole_page(
        _title(record),
        [
            _heading(record, record.last.objective.name),
            section("verdict", "The verdict", *verdict, kind="failed"),
            section("policy", "The policy", note("There is none: keep what you have.")),
            section("settings", "What each setting buys", note(_NOT_MEASURED)),
            trials_without_answer(record),
            section("numerics", "Numerics", note(_NOT_MEASURED)),
            findings,
        ],
    )


def _title(record: StudyRecord) -> str:
    return f"{record.last.workload} on {record.last.hardware}"


def _heading(record: StudyRecord, objective: str) -> str:
    last = record.last
    count = counted(len(record.trials), "trial")
    words = f"batch size {last.batch_size} · baseline {last.baseline} · {count}"
    began = f"{last.began[:16].replace('T', ' ')} UTC"
    return (
        f'<header>\n<p class="eyebrow">amptune · {escape(objective)}</p>\n<h1>{escape(_title(record))}</h1>\n'
        f'<p class="small">{escape(f"{words} · last tuned {began}")}</p>\n</header>'
    )


def _verdict(study_report: StudyReport) -> str:
    state = _state(study_report)
    parts = [
        note(f"{_title(study_report.record)}: {study_report.verdict.sentence}.", "sentence"),
        f'<p><span class="badge">{escape(state)}</span> {escape(_grounds(study_report))}</p>',
        *_bars(study_report),
        *_next(study_report),
    ]
    kind = {"confirmed": "confirmed", "no gain": "kept"}.get(state, "open")
    return section("verdict", "The verdict", *parts, kind=kind)


def _state(study_report: StudyReport) -> str:
    """Returns the certainty of the answer as a word."""
    record = study_report.record
    interrupted = any(finding.code == "interrupted" for finding in record.findings)
    confirmed = study_report.verdict.confidence == "confirmed" and not interrupted
    if study_report.keeps_the_baseline:
        return "nothing compared" if study_report.verdict.is_open else "no gain" if confirmed else "undecided"
    return "confirmed" if confirmed and record.judgements.passes(study_report.winner) else "provisional"


def _grounds(study_report: StudyReport) -> str:
    if study_report.keeps_the_baseline:
        return study_report.verdict.grounds
    return f"{study_report.verdict.grounds}; numerics: {study_report.numerics_of(study_report.winner)}"


def _bars(study_report: StudyReport) -> Iterator[str]:
    """Yields bars of speed and of memory: baseline, AMP recipe, and the answer or the best rival."""
    verdict, recipe = study_report.verdict, study_report.amp_recipe
    last = verdict.leader if study_report.keeps_the_baseline else verdict.winner
    named = [("baseline", verdict.baseline, "baseline"), ("AMP recipe", recipe, "recipe")]
    named += [("best rival", last, "front") if study_report.keeps_the_baseline else ("tuned", last, "winner")]
    shown = {one.policy: (name, one, kind) for name, one, kind in named if one is not None}.values()
    speeds = []
    for name, one, kind in shown:
        if (ratio := one.vs_baseline) is not None:
            worse = "; trains worse than FP32" if study_report.judgements.bars(one.policy) else ""
            between = None if ratio.low == ratio.high else (ratio.low, ratio.high)
            words = _speed_in_words(one, ratio) + worse
            speeds.append(Bar(name=f"{name}: {_short(one)}", end=ratio.value, kind=kind, words=words, between=between))
    longest = max(bar.end for bar in speeds)
    farthest = max(bar.between[1] if bar.between else 0.0 for bar in speeds)
    yield "<h3>Speed, with 95 % intervals</h3>"
    yield bars(speeds, max(longest, min(farthest, MOST_OF_INTERVAL * longest)) * BEYOND)
    peaks = [(name, one.peak_memory_mib, kind) for name, one, kind in shown if one.peak_memory_mib]
    yield "<h3>Peak memory</h3>"
    drawn = [Bar(name=name, end=mib, kind=kind, words=memory(mib)) for name, mib, kind in peaks]
    yield bars(drawn, max(bar.end for bar in drawn) * BEYOND)


def _speed_in_words(contender: Contender, ratio: Ratio) -> str:
    between = f" [{interval(ratio)}]" if interval(ratio) else ""
    step = f", {number(contender.step_ms)} ms a step" if contender.step_ms else ""
    return f"{times(ratio)}{between}{step}"


def _short(contender: Contender) -> str:
    """Returns the first settings of a policy."""
    words = str(replace(contender.policy, batch_size=None))
    return words if len(words) <= 48 else f"{words[:47]}…"


def _next(study_report: StudyReport) -> Iterator[str]:
    """Yields what to do next, if the answer is not certain."""
    state = _state(study_report)
    if state in ("confirmed", "no gain"):
        return
    advice = {
        "undecided": "More measurements tell whether it is. Run this; it continues where the study ended:",
        "nothing compared": "The budget ended before anything else was tried. Run this; it continues:",
        "provisional": "Use it on trial, and run this to make it surer; it continues where the study ended:",
    }
    yield note(advice[state], "")
    yield code(command_of(study_report))


def _policy(study_report: StudyReport) -> str:
    last, policy = study_report.record.last, study_report.winner
    file = PolicyFile(
        policy=replace(policy, batch_size=policy.batch_size or last.batch_size),
        name=last.workload,
        valid_for=dict(last.valid_for),
    )
    if study_report.keeps_the_baseline:
        lead = "It is what you have today. There is nothing to change in training."
    else:
        lead = "Save this as policy.yaml. The file that `amptune tune` wrote has the evidence in it too."
    use = [] if study_report.keeps_the_baseline else [note("The two lines that use it, before the training loop:", ""),
                                                      code(_USE), note(_LOOP)]  # fmt: skip
    return section("policy", "The policy", note(lead, ""), code(dumps(file)), *use)


_LOOP = (
    "In the loop: with tuned.autocast(): loss = loss_fn(tuned.model(tuned.batch(x)), y); then "
    "tuned.scaler.scale(loss).backward() and tuned.step(optimizer). It is PyTorch's AMP loop, whichever precision won."
)
