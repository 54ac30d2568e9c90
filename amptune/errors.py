"""Everything amptune raises on purpose.

Each class answers one question a caller may ask ("was it my code?", "is it this GPU?"); the command line
maps classes to exit codes. A message says what is wrong, where, what is allowed, and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = [
    "AmptuneError",
    "ClaimError",
    "DeviceError",
    "FileFormatError",
    "HardwareMismatchError",
    "NothingFeasibleError",
    "ObjectiveError",
    "OutputError",
    "PolicyApplyError",
    "Problem",
    "SpaceError",
    "StudyError",
    "TargetError",
    "UserCodeError",
]


class AmptuneError(Exception):
    """The root of the family: catch this to catch them all."""


class DeviceError(AmptuneError):
    """A device that was asked for does not exist here, or what was said about this machine is malformed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong in a file; `line` and `column` count from 1, and are None where the whole file is meant."""

    message: str
    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        place = self.source if self.line is None else f"{self.source}:{self.line}:{self.column}"
        return f"{place}: {self.message}"


class FileFormatError(AmptuneError):
    """A policy, profile or space file is malformed: carries every problem, its text has one a line."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))


class HardwareMismatchError(AmptuneError):
    """A policy is not valid for this machine, or no entry of a profile matches it."""


class PolicyApplyError(AmptuneError):
    """A policy cannot be put on this model: rules that match nothing, a patch that cannot be undone."""


class TargetError(AmptuneError):
    """A target (`file.py:name`, `package.module:name`) does not exist or is no usable `Workload`."""


class UserCodeError(AmptuneError):
    """The user's own model, batch, loss, optimizer or step raised.

    `kind` is the exception's type name, `where` its `file:line` in the user's code where known.
    """

    def __init__(self, message: str, *, kind: str = "Exception", where: str | None = None) -> None:
        self.kind = kind
        self.where = where
        super().__init__(message)


class NothingFeasibleError(AmptuneError):
    """Not even the baseline, the step as it trains today, could be measured here."""


class StudyError(AmptuneError):
    """The study's folder or storage cannot be used: locked by another tuner, unwritable, disk full."""


class ObjectiveError(AmptuneError):
    """An objective that does not exist, or that needs a figure this machine does not give."""


class ClaimError(AmptuneError):
    """A policy file says nothing of how fast it is, so there is nothing to verify."""


class OutputError(AmptuneError):
    """A result cannot be written where it was asked for: no such folder, no permission, disk full."""


class SpaceError(AmptuneError):
    """A search space does not exist, or a knob is pinned to what no policy can have."""
