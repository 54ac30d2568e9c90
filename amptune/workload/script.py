"""Reads the text of a target's file before it runs: whether it is a script, and which libraries it needs."""

from __future__ import annotations

import ast
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from amptune.errors import TargetError
from amptune.workload.targets import Target, parse_target

__all__ = ["imports_of", "is_script", "line_for_training"]


def is_script(target: Target, arguments: Sequence[str] = ()) -> bool:
    """Returns True for a file that is to run as `python FILE` does, and not to be imported for its workload.

    A file is one with arguments, and without if its text makes no workload at its top level.
    """
    if target.attribute or not target.is_file:
        return False
    try:
        statements = ast.parse(Path(target.place).read_text(encoding="utf-8", errors="replace")).body
    except (OSError, SyntaxError, ValueError):
        return True  # which running it will tell
    return bool(arguments) or not any(map(_makes_workload, statements))


def _makes_workload(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef):
        returned = "" if statement.returns is None else ast.unparse(statement.returns)
        return statement.name == "workload" or returned.strip("\"'").rpartition(".")[2] == "Workload"
    if isinstance(statement, ast.ImportFrom):
        return any("workload" in (one.name, one.asname) for one in statement.names)
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    return isinstance(value, ast.Call) and "Workload" in ast.unparse(value.func).split(".")


def line_for_training(text: str, policy: str, arguments: Sequence[str] = ()) -> str | None:
    """Returns how training takes a policy: the command that runs a script under it, or what a framework is given.

    That is told by the one constructor of a workload that the target's file names. None for a loop of one's own, and
    if the file does not tell.
    """
    try:
        target = parse_target(text)
        if is_script(target, arguments):
            return shlex.join(["amptune", "run", policy, text, *(["--", *arguments] if arguments else [])])
        source = Path(target.place).read_text(encoding="utf-8", errors="replace") if target.is_file else ""
    except (TargetError, OSError):
        return None
    named = [name for name in ("loop", "trainer", "lightning") if f"from_{name}(" in source]
    if named == ["trainer"]:
        arguments = f'TrainingArguments(**training_arguments("{policy}", …))'
        return f'{arguments} and Trainer(callbacks=[PolicyCallback("{policy}")])'
    return f'Trainer(plugins=[PolicyPrecision("{policy}")])' if named == ["lightning"] else None


def imports_of(text: str) -> list[str]:
    """Returns what a target's file imports for its workload, as `module` or `module:name`, without running the file.

    Imports of functions and classes count if the workload's definition leads to them; modules beside the file are left
    out. Empty if that cannot be told, or if the file sets environment variables or the path of imports, which may
    change what an import does.
    """
    try:
        target = parse_target(text)
        source = Path(target.place).read_text(encoding="utf-8") if target.is_file else ""
        statements = ast.parse(source).body
    except (TargetError, OSError, ValueError, SyntaxError):
        return []
    if any(word in source for word in ("environ", "putenv", "sys.path")):
        return []
    definitions = {one.name: one for one in statements if isinstance(one, ast.FunctionDef | ast.ClassDef)}
    waiting: list[ast.stmt] = [one for one in statements if not isinstance(one, ast.FunctionDef | ast.ClassDef)]
    waiting += [definitions.pop(target.attribute)] if target.attribute in definitions else []
    found: dict[str, None] = {}
    while waiting:
        for node in ast.walk(waiting.pop()):
            found |= dict.fromkeys(_imported(node))
            if isinstance(node, ast.Name) and node.id in definitions:
                waiting.append(definitions.pop(node.id))
    beside = {path.stem for path in Path(target.place).parent.iterdir()}
    return [name for name in found if name.partition(":")[0].partition(".")[0] not in beside]


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}:{alias.name}" for alias in node.names)
