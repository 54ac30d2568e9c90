"""Runs a script as Python does."""

from __future__ import annotations

import runpy
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["run_as_main"]


def run_as_main(path: Path, arguments: Sequence[str]) -> None:
    """Runs a script as `python PATH ARGUMENTS` does, in this process. Raises whatever it raises."""
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    runpy.run_path(str(path), run_name="__main__")
