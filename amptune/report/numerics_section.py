"""The page's section on numerics: how much of what is allowed was used, the worst modules, the losses. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from amptune.measure.numerics.long_comparison import smoothed
from amptune.report.markup import key, note, section, table
from amptune.report.plot import Bar, ChartLine, bars, lines
from amptune.search.decide.study_report import StudyReport
from amptune.search.gate.judgement import Judgement

__all__ = ["numerics_of"]

# Of the worst modules, and of the judged policies, the most that are shown.
MOST_SHOWN = 8
# Bars end at this share of what is allowed.
MOST_USED = 1.5


def numerics_of(study_report: StudyReport) -> str:
    return section("numerics", "Numerics", *_parts(study_report), *_losses(study_report))


def _parts(study_report: StudyReport) -> Iterator[str]:
    judgements, policy = study_report.judgements, study_report.winner
    own = judgements.known(policy)
    if own is not None:
        whose = "" if own.policy == policy else f" (judged as {own.policy})"
        yield note(f"The policy is {own}{whose}.", "")
    elif judgements.passes(policy):
        yield note("The policy computes as your FP32 does, or more precisely: there is nothing to judge.", "")
    else:
        yield note(
            "The policy's numerics were not judged. Watch its loss beside FP32's, or give more with --budget.", ""
        )
    if study_report.record.judged:
        yield "<h3>Share of what is allowed</h3>"
        yield _used(study_report.record.judged, own)
    if own is not None and own.worst:
        yield "<h3>Nearest to their limits</h3>"
        shares = (one.figures.get("times_allowed") for one in own.worst)
        rows = [
            (one.module or "whole model", one.message, "" if share is None else f"{share:.0%}")
            for one, share in zip(own.worst, shares, strict=True)
        ]
        yield table(["module", "what was seen", "of what is allowed"], rows[:MOST_SHOWN])


def _used(judged: Sequence[Judgement], own: Judgement | None) -> str:
    """Returns a bar for each judged policy; 100 % is the limit."""
    ranked = sorted(judged, key=lambda one: (one is not own, -one.used))[:MOST_SHOWN]
    return bars(
        (
            Bar(
                name=str(one.policy),
                end=min(one.used, MOST_USED),
                kind="winner" if one.passes else "bad",
                words=f"{one.used:.0%}" if one.passes else f"rejected: {one}",
            )
            for one in ranked
        ),
        MOST_USED,
    )


def _losses(study_report: StudyReport) -> Iterator[str]:
    """Yields the loss curves of the policy's judgement."""
    judged = study_report.judgements.known(study_report.winner)
    if not study_report.keeps_the_baseline and judged is not None and judged.losses_fp32:
        yield from _drawn(judged.losses_fp32, judged.losses)


_GATE = (
    "From the same weights, by the numerics gate; replicas of FP32 take the batches in another order. `amptune verify "
    "policy.yaml TARGET --numerics` trains for longer, with several seeds."
)


def _drawn(fp32: Sequence[Sequence[float]], own: Sequence[float]) -> Iterator[str]:
    """Yields a chart: FP32 and its replicas as a band; as lines FP32 itself, the first of them, and the policy."""
    count = min(map(len, (*fp32, own)))

    def over(pick: Callable[[list[float]], float], curves: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
        return smoothed([pick(list(losses)) for losses in zip(*(curve[:count] for curve in curves), strict=True)])

    name = "FP32 and its replicas"
    yield "<h3>Losses of the judgement</h3>"
    means = over(fmean, fp32[:1]), over(fmean, [own])
    drawn = [
        ChartLine(points=over(max, fp32), down_to=over(min, fp32), kind="band", title=name),
        ChartLine(points=means[0], kind="fp32 mean", title="FP32"),
        ChartLine(points=means[1], kind="policy mean", title="the policy"),
    ]
    yield lines(drawn, "step", "loss")
    yield key([("band", name), ("line", "FP32"), ("policy", "the policy")])
    off = max(abs(value - base) / max(abs(base), 1e-12) for (_, base), (_, value) in zip(*means, strict=True))
    yield note(f"They differ by {100 * off:.2g} % of the loss at most. {_GATE}")
