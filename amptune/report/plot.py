"""Charts as HTML that keeps its letters at any width: bars, marks and lines over two axes. Pure.

Positions are shares of the chart's width and height, so a chart is as wide as the screen and its text does not shrink.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from amptune.report.markup import escape

__all__ = ["BEYOND", "Axis", "Bar", "ChartLine", "ChartMark", "Kind", "axis_for", "bars", "lines", "scatter"]

Kind = Literal["trial", "front", "rejected", "recipe", "baseline", "winner"]

# Height of a chart, and least distance between the middles of two labels, in CSS pixels.
HEIGHT, LINE = 300, 20
# Share of the marks' range that an axis adds at each end, and the approximate number of its ticks.
MARGIN, TICKS = 0.08, 5
# The scale of bars ends beyond the longest by this factor.
BEYOND = 1.03
# Marks of other trials that fall into one cell of a raster of so many columns and rows are drawn once.
RASTER = (90, 45)
# Drawing order: the most important kinds come last and lie on top.
ORDER: tuple[Kind, ...] = ("trial", "rejected", "front", "recipe", "baseline", "winner")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartMark:
    """A point of the chart; `title` is shown when the point is pointed at, tapped or focused, `label` beside it."""

    x: float
    y: float
    kind: Kind
    title: str
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """A line through points (x, y), or the area between it and `down_to`; `kind` is its class in the style."""

    points: Sequence[tuple[float, float]]
    kind: str
    title: str
    down_to: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A bar from 0 to `end`, with its interval if it has one; `words` stand behind it."""

    name: str
    end: float
    words: str
    kind: str = ""
    between: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis from `low` to `high`, drawn from 0 to 100 %, with round numbers for ticks."""

    label: str
    low: float
    high: float
    step: float

    def place(self, value: float) -> float:
        """Returns a value's position in per cent."""
        return (value - self.low) / (self.high - self.low) * 100.0

    @property
    def ticks(self) -> list[float]:
        first = math.ceil(self.low / self.step - 1e-9)
        count = math.floor(self.high / self.step + 1e-9) - first + 1
        return [(first + i) * self.step for i in range(count)]

    def text(self, tick: float) -> str:
        """Returns the tick with enough digits to differ from the other ticks."""
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        digits += abs(self.step - round(self.step, digits)) > 1e-6 * self.step
        return f"{tick:,.{digits}f}"


def axis_for(label: str, values: Sequence[float]) -> Axis:
    """Returns an axis with a margin around the values, which does not extend below 0 if no value does."""
    low, high = min(values), max(values)
    room = MARGIN * (high - low) or 0.1 * abs(high) or 1.0
    low, high = max(min(0.0, low), low - room), high + room
    step = _round_step((high - low) / TICKS)
    counts = high - low >= 2 and all(float(value).is_integer() for value in values)
    step = max(1.0, step) if counts else step
    return Axis(label=label, low=low, high=high, step=step)


def bars(rows: Iterable[Bar], highest: float) -> str:
    """Returns bars below one another, on a scale from 0 to `highest`."""
    return '<div class="bars">\n' + "\n".join(_bar(row, highest) for row in rows) + "\n</div>"


def _bar(bar: Bar, highest: float) -> str:
    parts = [f'<i class="{bar.kind}" style="{_extent(0.0, bar.end, highest)}"></i>']
    if bar.between is not None and math.isfinite(bar.between[1]):
        low, high = (min(highest, value) for value in bar.between)
        parts.append(f'<b class="whisker" style="{_extent(low, high, highest)}"></b>')
    track = f'<span class="track">{"".join(parts)}</span>'
    return (
        f'<div class="bar"><span>{escape(bar.name)}</span>{track}<span class="figure">{escape(bar.words)}</span></div>'
    )


def _extent(low: float, high: float, highest: float) -> str:
    return f"left:{100 * low / highest:.2f}%;width:{100 * (high - low) / highest:.2f}%"


def scatter(marks: Sequence[ChartMark], x_label: str, y_label: str) -> str:
    """Returns the chart; up and left is better, and a staircase joins the marks that no other mark beats."""
    x = axis_for(x_label, [mark.x for mark in marks])
    y = axis_for(y_label, [mark.y for mark in marks])
    drawn = _thinned(sorted(marks, key=lambda mark: ORDER.index(mark.kind)), x, y)
    line = ChartLine(points=_staircase(marks, x.high), kind="frontier", title="what no policy beats")
    return _framed(x, y, [_polyline(line, x, y)], [*(_drawn(mark, x, y) for mark in drawn), *_labels(drawn, x, y)])


