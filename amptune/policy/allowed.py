"""Finds the keys that a JSON Schema allows at a path in a document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["allowed_keys"]

Schema = Mapping[str, Any]


def allowed_keys(schema: Schema, path: Sequence[str | int]) -> tuple[str, ...]:
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
