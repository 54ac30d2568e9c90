"""Charts as SVG: a scatter of marks with a frontier and labels that do not overlap; lines. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

__all__ = ["Axis", "ChartLine", "ChartMark", "Kind", "axis_for", "lines", "scatter"]

Kind = Literal["trial", "front", "rejected", "recipe", "baseline", "winner"]

WIDTH, HEIGHT = 900, 460
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 20, 56
# Share of the marks' range that an axis adds at each end, and the approximate number of its ticks.
MARGIN, TICKS = 0.07, 6
# Width of a label's letter and least distance between labels, in pixels.
LETTER, LINE = 7.2, 17
# Pixels from a mark down to its label, so that the frontier to the right of the mark does not cross the label.
BELOW = 18
# Drawing order: the most important kinds come last and lie on top.
ORDER: tuple[Kind, ...] = ("trial", "rejected", "front", "recipe", "baseline", "winner")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartMark:
    """A point of the chart; `title` is shown when the mouse is on the point, `label` beside it."""

    x: float
    y: float
    kind: Kind
    title: str
    label: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartLine:
    """A line through points (x, y); `title` is shown when the mouse is on it, `kind` is its class in the style."""

    points: Sequence[tuple[float, float]]
    kind: str
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """An axis from `low` to `high`, drawn from `start` to `end` (in pixels), with round numbers for ticks."""

    label: str
    low: float
    high: float
    start: float
    end: float
    step: float

    def place(self, value: float) -> float:
        """Returns a value's position, in pixels."""
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        first = math.ceil(self.low / self.step - 1e-9)
        count = math.floor(self.high / self.step + 1e-9) - first + 1
        return [(first + i) * self.step for i in range(count)]

    def text(self, tick: float) -> str:
        """Returns the tick with enough digits to differ from the other ticks."""
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        return f"{tick:,.{digits}f}"


def axis_for(label: str, values: Sequence[float], start: float, end: float) -> Axis:
    """Returns an axis that holds the values with a margin, which does not extend below 0 if no value does."""
    low, high = min(values), max(values)
    room = MARGIN * (high - low) or 0.1 * abs(high) or 1.0
    low, high = max(min(0.0, low), low - room), high + room
    return Axis(label=label, low=low, high=high, start=start, end=end, step=_round_step((high - low) / TICKS))


def scatter(marks: Sequence[ChartMark], x_label: str, y_label: str) -> str:
    """Returns the chart; up and left is better, and a staircase joins the marks that no other mark beats."""
    x = axis_for(x_label, [mark.x for mark in marks], LEFT, WIDTH - RIGHT)
    y = axis_for(y_label, [mark.y for mark in marks], HEIGHT - BOTTOM, TOP)
    drawn = sorted(marks, key=lambda mark: ORDER.index(mark.kind))
    parts = [
        *_grid(x, y),
        _frontier(marks, x, y),
        *(_drawn(mark, x, y) for mark in drawn),
        *_labels([mark for mark in drawn if mark.label], x, y),
    ]
    return _picture(parts, x, y)


def lines(drawn: Sequence[ChartLine], x_label: str, y_label: str) -> str:
    """Returns the chart of lines, the last of them on top."""
    points = [point for line in drawn for point in line.points]
    x = axis_for(x_label, [at for at, _ in points], LEFT, WIDTH - RIGHT)
    y = axis_for(y_label, [value for _, value in points], HEIGHT - BOTTOM, TOP)
    return _picture([*_grid(x, y), *(_line(line, x, y) for line in drawn)], x, y)


def _line(line: ChartLine, x: Axis, y: Axis) -> str:
    points = " ".join(f"{x.place(at):.1f},{y.place(value):.1f}" for at, value in line.points)
    return f'<g class="line {line.kind}"><title>{escape(line.title)}</title><polyline points="{points}"/></g>'


def _picture(parts: Sequence[str], x: Axis, y: Axis) -> str:
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" class="chart"'
    return f'{head} aria-label="{escape(y.label)} over {escape(x.label)}">\n' + "\n".join(parts) + "\n</svg>"


def _grid(x: Axis, y: Axis) -> Iterator[str]:
    """Yields lines at the ticks, the ticks' numbers, and the axes' labels."""
    for tick in x.ticks:
        at = x.place(tick)
        yield f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{y.end}" y2="{y.start}"/>'
        yield f'<text class="tick" x="{at:.1f}" y="{y.start + 20}" text-anchor="middle">{x.text(tick)}</text>'
    for tick in y.ticks:
        at = y.place(tick)
        yield f'<line class="grid" x1="{x.start}" x2="{x.end}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield f'<text class="tick" x="{x.start - 10}" y="{at + 4:.1f}" text-anchor="end">{y.text(tick)}</text>'
    middle = (x.start + x.end) / 2
    yield f'<text class="axis" x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(x.label)}</text>'
    across = (y.start + y.end) / 2
    yield (
        f'<text class="axis" transform="translate(18 {across}) rotate(-90)" text-anchor="middle">'
        f"{escape(y.label)}</text>"
    )


def _frontier(marks: Sequence[ChartMark], x: Axis, y: Axis) -> str:
    """Returns a staircase along the marks that no other beats; no accepted mark is left of it or above it."""
    best = -math.inf
    corners: list[tuple[float, float]] = []
    for mark in sorted((mark for mark in marks if mark.kind != "rejected"), key=lambda mark: (mark.x, -mark.y)):
        if mark.y > best:
            if corners:
                corners.append((mark.x, best))
            corners.append((mark.x, mark.y))
            best = mark.y
    if corners:
        corners.append((x.high, best))
    points = " ".join(f"{x.place(at):.1f},{y.place(value):.1f}" for at, value in corners)
    return f'<polyline class="frontier" points="{points}"/>'


def _drawn(mark: ChartMark, x: Axis, y: Axis) -> str:
    at, up = x.place(mark.x), y.place(mark.y)
    return f'<g class="{mark.kind}"><title>{escape(mark.title)}</title>{_shape(mark.kind, at, up)}</g>'


def _shape(kind: Kind, x: float, y: float) -> str:
    """Returns a shape for each kind, so that kinds differ not only in colour."""
    match kind:
        case "rejected":
            return f'<path d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"/>'
        case "baseline":
            return f'<rect x="{x - 6:.1f}" y="{y - 6:.1f}" width="12" height="12"/>'
        case "recipe":
            return f'<path d="M{x:.1f} {y - 8:.1f}l8 8l-8 8l-8 -8z"/>'
        case "winner":
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8"/>'
        case "front":
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        case "trial":
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>'


def _labels(marks: Sequence[ChartMark], x: Axis, y: Axis) -> Iterator[str]:
    """Yields labels beside their marks, on a side with room; a label that would cover another moves below it."""
    taken: list[tuple[float, float, float]] = []
    for mark in sorted(marks, key=lambda mark: y.place(mark.y)):
        at, up, width = x.place(mark.x), y.place(mark.y) + BELOW, LETTER * len(mark.label)
        rightward = at + 14 + width <= WIDTH
        left = at + 14 if rightward else at - 14 - width
        while any(abs(up - other) < LINE and left < end and begin < left + width for begin, end, other in taken):
            up += LINE
        taken.append((left, left + width, up))
        anchor, place = ("start", at + 14) if rightward else ("end", at - 14)
        yield (
            f'<text class="label {mark.kind}" x="{place:.1f}" y="{up:.1f}" text-anchor="{anchor}">'
            f"{escape(mark.label)}</text>"
        )


def _round_step(step: float) -> float:
    """Rounds up to 1, 2, 2.5 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= step * (1 - 1e-9))
