"""Reads and writes YAML, with the line and column of every value. The only module that imports PyYAML.

Reading is stricter than PyYAML's default: duplicate keys are errors, only `true` and `false` are booleans
(so `off` is a word, as in YAML 1.2), `1e-3` is a number, and nothing in a file can name a Python object.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from amptune.errors import FileFormatError, Problem, visible

__all__ = ["Document", "dump", "parse", "read"]

Path_ = tuple[str | int, ...]

# A policy of amptune's has some 5,000 characters and 400 values. These bounds keep any file's reading within seconds.
MAX_CHARACTERS, MAX_VALUES, MAX_ENTRIES, MAX_DEPTH = 1_000_000, 100_000, 1_000, 60

_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STRING = "tag:yaml.org,2002:str"
_NULL = re.compile(r"~|null|Null|NULL|")
_BOOL = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class Document:
    """A parsed file: `data` in plain Python, and PyYAML's `root` node, which knows where everything stands.

    `problems` are duplicate keys, of which `data` holds the first; `validate` raises them with all others.
    """

    source: str
    data: Any
    root: yaml.Node | None = field(default=None, repr=False)
    problems: tuple[Problem, ...] = ()
    _entries: dict[int, dict[Any, tuple[yaml.Node, yaml.Node]]] = field(default_factory=dict, repr=False, compare=False)

    def problem(self, path: Path_, message: str, *, key: bool = False) -> Problem:
        """Returns a problem placed at the value (or key) at `path`, or at its nearest ancestor in the file."""
        found = [name if key else value for name, value in self._nodes(path)]
        return _problem(message, self.source, next((node for node in reversed(found) if node is not None), None))

    def text_at(self, path: Path_) -> str | None:
        """Returns a scalar as it is written in the file: `2.10` stays `2.10`."""
        node = self._scalar_at(path)
        return None if node is None else str(node.value)

    def is_plain(self, path: Path_) -> bool:
        """Returns True if there is a scalar without quotes at `path`."""
        node = self._scalar_at(path)
        return node is not None and not node.style

    def _entries_of(self, node: yaml.MappingNode) -> dict[Any, tuple[yaml.Node, yaml.Node]]:
        """Returns the nodes of each key and its value, by the key; of equal keys the first."""
        if id(node) not in self._entries:
            pairs = [(one.value, (one, value)) for one, value in node.value if isinstance(one, yaml.ScalarNode)]
            self._entries[id(node)] = dict(reversed(pairs))
        return self._entries[id(node)]

    def _scalar_at(self, path: Path_) -> yaml.ScalarNode | None:
        found = list(self._nodes(path))
        node = found[-1][1] if found and len(found) == len(path) else None
        return node if isinstance(node, yaml.ScalarNode) else None

    def _nodes(self, path: Path_) -> Iterator[tuple[yaml.Node | None, yaml.Node]]:
        """Yields the nodes of key and value on the way to `path`, as far as that is in the file."""
        node = self.root
        for step in path:
            if isinstance(node, yaml.MappingNode):
                found: tuple[yaml.Node | None, yaml.Node] | None = self._entries_of(node).get(step)
            else:
                items = node.value if isinstance(node, yaml.SequenceNode) and isinstance(step, int) else []
                found = (None, items[step]) if isinstance(step, int) and step < len(items) else None
            if found is None:
                return
            yield found
            node = found[1]


def read(path: str | os.PathLike[str]) -> Document:
    """Parses a file. Raises `FileFormatError` if the file cannot be read or is not YAML."""
    source = os.fspath(path)
    try:
        with open(path, "rb") as file:
            content = file.read(MAX_CHARACTERS + 1)  # a device has no end
        if len(content) > MAX_CHARACTERS:
            message = f"larger than {MAX_CHARACTERS:,} bytes; amptune never writes such a file"
            raise FileFormatError([Problem(message=message, source=source)])
        text = content.decode("utf-8")
    except OSError as error:
        raise FileFormatError([Problem(message=f"cannot be read: {error.strerror}", source=source)]) from error
    except ValueError as error:
        raise FileFormatError([Problem(message=f"is no text in UTF-8: {error}", source=source)]) from error
    return parse(text, source)


def parse(text: str, source: str) -> Document:
    """Parses text. Raises `FileFormatError` if it is not YAML; duplicate keys go to `Document.problems`."""
    try:
        _refuse_deep(text, source)
        root = yaml.compose(text, Loader=_BaseLoader)
    except yaml.MarkedYAMLError as error:
        raise FileFormatError([_syntax_problem(error, text, source)]) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FileFormatError([Problem(message=f"is no YAML: {error}".replace("\n", " "), source=source)]) from error
    reading = _Reading(source)
    data = {} if root is None else reading.value(root)
    if reading.problems:
        raise FileFormatError(reading.problems + reading.duplicates)
    return Document(source=source, data=data, root=root, problems=tuple(reading.duplicates))


def dump(data: Any) -> str:
    """Returns block-style YAML, keys in the given order; strings that YAML would read otherwise are quoted.

    What no screen shows stands in quotes, where YAML has the escapes of Python.
    """
    text: str = yaml.dump(
        data, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True, width=120
    )
    return visible(text)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper: indents lists below their key; quotes text that this module or YAML 1.1 would misread."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:  # noqa: ARG002
        return super().increase_indent(flow, indentless=False)


def _dump_string(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    plain = re.fullmatch(r"[A-Za-z_][\w./ :+-]*", text) and ": " not in text and text.strip() == text
    words = {"on", "off", "yes", "no", "y", "n", "true", "false", "null", "nan", "inf"}
    style = None if plain and text.lower() not in words and not text.endswith(":") else '"'
    return dumper.represent_scalar(_STRING, text, style=style)


def _dump_float(dumper: _Dumper, number: float) -> yaml.ScalarNode:
    text = ".nan" if math.isnan(number) else str(number).replace("inf", ".inf")
    text = text if "." in text else text.replace("e", ".0e")  # YAML 1.1 reads 1e-07 as a string
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


def _dump_list(dumper: _Dumper, items: list[Any]) -> yaml.SequenceNode:
    """Writes a list of plain values in one line."""
    plain = all(isinstance(item, int | float | str) for item in items)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=plain)


_Dumper.add_representer(list, _dump_list)
_Dumper.add_representer(str, _dump_string)
_Dumper.add_representer(float, _dump_float)


@dataclass
class _Reading:
    """One pass over PyYAML's nodes, which collects plain data and every problem."""

    source: str
    problems: list[Problem] = field(default_factory=list)
    duplicates: list[Problem] = field(default_factory=list)
    size: int = 0

    def value(self, node: yaml.Node, depth: int = 0) -> Any:
        self.size += 1 + (len(node.value) // 10 if isinstance(node, yaml.ScalarNode) else 0)
        if self.size > MAX_VALUES or depth > MAX_DEPTH:  # aliases can make a short text huge
            if not self.problems:
                self._note(
                    node, f"more than {MAX_VALUES:,} values, those of aliases counted; amptune never writes such a file"
                )
            return None
        if not node.tag.startswith("tag:yaml.org,2002:") or "python" in node.tag:
            self._note(node, f"the tag {node.tag!r} is not allowed: plain values only")
            return None
        if isinstance(node, yaml.CollectionNode) and len(node.value) > MAX_ENTRIES:
            self._note(node, f"{len(node.value):,} entries: a list or a mapping has at most {MAX_ENTRIES:,}")
            return None
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, depth)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, depth + 1) for item in node.value]
        return _scalar(node)  # type: ignore[arg-type]  # what is no collection is a scalar

    def _mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._note(key_node, "a key must be a word")
            elif (key := str(key_node.value)) in result:
                message = f"{key!r} stands here a second time; the first is in line {lines[key]}"
                self.duplicates.append(_problem(message, self.source, key_node))
            else:
                lines[key] = key_node.start_mark.line + 1
                result[key] = self.value(value_node, depth + 1)
        return result

    def _note(self, node: yaml.Node, message: str) -> None:
        self.problems.append(_problem(message, self.source, node))


