"""Places at which a program can be broken on purpose, drawn by seed: one small change each, in one file.

`suite.py` breaks them one after another and asks whether the tests notice.
"""

from __future__ import annotations

import ast
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Code that runs on a GPU alone, so that no test without one can notice that it is broken.
NEEDS_GPU = (
    "hardware/cuda_driver",
    "hardware/nvml",
    "measure/bench/clocks",
    "measure/bench/peak_memory",
    "measure/breakdown/",
    "runtime/float8",
    "runtime/graphs/capture",
    "runtime/graphs/recorded_",
    "runtime/integrations/fsdp",
    "workload/zoo",
)
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
}


@dataclass(frozen=True, kw_only=True)
class Place:
    """One change of a node. Versions of a file have it in common by function, kind, old text and number."""

    file: str
    function: str
    kind: str
    old: str
    new: str
    number: int
    """How many nodes of the same function, kind and text come before it."""

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Change:
    """A node, and the text that replaces it."""

    function: str
    kind: str
    node: ast.expr | ast.stmt
    new: str


def changes(tree: ast.Module) -> Iterator[Change]:
    """All changes that one could make, in the order of the text; docstrings, annotations and defaults aside."""
    functions = [(f"{outer}{node.name}", node) for outer, node in _functions(tree, "")]
    for name, function in functions:
        for node in _own_nodes(function):
            yield from (Change(name, kind, node, new) for kind, new in _changed(node))


def _functions(node: ast.AST, outer: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield outer, child
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _functions(child, f"{outer}{child.name}.")


def _own_nodes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr | ast.stmt]:
    """The nodes of a function's body, without those of functions and classes inside it."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.expr | ast.stmt):
            yield node
        waiting.extend(reversed(list(ast.iter_child_nodes(node))))


def _changed(node: ast.expr | ast.stmt) -> Iterator[tuple[str, str]]:
    """What the node could become: pairs of kind and text."""
    match node:
        case ast.Compare(ops=[op]):
            yield "comparison", ast.unparse(ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators))
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "and-or", f"({ast.unparse(ast.BoolOp(other, node.values))})"
        case ast.UnaryOp(op=ast.Not()):
            yield "not", f"({ast.unparse(node.operand)})"
        case ast.BinOp() if type(node.op) in ARITHMETIC and not _is_text(node):
            yield "arithmetic", f"({ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))})"
        case ast.Constant(value=bool()):
            yield "truth", str(not node.value)
        case ast.Constant(value=int() | float() as value):
            yield "number", repr(value + 1)
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and value.value is None):
            yield "return", "return None"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield "left out", "pass"


def _is_text(node: ast.BinOp) -> bool:
    return any(isinstance(side, ast.JoinedStr | ast.Constant) and _says(side) for side in (node.left, node.right))


def _says(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def draw(root: Path, room: str, count: int, seed: int) -> list[Place]:
    """Returns `count` places below `root`/amptune/`room`, all equally likely, in the order in which they were drawn."""
    places: list[Place] = []
    for path in sorted((root / "amptune" / room).rglob("*.py")):
        file = path.relative_to(root).as_posix()
        if not file.removeprefix("amptune/").startswith(NEEDS_GPU):
            places += _places(file, path.read_text())
    return random.Random(seed).sample(places, min(count, len(places)))  # noqa: S311


def _places(file: str, text: str) -> Iterator[Place]:
    seen: Counter[tuple[str, str, str]] = Counter()
    for change in changes(ast.parse(text)):
        old = ast.get_source_segment(text, change.node) or ""
        key = change.function, change.kind, old
        yield Place(file=file, function=change.function, kind=change.kind, old=old, new=change.new, number=seen[key])
        seen[key] += 1


def broken(place: Place, text: str) -> tuple[str, range] | None:
    """The file's text with the place broken, and the lines of the statement around it; None if it is not there."""
    tree = ast.parse(text)
    alike = [
        change
        for change in changes(tree)
        if (change.function, change.kind) == (place.function, place.kind)
        and ast.get_source_segment(text, change.node) == place.old
    ]
    if place.number >= len(alike):
        return None
    node = alike[place.number].node
    lines = text.encode().splitlines(keepends=True)
    before = b"".join(lines[: node.lineno - 1]) + lines[node.lineno - 1][: node.col_offset]
    last = node.end_lineno or node.lineno
    after = lines[last - 1][node.end_col_offset :] + b"".join(lines[last:])
    return (before + place.new.encode() + after).decode(), range(node.lineno, last + 1)
