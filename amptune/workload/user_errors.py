"""Boundary to the user's own code: turns its exceptions into `UserCodeError`, which names the place."""

from __future__ import annotations

import io
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from amptune.errors import AmptuneError, UserCodeError, told

__all__ = ["is_the_users", "tell_of_user_code", "user_code", "user_script", "where_in_user_code"]

_PACKAGE = Path(__file__).resolve().parent.parent
_LIBRARIES = tuple({str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("stdlib", "purelib", "platlib")})
# What the user's code does now, the innermost last, and who is told of it.
_doing = ["measuring"]
_tell: list[Callable[[str], None]] = [lambda _: None]


@contextmanager
def user_code(doing: str) -> Iterator[None]:
    """Turns any exception of the user's code while `doing` something into `UserCodeError`, even `SystemExit`."""
    _doing.append(doing)
    _tell[0](doing)
    try:
        yield
    except AmptuneError:
        raise
    except BaseException as error:  # argument parsers call sys.exit, which must not end the worker
        where = where_in_user_code(error.__traceback__)
        kind = type(error).__name__
        place = f" ({where})" if where else ""
        raise UserCodeError(f"{doing} raised {told(kind, str(error))}{place}", kind=kind, where=where) from error
    finally:
        _doing.pop()
        _tell[0](_doing[-1])


def tell_of_user_code(tell: Callable[[str], None]) -> None:
    """From now on, `tell` is called with what the user's code does, whenever that changes."""
    _tell[0] = tell


@contextmanager
def user_script(doing: str) -> Iterator[None]:
    """Does as `user_code`; the error of a script that ends itself has what it said, as argument parsers do."""
    heard = _Heard(sys.stderr)
    try:
        with redirect_stderr(heard), user_code(doing):
            yield
    except UserCodeError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            remedy = f"install it for {sys.executable}, or run amptune in the folder that holds it, not in {Path.cwd()}"
            raise UserCodeError(f"{error}\n{remedy}", kind=error.kind, where=error.where) from error.__cause__
        said = heard.said.getvalue().strip()
        if error.kind != "SystemExit" or not said:
            raise
        remedy = "the script's arguments stand behind --: amptune tune FILE.py -- ARGUMENTS"
        raise UserCodeError(f"{error}\n{said}\n{remedy}", kind=error.kind, where=error.where) from error


class _Heard:
    """A stream that also keeps what is written to it."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.said = io.StringIO()

    def write(self, text: str) -> int:
        self.said.write(text)
        return int(self._stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def where_in_user_code(trace: TracebackType | None) -> str | None:
    """Returns `file:line` of the innermost frame that is neither amptune's nor an installed library's."""
    for frame in reversed(traceback.extract_tb(trace)):
        if is_the_users(frame.filename):
            return f"{frame.filename}:{frame.lineno}"
    return None


@cache
def is_the_users(filename: str) -> bool:
    """Returns True for a file that is neither amptune's nor an installed library's."""
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    if path.is_relative_to(_PACKAGE):
        return path.is_relative_to(_PACKAGE / "workload" / "zoo")
    return not any(path.is_relative_to(library) for library in _LIBRARIES)
