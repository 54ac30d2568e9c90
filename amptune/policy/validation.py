"""Validates a document against its type; reports every problem at once, with line and column, in plain words.

A file is read as strictly as JSON Schema would, except for common spellings: `10.0` is a whole number, `on` and
`yes` mean true, and an unquoted `0` is text if text is expected.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from amptune.errors import FileFormatError, Problem
from amptune.policy.fast_path import as_it_stands
from amptune.policy.serialization import adapter_for
from amptune.policy.yaml_text import Document

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

__all__ = ["validate"]

T = TypeVar("T")
Path = tuple[str | int, ...]

_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
_MISSING = ("missing", "missing_argument", "missing_keyword_only_argument")
_WORDS = {
    "int_type": "is not a whole number",
    "float_type": "is not a number",
    "bool_type": "is not true or false",
    "string_type": "is not text",
    "list_type": "is not a list",
    "tuple_type": "is not a list",
    "dict_type": "is not a mapping of keys to values",
    "dataclass_type": "is not a mapping of keys to values",
}


def validate(document: Document, kind: type[T], data: Any = None) -> T:
    """Returns the document as `kind`. Raises `FileFormatError` with every problem, in the file's order.

    Rules between settings are checked only once each setting is valid. So a wrong value is noted and removed,
    and the rest is validated again. A rule that names a removed value is not reported.
    """
    data = document.data if data is None else data
    value = None if document.problems else as_it_stands(kind, data)
    return _as_meant(document, kind, data) if value is None else value


def _as_meant(document: Document, kind: type[Any], data: Any) -> Any:
    """Validates with pydantic, which accepts several spellings of a value and reports every problem."""
    import pydantic

    adapter = adapter_for(kind)  # type: ignore[arg-type]  # mypy knows no metaclass hash
    problems = {str(problem): problem for problem in document.problems}
    gone: set[Path] = set()
    while True:
        try:
            value = adapter.validate_json(json.dumps(data), strict=True)
            break
        except pydantic.ValidationError as error:
            errors = error.errors(include_url=False)
            if repairs := dict(_read_as_meant(document, data, errors)):
                data = _replaced_all(data, repairs)
                continue
            wrong = [e for e in errors if _lines(e, data, gone)]
            schema = adapter.json_schema()
            problems |= {str(p): p for e in wrong for p in _problems_of(document, data, e, schema, gone)}
            culprits = {path for e in wrong for path in _culprits(e, data, schema, gone)}
            rest = _without(data, culprits, gone)
            if rest == data:
                break
            data = rest
    if problems:
        raise FileFormatError(sorted(problems.values(), key=lambda p: (p.line or 0, p.column or 0)))
    return value


def _read_as_meant(document: Document, data: Any, errors: Sequence[ErrorDetails]) -> Iterator[tuple[Path, Any]]:
    """Yields the path and the intended value of each value whose type is not the expected one."""
    for error in errors:
        given, path = error["input"], _path_in(data, error["loc"])
        if error["type"] == "int_type" and isinstance(given, float) and given.is_integer():
            yield path, int(given)
        elif error["type"] == "bool_type" and given in ("on", "yes", "off", "no") and document.is_plain(path):
            yield path, given in ("on", "yes")
        elif error["type"] == "string_type" and isinstance(given, bool | int | float):
            yield path, document.text_at(path)


def _replaced_all(data: Any, values: Mapping[Path, Any]) -> Any:
    for path, value in values.items():
        data = _replaced(data, path, value)
    return data


def _replaced(data: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    pairs = data.items() if isinstance(data, dict) else enumerate(data)
    new = {key: _replaced(item, path[1:], value) if key == path[0] else item for key, item in pairs}
    return new if isinstance(data, dict) else list(new.values())


def _without(data: Any, paths: set[Path], gone: set[Path]) -> Any:
    """Returns `data` without the keys at `paths` (for a list item: the list's key), and adds these to `gone`."""
    for path in paths:
        while path and not isinstance(path[-1], str):
            path = path[:-1]
        gone.add(path)
    return _kept(data, (), gone)


def _kept(data: Any, path: Path, gone: set[Path]) -> Any:
    if isinstance(data, dict):
        return {k: _kept(item, (*path, k), gone) for k, item in data.items() if (*path, k) not in gone}
    if isinstance(data, list):
        return [_kept(item, (*path, n), gone) for n, item in enumerate(data)]
    return data


def _lines(error: ErrorDetails, data: Any, gone: set[Path]) -> list[str]:
    """Returns the error's own lines, without those that may only result from removed values."""
    path = _path_in(data, error["loc"])
    absent = {str(p[-1]) for p in gone if p and p[:-1] == path}
    if error["type"] in _MISSING and str(error["loc"][-1]) in absent:
        return []
    lines = str(error.get("ctx", {}).get("error", error["msg"])).splitlines()
    return [line for line in lines if error["type"] != "value_error" or not absent & set(re.findall(r"\w+", line))]


def _culprits(error: ErrorDetails, data: Any, schema: Mapping[str, Any], gone: set[Path]) -> Iterator[Path]:
    """Yields the paths to remove; for a misspelt key also the intended key, so it does not count as missing."""
    path = _path_in(data, error["loc"])
    if error["type"] in _UNKNOWN:
        yield from ((*path[:-1], close) for close in _nearest(str(path[-1]), _allowed_keys(schema, path[:-1])))
    if error["type"] == "value_error":
        named = [(*path, line.partition(":")[0]) for line in _lines(error, data, gone)]
        yield from (here if _holds(data, here) else path for here in named)
    elif error["type"] not in _MISSING:
        yield path


def _holds(data: Any, path: Path) -> bool:
    return _path_in(data, path) == path


def _problems_of(
    document: Document, data: Any, error: ErrorDetails, schema: Mapping[str, Any], gone: set[Path]
) -> Iterator[Problem]:
    path = _path_in(data, error["loc"])
    name = ".".join(str(part) for part in path)
    if error["type"] in _UNKNOWN:
        yield document.problem(path, _unknown(str(path[-1]), _allowed_keys(schema, path[:-1])), key=True)
    elif error["type"] in _MISSING:
        missing = ".".join(str(part) for part in (*path, error["loc"][-1]))
        yield document.problem(path, f"{missing}: this key is missing")
    elif error["type"] == "value_error":  # amptune's own checks: one problem per line, after its setting's name
        for line in _lines(error, data, gone):
            setting = (*path, line.partition(":")[0])
            here = setting if _holds(data, setting) else path
            prefix = f"{name}.{line}" if name and here is setting else f"{name}: {line}" if name else line
            yield document.problem(here, prefix)
    else:
        yield document.problem(path, f"{name}: {_in_words(error)}" if name else f"the file: {_in_words(error)}")


def _nearest(word: str, words: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(word, words, n=1)


def _unknown(key: str, allowed: Sequence[str]) -> str:
    close = _nearest(key, allowed)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"unknown key {key!r}; {hint}allowed here: {', '.join(allowed)}"


def _path_in(data: Any, loc: Sequence[str | int]) -> Path:
    """Returns pydantic's location without parts that are not in the file (union members, model names, missing keys)."""
    path: list[str | int] = []
    for part in loc:
        in_list = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if in_list or (isinstance(data, Mapping) and part in data):
            data = data[part]
            path.append(part)
    return tuple(path)


def _in_words(error: ErrorDetails) -> str:
    given, context = error["input"], error.get("ctx", {})
    if error["type"] == "literal_error":
        allowed = str(context["expected"]).replace("'", "").replace(" or ", ", ")
        close = _nearest(str(given), allowed.split(", "))
        return f"{given!r} is not one of {allowed}" + (f"; did you mean {close[0]}?" if close else "")
    if error["type"] in _WORDS:
        return f"{given!r} {_WORDS[error['type']]}"
    return f"{given!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


Schema = Mapping[str, Any]


def _allowed_keys(schema: Schema, path: Sequence[str | int]) -> tuple[str, ...]:
    """Returns the keys the object at `path` may have, in the schema's order; empty if the schema names none."""
    level = [schema]
    for part in path:
        level = [child for node in level for child in _children(schema, node, part)]
    return tuple(dict.fromkeys(key for node in level for key in _resolved(schema, node).get("properties", {})))


def _children(root: Schema, node: Schema, part: str | int) -> Iterator[Schema]:
    node = _resolved(root, node)
    for choice in (*node.get("anyOf", ()), node):
        choice = _resolved(root, choice)
        if isinstance(part, int) and isinstance(choice.get("items"), Mapping):
            yield from _choices(root, choice["items"])
        elif part in choice.get("properties", {}):
            yield from _choices(root, choice["properties"][part])


def _choices(root: Schema, node: Schema) -> Iterator[Schema]:
    node = _resolved(root, node)
    yield from (node.get("anyOf") or (node,))


def _resolved(root: Schema, node: Schema) -> Schema:
    reference = node.get("$ref")
    return root["$defs"][reference.rpartition("/")[2]] if reference else node
