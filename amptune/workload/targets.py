"""Targets: names of workloads on a command line, `file.py:name` or `package.module:name`."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from amptune.errors import TargetError
from amptune.workload.user_errors import user_code
from amptune.workload.workload import Workload

__all__ = ["Target", "imports_of", "load_workload", "parse_target", "source_digest"]


class Target(str):
    """A target's text in valid form; `place` is the file or module, `attribute` the name in it."""

    __slots__ = ()

    @property
    def place(self) -> str:
        return self.rpartition(":")[0]

    @property
    def attribute(self) -> str:
        return self.rpartition(":")[2]

    def absolute(self) -> str:
        """Returns the target with its file path made absolute, so that it is valid in any working directory."""
        return f"{Path(self.place).resolve()}:{self.attribute}" if self.is_file else str(self)

    @property
    def is_file(self) -> bool:
        return self.place.endswith(".py") or "/" in self.place


def parse_target(text: str) -> Target:
    """Checks the form and that the file exists, without running the file. Raises `TargetError`."""
    target = Target(text)
    if not target.place or not target.attribute.isidentifier():
        raise TargetError(f"{text!r} is no target: write FILE.py:NAME or PACKAGE.MODULE:NAME, as in train.py:workload")
    if target.is_file and not Path(target.place).is_file():
        raise TargetError(f"{text}: there is no file {target.place} (looked in {Path.cwd()})")
    return target


def load_workload(target: Target) -> Workload:
    """Imports the target and returns its workload, named after the attribute if it has no name.

    Raises `TargetError` if the target does not exist or is no workload, `UserCodeError` if its code raises.
    """
    found = _attribute(_import(target), target)
    if callable(found) and not isinstance(found, Workload | type):
        with user_code(f"{target}: {target.attribute}()"):
            found = found()
    if not isinstance(found, Workload):
        raise TargetError(
            f"{target} is {_a(found)}, not an amptune.Workload nor a function that returns one; "
            "`amptune init` writes an example"
        )
    return found if found.name else replace(found, name=target.attribute)


def source_digest(target: Target) -> str:
    """Returns the SHA-256 of a target's source file; a change makes earlier measurements invalid."""
    if target.is_file:
        return _digest_of(Path(target.place))
    spec = importlib.util.find_spec(target.place)
    return _digest_of(Path(spec.origin)) if spec and spec.origin else "unknown"


def imports_of(text: str) -> list[str]:
    """Returns what a target's file imports for its workload, as `module` or `module:name`, without running the file.

    Imports of functions and classes count if the workload's definition leads to them. Empty if that cannot be told, or
    if the file sets environment variables, which may change what an import does.
    """
    try:
        target = parse_target(text)
        source = Path(target.place).read_text(encoding="utf-8") if target.is_file else ""
        statements = ast.parse(source).body
    except (TargetError, OSError, ValueError, SyntaxError):
        return []
    if "environ" in source or "putenv" in source:
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
    return list(found)


def _imported(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
        yield from (f"{node.module}:{alias.name}" for alias in node.names)


def _digest_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _import(target: Target) -> ModuleType:
    if target.is_file:
        return _import_file(Path(target.place).resolve())
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        with user_code(f"importing {target.place}"):
            return importlib.import_module(target.place)
    except Exception as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{target.place}.".startswith(f"{cause.name}."):
            raise TargetError(f"{target}: there is no module {cause.name} (sys.path is searched)") from None
        raise


def _import_file(path: Path) -> ModuleType:
    """Imports a script as a module: its folder is importable as in `python script.py`, `__main__` code does not run."""
    sys.path.insert(0, str(path.parent))
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"amptune_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with user_code(f"importing {path.name}"):
        spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, target: Target) -> Any:
    with user_code(f"{target}: looking up {target.attribute}"):
        if hasattr(module, target.attribute):
            return getattr(module, target.attribute)
    names = [name for name in dir(module) if not name.startswith("_")]
    workloads = [name for name in names if isinstance(getattr(module, name, None), Workload)]
    close = difflib.get_close_matches(target.attribute, workloads or names)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    hint = hint or (f"; it has the workloads {', '.join(workloads)}" if workloads else "")
    raise TargetError(f"{target}: {target.place} has no {target.attribute}{hint}")


def _a(value: Any) -> str:
    kind = value.__name__ if isinstance(value, type) else type(value).__name__
    return f"the class {kind}" if isinstance(value, type) else f"of type {kind}"
