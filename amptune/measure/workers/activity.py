"""A note of what a worker is doing, in memory that its parent can read when no answer comes."""

from __future__ import annotations

import time
from multiprocessing.context import BaseContext

__all__ = ["Activity"]

LONGEST = 1024


class Activity:
    """A note of what a worker is doing and since when, passed to its process when that is started."""

    def __init__(self, context: BaseContext) -> None:
        self._text = context.RawArray("c", LONGEST)
        self.note("starting")

    def note(self, doing: str) -> None:
        """Notes what begins now, on the clock that all processes share."""
        self._text.value = f"{time.monotonic():.1f} {doing}".encode()[: LONGEST - 1]

    def __str__(self) -> str:
        since_s, _, doing = self._text.value.decode(errors="replace").partition(" ")
        return f"{doing} for {time.monotonic() - float(since_s):.0f} s"
