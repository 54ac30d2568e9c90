"""Pieces of HTML that stand alone: the page, its sections, tables, lists, numbers. Pure; all text is escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from html import escape as escape_markup
from importlib.resources import files
from itertools import chain, repeat

from amptune.errors import visible
from amptune.search.table.ratio import Ratio

__all__ = [
    "bullets",
    "code",
    "escape",
    "interval",
    "key",
    "measured",
    "memory",
    "note",
    "number",
    "prose",
    "section",
    "table",
    "times",
    "whole_page",
]

# The browser itself refuses to load anything.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def whole_page(title: str, content: Iterable[str]) -> str:
    """Returns a page that stands alone; `content` is HTML. Its script only sorts tables and copies text."""
    style, script = ((files("amptune.report") / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>",
            *content,
            f"</main>\n<script>\n{script}</script>\n</body>\n</html>\n",
        ]
    )


def escape(text: str) -> str:
    """Returns text as HTML that shows it, what no screen shows included."""
    return escape_markup(visible(text))


def section(name: str, heading: str, *content: str, kind: str = "") -> str:
    """Returns a section with the id `name` and the class `kind`; `content` is HTML."""
    inner = "\n".join(filter(None, content))
    return f'<section id="{name}"{_of_class(kind)}>\n<h2>{escape(heading)}</h2>\n{inner}\n</section>'


def prose(text: str) -> str:
    """Returns text as HTML, with what stands in backticks as code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def note(text: str, kind: str = "small") -> str:
    return f'<p class="{kind}">{prose(text)}</p>'


def code(text: str) -> str:
    """Returns text to copy, as it is."""
    return f'<pre class="copy">{escape(text)}</pre>'


def bullets(items: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{prose(item)}</li>" for item in items) + "\n</ul>"


def key(entries: Iterable[tuple[str, str]]) -> str:
    """Returns a chart's legend, from (class of the mark, words)."""
    shown = "".join(f'<li><i class="m {kind}"></i> {escape(words)}</li>' for kind, words in entries)
    return f'<ul class="key">{shown}</ul>'


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], classes: Sequence[str] = ()) -> str:
    """Returns a table; in a row with too few cells, the last cell spans the missing columns.

    On a narrow screen a row stands as a block, and each cell names its column.
    """
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    lines = [
        f"<tr{_of_class(kind)}>{_cells(row, len(headings))}</tr>"
        for row, kind in zip(rows, chain(classes, repeat("")), strict=False)
    ]
    names = ";".join(f"--c{place}:{_quoted(heading)}" for place, heading in enumerate(headings, 1) if heading)
    tall = " tall" if len(lines) > _TALL else ""
    return (
        f'<div class="rows{tall}"><table style="{escape(names)}">\n<thead><tr>{head}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody>\n</table></div>"
    )


_DIGITS = 4
# A longer table has a scroll bar of its own.
_TALL = 25


def _quoted(heading: str) -> str:
    """Returns a heading as a string of CSS."""
    return '"' + heading.replace("\\", "").replace('"', "") + '"'


def _of_class(kind: str) -> str:
    return f' class="{escape(kind)}"' if kind else ""


def _cells(row: Sequence[str], count: int) -> str:
    span = f' colspan="{count - len(row) + 1}"' if len(row) < count else ""
    cells = [f"<td>{escape(cell)}</td>" for cell in row[:-1]]
    return "".join(cells) + f"<td{span}>{escape(row[-1])}</td>"


def number(value: float | None) -> str:
    """Returns a figure with about four digits."""
    if value is None:
        return ""
    value = float(f"{value:.{_DIGITS}g}") if abs(value) < 10**_DIGITS else value
    digits = max(0, _DIGITS - 1 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{min(digits, 6)}f}"


def memory(mib: float | None) -> str:
    """Returns an amount of memory in the unit that suits it."""
    if mib is None:
        return ""
    return f"{mib:,.0f} MiB" if mib < 1024 else f"{mib / 1024:,.1f} GiB"


def measured(value: float, low: float, high: float) -> tuple[str, str]:
    """Returns a figure and its interval with the digits that the interval carries: two of half its width."""
    half = (high - low) / 2
    digits = max(0, math.ceil(1 - math.log10(half))) if half > 0 else _DIGITS
    shown = [number(one) if digits >= _DIGITS else f"{one:,.{digits}f}" for one in (value, low, high)]
    return shown[0], f"{shown[1]}-{shown[2]}"


def times(ratio: Ratio | None) -> str:
    if ratio is None or not ratio.value > 0:
        return ""
    return "1×" if ratio.low == ratio.high == 1 else f"{ratio.number}×"


def interval(ratio: Ratio | None) -> str:
    """Returns the ratio's 95 % interval; nothing if it is not known."""
    if ratio is None or math.isinf(ratio.high) or ratio.low == ratio.high:
        return ""
    return f"{ratio.low:.{ratio.digits}f}\u00a0to\u00a0{ratio.high:.{ratio.digits}f}"
