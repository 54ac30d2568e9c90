"""The first line of a policy file that `amptune tune` wrote: for which target, and a digest of the rest.

It is a YAML comment. With it, `tune` can tell a file of its own from one that somebody has written or edited.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

__all__ = ["FileMark", "mark_of", "marked"]

_LINE = re.compile(r"# Written by amptune tune for (?P<target>.*), (?P<digest>[0-9a-f]{16})\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileMark:
    """The target that a file was tuned for; `is_intact` if nobody has changed the file since."""

    target: str
    is_intact: bool


def marked(text: str, target: str) -> str:
    """Returns the text of a policy file, with the mark as its first line."""
    return f"# Written by amptune tune for {' '.join(target.split())}, {_digest(text)}.\n{text}"


def mark_of(text: str) -> FileMark | None:
    """Returns the mark of a file's text; None if there is none."""
    first, _, rest = text.partition("\n")
    found = _LINE.fullmatch(first)
    return None if found is None else FileMark(target=found["target"], is_intact=found["digest"] == _digest(rest))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
