"""The size of the package and of what holds it, in one table: several checkouts beside each other.

    git worktree add /tmp/before f0d2760
    python reports/structure.py /tmp/before . > table.md

Lines are all lines of `*.py`. A module is a file with statements other than its docstring. A number is one that a
module assigns to a name at its top level. Tests are test functions, each counted once, whatever its parameters.
"""

from __future__ import annotations

import ast
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

KNOBS = [
    "autocast",
    "fp32_math",
    "fp32_modules",
    "memory_format",
    "cudnn_benchmark",
    "compile",
    "cuda_graphs",
    "checkpoint",
    "float8_modules",
    "fused_optimizer",
    "loss_scale",
]


def trees_in(folder: Path) -> list[tuple[str, ast.Module]]:
    """Text and syntax tree of each Python file below a folder."""
    texts = [path.read_text() for path in sorted(folder.rglob("*.py"))]
    return [(text, ast.parse(text)) for text in texts]


def rows_of(checkout: Path) -> Iterator[tuple[str, object]]:
    """Each figure of a checkout, with its name."""
    package = trees_in(checkout / "amptune")
    modules = [(text, tree) for text, tree in package if not all(map(_is_docstring, tree.body))]
    nodes = [node for _, tree in package for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = sorted((f.end_lineno or f.lineno) - f.lineno + 1 for f in functions)
    yield "lines of `amptune/`", sum(text.count("\n") for text, _ in package)
    for room in sorted(path for path in (checkout / "amptune").iterdir() if path.is_dir() and path.name[0] != "_"):
        yield f"lines of `amptune/{room.name}/`", sum(text.count("\n") for text, _ in trees_in(room))
    yield "modules", len(modules)
    yield "lines of a module, median and longest", _span([text.count("\n") for text, _ in modules])
    yield "classes", sum(isinstance(node, ast.ClassDef) for node in nodes)
    yield "functions", len(functions)
    yield "lines of a function, median and longest", _span(lengths)
    yield "numbers at the top level of modules", sum(_numbers(tree) for _, tree in package)
    inner = {id(node) for function in functions for node in ast.walk(function) if _is_import(node)}
    yield "imports inside functions", len(inner)
    private = [name for _, tree in package for name in _private_names(tree)]
    yield "private names of PyTorch, and places", f"{len(set(private))} in {len(private)}"
    for knob in KNOBS:
        yield f"modules that name `{knob}`", sum(_names(tree, knob) for _, tree in package)
    tests = trees_in(checkout / "tests")
    yield "lines of `tests/`", sum(text.count("\n") for text, _ in tests)
    yield "tests", sum(len(re.findall(r"^\s*(?:async )?def test_", text, re.MULTILINE)) for text, _ in tests)
    yield "lines of programs in `reports/`", sum(text.count("\n") for text, _ in trees_in(checkout / "reports"))
    readme = (checkout / "reports" / "README.md").read_text()
    yield "lines of `reports/README.md`", readme.count("\n")


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _span(lengths: list[int]) -> str:
    return f"{statistics.median(lengths):.0f}, {max(lengths)}"


def _numbers(tree: ast.Module) -> int:
    assigned = [node.value for node in tree.body if isinstance(node, ast.Assign | ast.AnnAssign)]
    inside = [node for value in assigned if value is not None for node in ast.walk(value)]
    return sum(isinstance(node, ast.Constant) and type(node.value) in (int, float) for node in inside)


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _private_names(tree: ast.Module) -> Iterator[str]:
    """Dotted names within torch of which a part begins with an underscore, each time that one stands there."""
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if re.match(r"torch\.(\w+\.)*_(?!_)\w", name))


def _names(tree: ast.Module, knob: str) -> bool:
    """Whether a module names a knob: as an attribute, a keyword, a field or a string."""
    return any(
        (isinstance(node, ast.Attribute) and node.attr == knob)
        or (isinstance(node, ast.keyword) and node.arg == knob)
        or (isinstance(node, ast.Name) and node.id == knob)
        or (isinstance(node, ast.Constant) and node.value == knob)
        for node in ast.walk(tree)
    )


def main() -> None:
    checkouts = [Path(name) for name in sys.argv[1:] or ["."]]
    figures = [dict(rows_of(checkout)) for checkout in checkouts]
    names = list(dict.fromkeys(name for one in figures for name in one))
    print(f"| | {' | '.join(checkout.resolve().name for checkout in checkouts)} |")
    print(f"|---|{'---|' * len(checkouts)}")
    for name in names:
        print(f"| {name} | {' | '.join(str(one.get(name, 0)) for one in figures)} |")


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
    else:
        main()
