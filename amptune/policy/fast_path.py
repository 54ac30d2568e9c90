"""Reads plain data into dataclasses without pydantic, whose import takes longer than applying a policy.

Only data that match their class exactly are read here, with the same result as from pydantic. All other data, unusual
or wrong, are left to pydantic, which accepts more spellings and reports what is wrong and where.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import is_typeddict

__all__ = ["as_it_stands"]

T = TypeVar("T")


class _NotPlain(Exception):  # noqa: N818  # no error: somebody else reads it
    """The data do not match the declared class exactly."""


def as_it_stands(kind: type[T], data: object) -> T | None:
    """Returns the data (mappings, lists, text, numbers, booleans, None) as `kind`, or None if not an exact match."""
    try:
        return cast("T", _read(kind, data))
    except (_NotPlain, ValueError, OverflowError):  # ValueError: the class rejects the values
        return None


def _read(declared: Any, value: Any) -> Any:
    if declared is Any:
        return _plain(value)
    if is_dataclass(declared) or is_typeddict(declared):
        return _mapping(declared, value)
    origin, arguments = get_origin(declared), get_args(declared)
    if origin is Literal:
        return _exactly(isinstance(value, str) and value in arguments, value)
    if origin in (Union, UnionType):
        others = [one for one in arguments if one is not NoneType]
        _exactly(len(others) == 1)
        return None if value is None and len(others) < len(arguments) else _read(others[0], value)
    if origin is list or (origin is tuple and arguments[1:] == (Ellipsis,)):
        _exactly(isinstance(value, list))
        return origin(_read(arguments[0], item) for item in value)
    if origin is dict:
        _exactly(isinstance(value, Mapping))
        return {_read(arguments[0], key): _read(arguments[1], item) for key, item in value.items()}
    if declared is str:
        return _text(value)
    if declared is float:
        return float(_exactly(type(value) in (int, float) and math.isfinite(value), value))
    return _exactly(type(value) is declared, value)


def _mapping(kind: Any, value: Any) -> Any:
    """Reads a dataclass, or a mapping with declared keys."""
    declared, required = _keys(kind)
    _exactly(isinstance(value, Mapping) and required <= value.keys() <= declared.keys())
    return kind(**{key: _read(one, value[key]) for key, one in declared.items() if key in value})


@cache
def _keys(kind: Any) -> tuple[Mapping[str, Any], frozenset[str]]:
    """Returns the declared type of each key, and the required keys."""
    hints = get_type_hints(kind, include_extras=True)  # keeps Annotated types, which only pydantic reads
    if is_typeddict(kind):
        return hints, frozenset(kind.__required_keys__)
    own = [one for one in fields(kind) if one.init]
    required = (one.name for one in own if one.default is MISSING and one.default_factory is MISSING)
    return {one.name: hints[one.name] for one in own}, frozenset(required)


def _plain(value: Any) -> Any:
    """Returns a value that JSON keeps unchanged, so later code need not know whether pydantic read it."""
    if isinstance(value, Mapping):
        return {_text(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return _text(value)
    finite = type(value) is float and math.isfinite(value)
    return _exactly(finite or value is None or type(value) in (bool, int), value)


def _text(value: Any) -> str:
    text: str = _exactly(type(value) is str, value)
    text.encode()  # raises ValueError for half a surrogate pair, which no file can hold
    return text


def _exactly(holds: bool, value: Any = None) -> Any:
    """Returns the value if it matches (`holds`), else raises `_NotPlain`."""
    if not holds:
        raise _NotPlain
    return value