def lines(drawn: Sequence[ChartLine], x_label: str, y_label: str) -> str:
    """Returns the chart of lines, the last of them on top."""
    points = [point for line in drawn for point in (*line.points, *line.down_to)]
    x = axis_for(x_label, [at for at, _ in points])
    y = axis_for(y_label, [value for _, value in points])
    return _framed(x, y, [_polyline(line, x, y) for line in drawn], [])


def _staircase(marks: Sequence[ChartMark], end: float) -> list[tuple[float, float]]:
    """Returns the corners of a line along the marks that no other beats; no accepted mark is left of it or above it."""
    best = -math.inf
    corners: list[tuple[float, float]] = []
    for mark in sorted((mark for mark in marks if mark.kind != "rejected"), key=lambda mark: (mark.x, -mark.y)):
        if mark.y > best:
            if corners:
                corners.append((mark.x, best))
            corners.append((mark.x, mark.y))
            best = mark.y
    return [*corners, (end, best)] if corners else []


def _framed(x: Axis, y: Axis, shapes: Sequence[str], marks: Sequence[str]) -> str:
    """Returns a chart: axes, their ticks, grid and shapes as a stretched SVG, and marks on top."""
    across = "".join(f'<span style="bottom:{y.place(tick):.2f}%">{y.text(tick)}</span>' for tick in _inner(y))
    along = "".join(f'<span style="left:{x.place(tick):.2f}%">{x.text(tick)}</span>' for tick in _inner(x))
    grid = "".join(f'<path class="grid" d="M0 {100 - y.place(tick):.2f}H100"/>' for tick in y.ticks)
    svg = (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 100 100" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(y.label)} over {escape(x.label)}">{grid}{"".join(shapes)}</svg>'
    )
    return (
        f'<div class="plot"><span class="axis">{escape(y.label)}</span><div class="across">{across}</div>'
        f'<div class="area" style="height:{HEIGHT}px">{svg}{"".join(marks)}</div><div class="along">{along}</div>'
        f'<span class="axis">{escape(x.label)}</span></div>'
    )


def _inner(axis: Axis) -> list[float]:
    """Returns the ticks whose numbers do not stick out at the sides."""
    return [tick for tick in axis.ticks if 3 <= axis.place(tick) <= 97]


def _polyline(line: ChartLine, x: Axis, y: Axis) -> str:
    corners = [*line.points, *reversed(line.down_to)]
    points = " ".join(f"{x.place(at):.2f},{100 - y.place(value):.2f}" for at, value in corners)
    shape = "polygon" if line.down_to else "polyline"
    return f'<g class="line {line.kind}"><title>{escape(line.title)}</title><{shape} points="{points}"/></g>'


def _thinned(marks: Sequence[ChartMark], x: Axis, y: Axis) -> list[ChartMark]:
    """Returns the marks without ordinary trials that another one hides."""
    seen: set[tuple[str, int, int]] = set()
    kept = []
    for mark in marks:
        cell = (mark.kind, int(x.place(mark.x) / 100 * RASTER[0]), int(y.place(mark.y) / 100 * RASTER[1]))
        if mark.kind not in ("trial", "rejected") or cell not in seen:
            kept.append(mark)
        seen.add(cell)
    return kept


def _drawn(mark: ChartMark, x: Axis, y: Axis) -> str:
    """Returns a mark, whose kind decides its shape, too, so that kinds differ not only in colour."""
    style = f"left:{x.place(mark.x):.2f}%;bottom:{y.place(mark.y):.2f}%"
    return f'<i class="m {mark.kind}" style="{style}" tabindex="0"><b>{escape(mark.title)}</b></i>'


def _labels(marks: Sequence[ChartMark], x: Axis, y: Axis) -> Iterator[str]:
    """Yields labels beside their marks, on the side with more room; no two of them are at the same height."""
    taken: list[float] = []
    for mark in sorted((mark for mark in marks if mark.label), key=lambda mark: -mark.y):
        at, up = x.place(mark.x), y.place(mark.y) / 100 * HEIGHT
        up = next(place for place in _places(up) if all(abs(place - other) >= LINE for other in taken))
        taken.append(up)
        side, share = ("left", at) if at <= 50 else ("right", 100 - at)
        style = f"{side}:calc({share:.2f}% + 13px);bottom:{up:.0f}px"
        yield f'<span class="label {mark.kind}" style="{style}">{escape(mark.label)}</span>'


def _places(up: float) -> Iterator[float]:
    """Yields heights within the chart for a label, the nearest to its mark first."""
    yield from sorted((LINE / 2 + i for i in range(HEIGHT - LINE)), key=lambda place: abs(place - up))


def _round_step(step: float) -> float:
    """Rounds up to 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))
