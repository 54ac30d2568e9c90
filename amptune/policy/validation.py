"""Reads a document into its dataclass; reports every problem at once, with line and column, in plain words.

Training nodes read policy files with this module alone, so it needs neither pydantic nor any other library. A file is
read as strictly as JSON Schema would, except for common spellings: `10.0` is a whole number, `on` and `yes` mean true,
and an unquoted `0` is text if text is expected.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

from amptune.errors import FileFormatError, Problem, suggestion
from amptune.policy.former_settings import FORMER, taken_out
from amptune.policy.knobs.knob import LARGEST
from amptune.policy.yaml_text import Document

__all__ = ["validate"]

T = TypeVar("T")
Path = tuple[str | int, ...]

# Stands for a value with a problem, which is noted by then.
_WRONG: Any = object()
# To look for what was meant takes long.
MOST_HINTS = 100
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
_TRUTH = {"on": True, "yes": True, "off": False, "no": False}


def validate(document: Document, kind: type[T]) -> T:
    """Returns the document as `kind`. Raises `FileFormatError` with every problem, in the file's order.

    Rules between settings are checked only among valid settings: a rule that names a wrong value is not reported.
    """
    reader = _Reader(document)
    value = reader.read(kind, document.data, ())
    problems = {str(problem): problem for problem in (*document.problems, *reader.problems)}
    if problems:
        raise FileFormatError(sorted(problems.values(), key=lambda p: (p.line or 0, p.column or 0)))
    return cast("T", value)


@dataclass
class _Reader:
    """One pass over a document's data, which collects every problem."""

    document: Document
    problems: list[Problem] = field(default_factory=list)

    def read(self, declared: Any, value: Any, path: Path) -> Any:
        """Returns the value as its declared type, or notes its problems and returns `_WRONG`."""
        origin, arguments = get_origin(declared), get_args(declared)
        if declared is Any:
            return value
        if origin in (Union, UnionType) and NoneType not in arguments:  # true, false, or one of some words
            return self._truth_or_word(get_args(arguments[-1]), value, path)
        if origin in (Union, UnionType):  # of a type and None; no class here declares another union
            (only,) = (one for one in arguments if one is not NoneType)
            return None if value is None else self.read(only, value, path)
        if origin is Literal:
            return self._word(arguments, value, path)
        if origin in (list, tuple):
            return self._list(origin, arguments[0], value, path)
        if origin is dict or is_dataclass(declared) or is_typeddict(declared):
            return self._mapping(declared, value, path)
        return self._scalar(declared, value, path)

    def _word(self, allowed: tuple[str, ...], value: Any, path: Path) -> Any:
        if isinstance(value, str) and value in allowed:
            return value
        return self._reject_word(allowed, value, path)

    def _truth_or_word(self, words: tuple[str, ...], value: Any, path: Path) -> Any:
        if type(value) is bool or (isinstance(value, str) and value in words):
            return value
        if isinstance(value, str) and value in _TRUTH and self.document.is_plain(path):
            return _TRUTH[value]
        return self._reject_word(("false", "true", *words), value, path)

    def _reject_word(self, allowed: tuple[str, ...], value: Any, path: Path) -> Any:
        hint = suggestion(str(value), allowed)
        return self._reject(path, f"{value!r} is not one of {', '.join(allowed)}; {hint}".rstrip("; "))

    def _scalar(self, kind: type, value: Any, path: Path) -> Any:
        if kind is int and (type(value) is int or (isinstance(value, float) and value.is_integer())):
            return int(value) if abs(value) <= LARGEST else self._reject(path, f"{value!r} is larger than {LARGEST}")
        if type(value) is kind and value == value:  # `.nan` is no number
            return value
        if kind is float and type(value) is int:
            return float(value)
        if kind is bool and isinstance(value, str) and value in _TRUTH and self.document.is_plain(path):
            return _TRUTH[value]
        if kind is str and isinstance(value, bool | int | float):
            return self.document.text_at(path)
        return self._reject(path, f"{value!r} is not {_KINDS[kind]}")

    def _list(self, kind: type, declared: Any, value: Any, path: Path) -> Any:
        if not isinstance(value, list):
            return self._reject(path, f"{value!r} is not a list")
        items = [self.read(declared, item, (*path, index)) for index, item in enumerate(value)]
        return _WRONG if any(item is _WRONG for item in items) else kind(items)

    def _mapping(self, declared: Any, value: Any, path: Path) -> Any:
        """Reads a dictionary, a `TypedDict` or a dataclass, without the entries that are wrong."""
        if not isinstance(value, Mapping):
            return self._reject(path, f"{value!r} is not a mapping of keys to values")
        kinds, required = _keys(declared)
        if get_origin(declared) is dict:
            kinds = dict.fromkeys(value, get_args(declared)[1])
        missed = {intended for key in value if key not in kinds for intended in self._unknown(key, kinds, path)}
        for key in (key for key in kinds if key in required and key not in value and key not in missed):
            self._note(path, f"{_dotted((*path, key))}: this key is missing")
        entries = {key: self.read(kind, value[key], (*path, key)) for key, kind in kinds.items() if key in value}
        right = {key: entry for key, entry in entries.items() if entry is not _WRONG}
        if not is_dataclass(declared):
            return right
        return self._built(declared, right, required, missed | value.keys() - right.keys(), path)

    def _unknown(self, key: str, allowed: Iterable[str], path: Path) -> list[str]:
        """Notes an unknown key, and returns the key that was probably meant."""
        close = [] if key in FORMER or len(self.problems) > MOST_HINTS else _nearest(key, allowed)
        hint = f"did you mean {close[0]}? " if close else ""
        unknown = f"unknown key {key!r}; {hint}allowed here: {', '.join(allowed)}"
        message = f"{taken_out(key)}: remove the line" if key in FORMER else unknown
        self.problems.append(self.document.problem((*path, key), message, key=True))
        return close

    def _built(self, kind: Any, settings: dict[str, Any], required: frozenset[str], wrong: set[str], path: Path) -> Any:
        """Returns the dataclass, or notes what its own checks say: one problem a line, after its setting's name.

        Without the settings that they name it is built again, so that what holds it can be checked too.
        """
        while required <= settings.keys():
            try:
                return kind(**settings)
            except ValueError as error:
                lines = [line for line in str(error).splitlines() if not wrong & set(re.findall(r"\w+", line))]
            named = {self._setting_of(line, settings, path) for line in lines}
            if not named or None in named:
                break
            settings = {name: value for name, value in settings.items() if name not in named}
            wrong = wrong | {name for name in named if name is not None}
        return _WRONG

    def _setting_of(self, line: str, settings: Mapping[str, Any], path: Path) -> str | None:
        """Notes a dataclass's own problem, and returns the setting that it names; None if the whole is meant."""
        name, name_of_all = line.partition(":")[0], _dotted(path)
        if name in settings:
            self._note((*path, name), f"{name_of_all}.{line}" if path else line)
            return name
        self._note(path, f"{name_of_all}: {line}" if path else line)
        return None

    def _reject(self, path: Path, message: str) -> Any:
        self._note(path, f"{_dotted(path) or 'the file'}: {message}")
        return _WRONG

    def _note(self, path: Path, message: str) -> None:
        self.problems.append(self.document.problem(path, message))


@cache
def _keys(kind: Any) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Returns the declared type of each key, and the required keys; none of either for a dictionary."""
    if get_origin(kind) is dict:
        return {}, frozenset()
    hints = get_type_hints(kind)
    if is_typeddict(kind):
        return hints, frozenset(kind.__required_keys__)
    own = [one for one in fields(kind) if one.init]
    required = (one.name for one in own if one.default is MISSING and one.default_factory is MISSING)
    return {one.name: hints[one.name] for one in own}, frozenset(required)


def _nearest(word: str, words: Iterable[str]) -> list[str]:
    return difflib.get_close_matches(word, list(words), n=1)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))
