"""Every text that amptune can show: the words in its source, wherever they stand, with {} for what is filled in."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import amptune

__all__ = ["texts"]

# A shorter one is a key or a name, and no sentence.
FEWEST_WORDS = 3


def texts() -> str:
    """A line a text, sorted, without docstrings; behind them the codes of findings and the kinds of errors."""
    package = Path(amptune.__file__).parent
    trees = [ast.parse(path.read_text()) for path in package.rglob("*.py")]
    said = {text for tree in trees for text in _texts_in(tree)}
    codes = {code for tree in trees for code in _codes_in(tree)}
    lines = [*sorted(text for text in said if len(text.split()) >= FEWEST_WORDS), *sorted(codes)]
    return "".join(f"{line}\n" for line in lines)


def _codes_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.keyword)
            and node.arg == "code"
            and isinstance(node.value, ast.Constant | ast.JoinedStr)
        ):
            yield f"finding {_template(node.value)}"
        if isinstance(node, ast.ClassDef) and node.name.endswith(("Error", "Warning")):
            yield f"class {node.name}({', '.join(map(ast.unparse, node.bases))})"


def _texts_in(tree: ast.Module) -> Iterator[str]:
    left_out = {id(node) for node in ast.walk(tree) for node in _without_words(node)}
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if id(node) in left_out:
            continue
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            yield " ".join(_template(node).split())
        if isinstance(node, ast.JoinedStr):  # what is filled in may have words of its own
            pending += [part.value for part in node.values if isinstance(part, ast.FormattedValue)]
        else:
            pending += ast.iter_child_nodes(node)


def _template(node: ast.AST) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) for part in node.values)
    return str(node.value) if isinstance(node, ast.Constant) else "{}"


def _without_words(node: ast.AST) -> Iterator[ast.AST]:
    """Docstrings, and annotations that are strings."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and not _is_command(node):
            yield first
    if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
        yield node.annotation


def _is_command(node: ast.AST) -> bool:
    """Whether a docstring is shown, as click shows that of a command."""
    return isinstance(node, ast.FunctionDef) and any("command" in ast.unparse(one) for one in node.decorator_list)
