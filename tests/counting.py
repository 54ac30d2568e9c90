"""How much Python a function runs, counted: a slow or a busy machine gives the same number as an idle one."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


def lines_in(function: Callable[[], object]) -> int:
    """How many lines of Python run inside the function on its own thread; a loop's count once a round."""
    seen = 0

    def note(_frame: FrameType, event: str, _: object) -> Any:
        nonlocal seen
        seen += event == "line"
        return note

    before = sys.gettrace()
    with _no_garbage_collected():
        sys.settrace(note)
        try:
            function()
        finally:
            sys.settrace(before)
    return seen


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """A collection would call the finalizers of what other tests left behind."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
