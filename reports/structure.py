"""The size of the package, room by room: modules, statements, lines of a module, lines of a function.

    python reports/structure.py > reports/structure/after.txt
    git worktree add /tmp/before da14ee9 && python reports/structure.py /tmp/before > reports/structure/before.txt

A module is a file with statements other than its docstring. Docstrings are no statements here; lines are all lines.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROW = "{:<24}{:>8}{:>12}{:>14}{:>15}{:>17}"


@dataclass(frozen=True)
class Module:
    """One file; `functions` are the lines of each of its functions, methods and inner functions included."""

    room: str
    lines: int
    statements: int
    functions: tuple[int, ...]


def module_of(path: Path, package: Path) -> Module:
    """Reads a file; its room is its folder below the package."""
    text = path.read_text()
    nodes = list(ast.walk(ast.parse(text)))
    functions = [n for n in nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return Module(
        room=path.parent.relative_to(package).as_posix(),
        lines=len(text.splitlines()),
        statements=sum(isinstance(n, ast.stmt) and not _is_docstring(n) for n in nodes),
        functions=tuple((f.end_lineno or f.lineno) - f.lineno + 1 for f in functions),
    )


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def row_of(name: str, modules: list[Module]) -> str:
    """One line of the table."""
    lines = [module.lines for module in modules]
    functions = [length for module in modules for length in module.functions]
    return ROW.format(
        name,
        len(modules),
        sum(module.statements for module in modules),
        f"{statistics.median(lines):.0f}",
        max(lines),
        f"{statistics.median(functions or [0]):.0f} / {max(functions, default=0)}",
    )


def main() -> None:
    package = Path(sys.argv[1] if len(sys.argv) > 1 else ".") / "amptune"
    modules = [module_of(path, package) for path in sorted(package.rglob("*.py"))]
    modules = [module for module in modules if module.statements]
    rooms: defaultdict[str, list[Module]] = defaultdict(list)
    for module in modules:
        rooms[module.room].append(module)
    print(ROW.format("room", "modules", "statements", "median lines", "longest", "function m/l"))
    for room, inside in sorted(rooms.items()):
        print(row_of(room, inside))
    print(row_of("all", modules))


if __name__ == "__main__":
    main()
