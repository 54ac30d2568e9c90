"""The page of a long look: the answer, the loss curves, the figures that were compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from amptune.measure.numerics.long_comparison import Gap, smoothed
from amptune.measure.results.training_runs import LossCurve
from amptune.report.markup import bullets, key, section, table, whole_page
from amptune.report.plot import ChartLine, lines
from amptune.search.gate.long_look import LongLook

__all__ = ["page_of_look"]


def page_of_look(look: LongLook) -> str:
    """Returns the page. All text is escaped."""
    return whole_page(f"{look.name} on {look.hardware.name}", _sections(look))


def _sections(look: LongLook) -> Iterator[str]:
    state = {"met": "confirmed", "missed": "failed"}.get(look.agreement, "open")
    answer, *further = map(str, look.findings)
    title = escape(f"{look.name}: {look.policy}")
    yield f'<header>\n<p class="eyebrow">amptune · numerics</p>\n<h1>{title}</h1>'
    yield f'<p class="small">{look.steps_seen:,} steps · {len(look.pairs)} seeds · FP32 is {escape(str(look.fp32))}</p>'
    yield f'</header>\n<section id="verdict" class="{state}">\n<p class="sentence">{escape(answer)}</p>\n</section>'
    if look.pairs:
        chart = lines([*_lines(look)], "step", "loss")
        yield section("losses", "Loss", chart, key(_KEY))
    if look.gaps:
        yield section("gaps", "What was compared", table(_HEADINGS, map(_row, look.gaps)))
    if further:
        yield section("findings", "Findings", bullets(further))


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


_KEY = (("line", "FP32, mean of the seeds"), ("policy", "the policy, mean of the seeds"), ("band", "single seeds"))