def _problem(message: str, source: str, node: yaml.Node | None) -> Problem:
    """Returns a problem placed at a node; without one at the beginning of the file."""
    line, column = (node.start_mark.line, node.start_mark.column) if node is not None else (0, 0)
    return Problem(message=message, source=source, line=line + 1, column=column + 1)


def _scalar(node: yaml.ScalarNode) -> Any:
    text = node.value
    if node.style in ("'", '"', "|", ">"):
        return text
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text) and len(text) < 40:  # nobody means a longer number
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(re.sub(r"\.(inf|nan)", r"\1", text.lower()))
    return text


def _refuse_deep(text: str, source: str) -> None:
    """Raises if nesting is too deep. Runs before composing, which recurses; parsing does not recurse."""
    level = 0
    for event in yaml.parse(text, Loader=_BaseLoader):
        level += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if level > MAX_DEPTH:
            raise FileFormatError([Problem(message=f"nested deeper than {MAX_DEPTH} levels", source=source)])


def _syntax_problem(error: yaml.MarkedYAMLError, text: str, source: str) -> Problem:
    mark = error.problem_mark or error.context_mark
    message = f"is no YAML: {error.problem or error.context}"
    line = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    if re.search(r":\s*\*|-\s*\*|[\[,]\s*\*", line) or "alias" in message:
        message += '; a pattern that begins with * must be quoted: path: "*.norm"'
    if "\t" in line:
        message += "; indent with spaces, not tabs"
    place = (mark.line + 1, mark.column + 1) if mark else (None, None)
    return Problem(message=message, source=source, line=place[0], column=place[1])
