"""Tables as lines of text: as wide as their content, or folded until they fit into a terminal. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

__all__ = ["TextRow", "TextTable", "wrapped"]

_GAP = "  "


@dataclass(frozen=True, slots=True, kw_only=True)
class TextLine:
    """A line of text to print; of a title, of the winner, or of neither."""

    text: str
    is_title: bool = False
    wins: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRow:
    """A row: its name, a figure for each heading (fewer if something failed), and the policy they belong to."""

    name: str
    figures: tuple[str, ...]
    policy: str = ""
    wins: bool = False

    @property
    def subject(self) -> str:
        return ": ".join(filter(None, (self.name, self.policy)))


@dataclass(frozen=True, slots=True, kw_only=True)
class TextTable:
    """A table. `name` heads the rows' names, `headings` their figures; `note` says how to read them."""

    title: str
    headings: tuple[str, ...]
    rows: tuple[TextRow, ...]
    name: str = ""
    note: str = ""

    def lines(self, width: int | None) -> Iterator[TextLine]:
        """Yields the table's lines, at most `width` characters each; None for lines as wide as their content.

        Each row is one line if all of them fit. Otherwise its name and policy come first, and its figures below.
        """
        yield from (TextLine(text=line, is_title=True) for line in wrapped(self.title, width))
        one_line = self._one_line_each()
        yield from one_line if width is None or _width_of(one_line) <= width else self._folded(width)
        yield from (TextLine(text=line) for line in wrapped(self.note, width))

    def _one_line_each(self) -> list[TextLine]:
        has_policies = any(row.policy for row in self.rows)
        head = (self.name, *self.headings, "policy" if has_policies else "")
        cells = [(row.name, *self._padded(row), row.policy) for row in self.rows]
        wins = [False, *(row.wins for row in self.rows)]
        lines = _aligned([head, *cells], left=(0, len(self.headings) + 1))
        return [TextLine(text=text, wins=won) for text, won in zip(lines, wins, strict=True)]

    def _folded(self, width: int) -> Iterator[TextLine]:
        head, *figures = _aligned([self.headings, *map(self._padded, self.rows)])
        fits = max(map(len, (head, *figures))) + len(_GAP) <= width
        if fits:
            yield TextLine(text=_GAP + head)
        for row, aligned in zip(self.rows, figures, strict=True):
            for line in wrapped(row.subject, width, hanging=2 * _GAP):
                yield TextLine(text=line, wins=row.wins)
            said = zip(self.headings, row.figures, strict=False)
            words = ", ".join(f"{heading} {figure}".strip() for heading, figure in said if figure)
            for line in [_GAP + aligned] if fits else wrapped(_GAP + words, width, hanging=_GAP):
                yield TextLine(text=line, wins=row.wins)

    def _padded(self, row: TextRow) -> tuple[str, ...]:
        return (*row.figures, *("" for _ in self.headings[len(row.figures) :]))


def wrapped(text: str, width: int | None, *, hanging: str = "") -> list[str]:
    """Returns the text in lines of at most `width` characters, all but the first indented by `hanging`."""
    if width is None or len(text) <= width:
        return [text] if text else []
    lines = textwrap.wrap(text, width, subsequent_indent=hanging, break_on_hyphens=False)
    return [line.rstrip() for line in lines]


def _width_of(lines: Sequence[TextLine]) -> int:
    return max(len(line.text) for line in lines)


def _aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = ()) -> list[str]:
    """Returns a line for each row, with its cells below one another; all but the `left` columns align to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        _GAP.join(
            cell.ljust(widths[place]) if place in left else cell.rjust(widths[place]) for place, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]
