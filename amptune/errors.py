"""All exceptions that amptune raises on purpose.

Each class answers one question of a caller ("was it my code?", "is it this GPU?"); the command line maps
classes to exit codes. A message says what is wrong, where, what is allowed, and what to do next.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

__all__ = [
    "AmptuneError",
    "ClaimError",
    "DeviceError",
    "FileFormatError",
    "HardwareMismatchError",
    "MissingPackageError",
    "NotMeasuredError",
    "NothingFeasibleError",
    "ObjectiveError",
    "OutputError",
    "PolicyApplyError",
    "Problem",
    "ScriptEndedError",
    "SpaceError",
    "StudyError",
    "TargetError",
    "UserCodeError",
    "first_line",
    "require_tune",
    "suggestion",
    "told",
    "visible",
]


class AmptuneError(Exception):
    """Base class of all errors here: catch this to catch them all."""


class DeviceError(AmptuneError):
    """The requested device does not exist here, or the labels given for this machine are malformed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem in a file; `line` and `column` count from 1, and are None if the whole file is meant."""

    message: str
    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"
        return f"{place}: {self.message}"


class FileFormatError(AmptuneError):
    """A policy, profile or space file is malformed; carries every problem, one per line in its text."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class HardwareMismatchError(AmptuneError):
    """A policy is not valid for this machine, or no entry of a profile matches it."""


class PolicyApplyError(AmptuneError):
    """A policy cannot be applied to this model: rules that match nothing, a patch that cannot be undone."""


class TargetError(AmptuneError):
    """A target (`file.py:name`, `package.module:name`) does not exist or is no usable `Workload`."""


class ScriptEndedError(TargetError):
    """A script that is tuned as it runs has ended, by the count of its loop or by an error."""


class UserCodeError(AmptuneError):
    """The user's own model, batch, loss, optimizer or step raised.

    `kind` is the exception's type name, `where` its `file:line` in the user's code if known.
    """

    def __init__(self, message: str, *, kind: str = "Exception", where: str | None = None) -> None:
        self.kind = kind
        self.where = where
        super().__init__(message)


class NothingFeasibleError(AmptuneError):
    """The baseline (the step as it trains today) could not be measured here, so no policy can be."""


class NotMeasuredError(NothingFeasibleError):
    """The budget was spent before a claim could be measured, so nothing is known of it."""


class StudyError(AmptuneError):
    """The study's folder or storage cannot be used: locked by another tuner, unwritable, disk full."""


class ObjectiveError(AmptuneError):
    """The objective does not exist, or it needs a figure that this machine does not give."""


class ClaimError(AmptuneError):
    """A policy file lacks valid figures about its speed, so there is nothing to verify or explain."""


class OutputError(AmptuneError):
    """A result cannot be written to the requested place: no such folder, no permission, disk full."""


class SpaceError(AmptuneError):
    """A search space does not exist, or a knob is pinned to a value that no policy can have."""


class MissingPackageError(AmptuneError, ModuleNotFoundError):
    """A package of the extra `tune` is not installed: tuning and the commands need it, training does not."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"{package} is not installed; tuning and all commands need amptune's extra `tune`: in a clone of amptune, "
            "pip install '.[tune]'",
            name=package,
        )

    def __reduce__(self) -> tuple[type[MissingPackageError], tuple[str | None]]:
        """Pickles the package's name, as the message is made from it."""
        return type(self), (self.name,)


# The import names of the packages in the extra `tune`.
_TUNE = (
    "click",
    "cloudpickle",
    "filelock",
    "greenlet",
    "numpy",
    "optuna",
    "pebble",
    "psutil",
    "pydantic",
    "pynvml",
    "rich",
    "scipy",
    "sqlalchemy",
)


def first_line(error: BaseException) -> str:
    """Returns an error's first line, with the next if it only announces it ("the compiler raised:"), or its type."""
    lines = [line for line in map(str.strip, str(error).splitlines()) if line]
    if len(lines) > 1 and lines[0].endswith(":"):
        return f"{lines[0]} {lines[1]}"
    return lines[0] if lines else type(error).__name__


def told(kind: str, message: str) -> str:
    """Returns "KIND: MESSAGE" of an exception, or its kind alone if it has no message of its own."""
    return f"{kind}: {message}" if message.strip() not in ("", kind) else kind


def visible(text: str) -> str:
    """Returns the text with control characters and those that turn its direction escaped, line breaks and tabs not."""
    if text.isprintable():
        return text
    plain = (one.isprintable() or one in "\n\t\N{NO-BREAK SPACE}" for one in text)
    return "".join(
        one if is_plain else one.encode("unicode_escape").decode() for one, is_plain in zip(text, plain, strict=True)
    )


def suggestion(word: str, words: Iterable[str]) -> str:
    """Returns "did you mean X? " for the word that one is nearly, without regard to case; else nothing."""
    known = {one.lower(): one for one in words}
    close = difflib.get_close_matches(word.lower(), known, n=1)
    return f"did you mean {known[close[0]]}? " if close and known[close[0]] != word else ""


def require_tune() -> None:
    """Raises `MissingPackageError` for the first package of the extra `tune` that is missing; imports none of them."""
    missing = next((name for name in _TUNE if sys.modules.get(name) is None and find_spec(name) is None), None)
    if missing is not None:
        raise MissingPackageError(missing)
