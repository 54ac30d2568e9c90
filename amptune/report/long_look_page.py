"""The page of a long look: the answer, the loss curves, the figures that were compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from amptune.measure.numerics.long_comparison import Gap, smoothed
from amptune.measure.results.training_runs import LossCurve
from amptune.report.chart import ChartLine, lines
from amptune.report.page import bullets, section, table, whole_page
from amptune.search.gate.long_look import LongLook

__all__ = ["page_of_look"]


def page_of_look(look: LongLook) -> str:
    """Returns the page. All text is escaped."""
    return whole_page(f"{look.name} on {look.hardware.name}", _sections(look))


def _sections(look: LongLook) -> Iterator[str]:
    state = "proven" if look.agreement == "met" else "unproven"
    answer, *further = map(str, look.findings)
    title = escape(f"{look.name}: {look.policy}")
    yield f'<header>\n<p class="eyebrow">amptune · numerics</p>\n<h1>{title}</h1>'
    yield f'<div class="answer {state}">\n<p class="sentence">{escape(answer)}</p>\n</div>'
    yield f'<p class="small">{look.steps_seen:,} steps · {len(look.pairs)} seeds · FP32 is {escape(str(look.fp32))}</p>'
    yield "</header>"
    if look.pairs:
        chart = lines([*_lines(look)], "step", "loss")
        yield section("Loss", f"<figure>\n{chart}\n</figure>{_KEY}")
    if look.gaps:
        yield section("What was compared", table(_HEADINGS, map(_row, look.gaps)))
    if further:
        yield section("Findings", bullets(further))


def _lines(look: LongLook) -> Iterator[ChartLine]:
    """Yields the curve of each seed, then the two means on top of them."""
    fp32, policy = [pair.fp32 for pair in look.pairs], [pair.policy for pair in look.pairs]
    for kind, curves in (("fp32", fp32), ("policy", policy)):
        for pair, curve in zip(look.pairs, curves, strict=True):
            yield ChartLine(points=smoothed(curve.losses), kind=kind, title=f"{kind}, seed {pair.seed + 1}")
    for kind, curves in (("fp32", fp32), ("policy", policy)):
        yield ChartLine(points=smoothed(_mean(curves)), kind=f"{kind} mean", title=f"{kind}, mean of the seeds")


def _mean(curves: Sequence[LossCurve]) -> list[float]:
    return [sum(losses) / len(losses) for losses in zip(*(curve.losses for curve in curves), strict=False)]


_HEADINGS = ["", "FP32", "between seeds", "policy", "difference", "allowed", "answer"]
_ANSWERS = {"met": "like FP32", "missed": "not like FP32", "open": "could not tell"}


def _row(gap: Gap) -> list[str]:
    return [
        gap.what,
        f"{gap.fp32:.4g}",
        f"±{gap.spread:.2g}",
        f"{gap.policy:.4g}",
        f"{gap.difference:+.2g} ± {gap.error:.2g}",
        f"-{gap.below:.2g} to {gap.above:.2g}",
        _ANSWERS[gap.agreement],
    ]


_KEY = """
<ul class="key">
<li class="baseline"><i>━</i> FP32, mean of the seeds</li>
<li class="winner"><i>╍</i> the policy, mean of the seeds</li>
<li class="trial"><i>─</i> single seeds</li>
</ul>"""
