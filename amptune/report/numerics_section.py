"""The page's section on numerics: how much of what is allowed was used, the worst modules, the first losses. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from amptune.measure.results.outcome import Measurement
from amptune.policy.settings import Policy
from amptune.report.markup import key, note, section, table
from amptune.report.plot import Bar, ChartLine, bars, lines
from amptune.search.decide.study_report import StudyReport
from amptune.search.sampler.records import GateRecord

__all__ = ["numerics_section"]

# Of the worst modules, and of the judged policies, the most that are shown.
MOST_SHOWN = 8


def numerics_section(study_report: StudyReport) -> str:
    return section("numerics", "Numerics", *_parts(study_report))


def _parts(study_report: StudyReport) -> Iterator[str]:
    judgements, policy = study_report.record.judgements, study_report.policy
    own = judgements.known(policy)
    if own is not None:
        whose = "" if own.policy == policy else f" (judged as {own.policy})"
        yield note(f"The policy is {own.words}{whose}.", "")
    elif judgements.passes(policy):
        yield note("The policy computes as your FP32 does, or more precisely: there is nothing to judge.", "")
    else:
        yield note("The policy's numerics were not judged. Watch its loss beside FP32's, or tune with more --budget.", "")
    if study_report.record.judged:
        yield "<h3>Share of what is allowed</h3>"
        yield _used(study_report.record.judged, own)
    if own is not None and own.worst:
        yield "<h3>Nearest to their limits</h3>"
        rows = [(one.module or "whole model", one.message, f"{one.figures.get('times_allowed', 0):.0%}") for one in own.worst]
        yield table(["module", "what was seen", "of what is allowed"], rows[:MOST_SHOWN])
    yield from _losses(study_report)


def _used(judged: Sequence[GateRecord], own: GateRecord | None) -> str:
    """Returns a bar for each judged policy; 100 % is the limit."""
    ranked = sorted(judged, key=lambda one: (one is not own, -one.used))[:MOST_SHOWN]
    return bars(
        (
            Bar(
                name=str(one.policy),
                end=min(one.used, 1.5),
                kind="winner" if one.passes else "bad",
                words=f"{one.used:.0%}" if one.passes else f"rejected: {one.words}",
            )
            for one in ranked
        ),
        1.5,
    )


def _losses(study_report: StudyReport) -> Iterator[str]:
    """Yields the losses of the first steps: FP32's runs as a band, the policy's as lines."""
    runs = {policy: _curves(study_report, policy) for policy in (study_report.baseline.policy, study_report.policy)}
    fp32, policy = runs[study_report.baseline.policy], runs[study_report.policy]
    if study_report.keeps_the_baseline or not fp32 or not policy or len(fp32[0]) < 2:
        return
    steps = range(1, min(map(len, (*fp32, *policy))) + 1)
    low, high, own = ([(step, pick(curve[step - 1] for curve in curves)) for step in steps]
                      for pick, curves in ((min, fp32), (max, fp32), (min, policy)))  # fmt: skip
    drawn = [
        ChartLine(points=high, down_to=low, kind="band", title="the baseline, all runs"),
        ChartLine(points=low, kind="fp32 mean", title="the baseline"),
        ChartLine(points=own, kind="policy mean", title="the policy"),
    ]
    off = max(abs(value - base) / max(abs(base), 1e-12) for (_, value), (_, base) in zip(own, low, strict=True))
    yield "<h3>Losses of the first steps</h3>"
    yield lines(drawn, "step", "loss")
    yield key([("line", f"baseline, {len(fp32)} runs"), ("policy", "the policy")])
    yield note(
        f"From the same weights and on the same batches; they differ by {off:.2g} times the loss at most. The study keeps no longer "
        "curves: `amptune verify policy.yaml TARGET --numerics` trains and draws them, with several seeds."
    )


def _curves(study_report: StudyReport, policy: Policy) -> list[tuple[float, ...]]:
    rows = (row for row in study_report.record.table if row.policy == policy and not row.in_loop)
    return [row.outcome.losses for row in rows if isinstance(row.outcome, Measurement) and row.outcome.losses]
