"""Runs a script as Python does."""

from __future__ import annotations

import runpy
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from amptune.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["no_processes", "run_as_main"]


def run_as_main(path: Path, arguments: Sequence[str]) -> None:
    """Runs a script as `python PATH ARGUMENTS` does, in this process. Raises whatever it raises."""
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")


@contextmanager
def no_processes(why: str) -> Iterator[None]:
    """Raises `TargetError` where the script would train in processes of its own."""

    def refuse(*_: Any, **__: Any) -> None:
        raise TargetError(why)

    processes: Any = torch.multiprocessing
    own, processes.spawn = processes.spawn, refuse
    try:
        yield
    finally:
        processes.spawn = own
