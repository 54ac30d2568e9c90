"""A training script, read before it is imported: does importing it train, and which libraries does it need?"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from amptune.errors import TargetError
from amptune.workload.targets import parse_target

__all__ = ["Script", "imports_of", "line_for_training", "require_importable", "require_workload"]

_NOT_EXECUTED = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


def require_importable(path: Path) -> None:
    """Raises `TargetError`, with the lines to write, if importing the script would train.

    A script trains in a loop with a backward pass or an optimizer's step, or by `train()` or `fit()` of a Trainer: not
    under the `__main__` guard, but in functions too that it calls. A file that is no Python is left to the import.
    """
    source = path.read_text(encoding="utf-8", errors="replace")
    try:
        script = Script(ast.parse(source))
    except SyntaxError:
        return
    for statement in script.tree.body:
        found = script.training_in(statement)
        if found is not None:
            raise TargetError(_lines_to_write(path, source, script, statement, found))


def require_workload(path: Path) -> None:
    """Raises `TargetError`, with the lines to write, if no word of the script is about a workload."""
    source = path.read_text(encoding="utf-8", errors="replace")
    if "workload" in source.lower():
        return
    try:
        script = Script(ast.parse(source))
    except SyntaxError:
        return
    found = next((node for node in ast.walk(script.tree) if script.trains(node)), script.tree)
    raise TargetError(
        f"{path.name} has no workload. Have one written beside it:\n\n    amptune init --from {path}\n\n"
        "or write one where model, data and optimizer exist; if that is inside of a function, then in a function that "
        f"returns it:\n\n    import amptune\n\n    def workload():\n        …\n"
        f"        return {_workload_for(found)}"
    )


def line_for_training(text: str, policy: str) -> str | None:
    """Returns how a target's framework takes a policy, by the one constructor of a workload that its file names.

    None for a loop of one's own, and if the file does not tell.
    """
    try:
        target = parse_target(text)
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


@dataclass
class Script:
    """The text of a script, which tells what importing it executes."""

    tree: ast.Module
    functions: dict[str, ast.FunctionDef] = field(init=False)
    _trainers: set[str] = field(init=False)

    def __post_init__(self) -> None:
        self.functions = {node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)}
        made = [node for node in ast.walk(self.tree) if isinstance(node, ast.Assign) and _makes_trainer(node.value)]
        self._trainers = {target.id for node in made for target in node.targets if isinstance(target, ast.Name)}

    def training_in(self, statement: ast.stmt) -> ast.AST | None:
        """Returns the first loop or call that trains when a statement is executed."""
        return next((node for node in self._executed(statement) if self.trains(node)), None)

    def trains(self, node: ast.AST) -> bool:
        """Returns True for a loop, or for a call of a Trainer or of `amptune.tune`, that trains when it is executed."""
        if isinstance(node, ast.For | ast.While):
            return any(_is_step(inner) for inner in self._executed(node))
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        return ast.unparse(node.func) == "amptune.tune" or self.is_trainer_call(node)

    def is_trainer_call(self, node: ast.AST) -> bool:
        """Returns True for `train()` or `fit()` of a Trainer."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return False
        held = node.func.value
        is_trainer = _makes_trainer(held) or (isinstance(held, ast.Name) and held.id in self._trainers)
        return is_trainer and node.func.attr in ("train", "fit")

    def has_workload(self) -> bool:
        """Returns True if the script names amptune's `Workload`."""
        return any("Workload" in (getattr(node, "attr", ""), getattr(node, "id", "")) for node in ast.walk(self.tree))

    def _executed(self, node: ast.AST, seen: set[str] | None = None) -> Iterator[ast.AST]:
        """Yields the nodes that executing one executes; those of each of the script's functions that it calls, once."""
        seen = set() if seen is None else seen
        if isinstance(node, _NOT_EXECUTED) or is_guard(node):
            return
        yield node
        for part in ast.iter_child_nodes(node):
            yield from self._executed(part, seen)
        name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
        if name in self.functions and name not in seen:
            seen.add(name)
            for statement in self.functions[name].body:
                yield from self._executed(statement, seen)


def is_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def _is_step(node: ast.AST) -> bool:
    """Returns True for a backward pass, and for the step of what is called an optimizer."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    return node.func.attr == "backward" or (node.func.attr == "step" and "opt" in ast.unparse(node.func.value).lower())


def _makes_trainer(node: ast.AST) -> bool:
    """Returns True for a call of a class named like a Trainer: `lightning.Trainer(…)`, `SFTTrainer(…)`."""
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Trainer")


def _lines_to_write(path: Path, source: str, script: Script, statement: ast.stmt, found: ast.AST) -> str:
    lines, first = source.splitlines(), statement.lineno
    shown = [lines[first - 1], *([] if statement.end_lineno == first else ["    …"])]
    body = "\n".join(f"        {line}" for line in shown)
    guard = (
        f"{path.name} trains when it is imported ({path.name}:{first}: {lines[first - 1].strip()}), and amptune "
        "imports it in every measuring process. Put that, and what needs its result, under a guard:\n\n"
        f'    if __name__ == "__main__":\n{body}'
    )
    if script.has_workload():
        return guard
    line = f"    import amptune\n    workload = {_workload_for(found)}"
    return (
        f"{guard}\n\nand above it write what amptune is to tune:\n\n{line}\n\n"
        f"Or leave the script as it is, and have a workload written beside it:\n\n    amptune init --from {path}"
    )


def _workload_for(found: ast.AST) -> str:
    """Returns the line that makes a workload of what trains."""
    arguments = "loop(model, loader, loss_fn, optimizer)"
    if isinstance(found, ast.Call) and isinstance(found.func, ast.Attribute) and found.func.attr != "tune":
        arguments = f"trainer({ast.unparse(found.func.value)})"
        if found.func.attr == "fit":
            named = [one.value for one in found.keywords if one.arg in ("model", "train_dataloaders", "datamodule")]
            arguments = f"lightning({', '.join(map(ast.unparse, [*found.args[:2], *named])) or 'module, loader'})"
    return f"amptune.Workload.from_{arguments}"
