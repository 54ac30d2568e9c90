"""Targets: names of workloads on a command line, `file.py`, `file.py:name` or `package.module:name`."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from amptune.errors import TargetError
from amptune.workload.user_errors import user_code, user_script
from amptune.workload.workload import Workload

__all__ = ["Target", "load_workload", "parse_target", "workload_in"]


class Target(str):
    """A target's text in valid form; `place` is the file or module, `attribute` the name in it, "" for its only one."""

    __slots__ = ()

    @property
    def place(self) -> str:
        return str(self) if self._is_whole_file else self.rpartition(":")[0]

    @property
    def attribute(self) -> str:
        return "" if self._is_whole_file else self.rpartition(":")[2]

    def absolute(self) -> str:
        """Returns the target with its file path made absolute, so that it is valid in any working directory."""
        if not self.is_file:
            return str(self)
        return ":".join(filter(None, [str(Path(self.place).resolve()), self.attribute]))

    @property
    def _is_whole_file(self) -> bool:
        return self.endswith(".py")

    @property
    def is_file(self) -> bool:
        return self.place.endswith(".py") or "/" in self.place


def parse_target(text: str) -> Target:
    """Checks the form and that the file exists, without running the file. Raises `TargetError`."""
    target = Target(text)
    if not target._is_whole_file and (not target.place or not target.attribute.isidentifier()):
        raise TargetError(
            f"{text!r} is no target: write FILE.py, FILE.py:NAME or PACKAGE.MODULE:NAME, as in train.py:workload"
        )
    if target.is_file and not Path(target.place).is_file():
        raise TargetError(f"{text}: there is no file {target.place} (looked in {Path.cwd()})")
    return target


def load_workload(target: Target) -> Workload:
    """Imports the target and returns its workload, named after the attribute if it has no name.

    Raises `TargetError` if the target does not exist, is no workload, or is a file that has not just one;
    `UserCodeError` if its code raises.
    """
    module = _import(target)
    name = target.attribute or _only_workload(module, target)
    return workload_in(_attribute(module, target, name), target, name)


def workload_in(found: Any, place: str, name: str | None) -> Workload:
    """Returns the workload that was found, or that the function found returns; `name` is for one without a name."""
    if callable(found) and not isinstance(found, Workload | type):
        with user_script(f"{Path(place).name}: {name or ''}()"):
            found = found()
    if not isinstance(found, Workload):
        raise TargetError(
            f"{place} is {_a(found)}, not an amptune.Workload nor a function that returns one; "
            "`amptune init` writes an example"
        )
    return found if found.name or name is None else replace(found, name=name)


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
    """Imports a script as a module: its folder is importable as in `python script.py`, `__main__` code does not run.

    The working directory is importable too, but after all others, for scripts that are run by `python -m`.
    """
    sys.path.insert(0, str(path.parent))
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    name = path.stem if path.stem.isidentifier() and path.stem not in sys.modules else f"amptune_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise TargetError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with user_script(f"importing {path.name}"), _without_training(path):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _without_training(path: Path) -> Iterator[None]:
    """Raises `TargetError` at an optimizer's step: each process that measures would train before it measures."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    def refuse(*_: object) -> None:
        raise TargetError(
            f"{path.name} trains when it is imported, which each measuring process does: put the training under "
            f'`if __name__ == "__main__":`, or tune the script as it runs: amptune tune {path.name} -- its arguments'
        )

    hook = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()


def _only_workload(module: ModuleType, target: Target) -> str:
    """Returns the name of the file's one workload; else of its one function that is to return one."""
    known: dict[int, str] = {}
    for name, value in vars(module).items():
        if isinstance(value, Workload):
            known.setdefault(id(value), name)
    names = list(known.values()) or [name for name, value in vars(module).items() if _is_promised(name, value)]
    if len(names) == 1:
        return names[0]
    if names:
        place = Path(target.place).name
        raise TargetError(f"{place} has the workloads {', '.join(names)}: say which, as in {place}:{names[0]}")
    raise TargetError(
        f"{Path(target.place).name} has no workload: write one line, workload = amptune.Workload.from_loop(model, "
        "loader, loss_fn, optimizer), or from_trainer(trainer), or from_lightning(module, loader); `amptune init` "
        "writes an example"
    )


def _is_promised(name: str, value: Any) -> bool:
    """Returns True for a function named `workload`, or annotated to return one."""
    if not inspect.isfunction(value):
        return False
    returned = value.__annotations__.get("return")
    return name == "workload" or returned is Workload or str(returned).rpartition(".")[2] == Workload.__name__


def _attribute(module: ModuleType, target: Target, name: str) -> Any:
    with user_code(f"{target}: looking up {name}"):
        if hasattr(module, name):
            return getattr(module, name)
    names = [other for other in dir(module) if not other.startswith("_")]
    workloads = [other for other in names if isinstance(getattr(module, other, None), Workload)]
    close = difflib.get_close_matches(name, workloads or names)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    hint = hint or (f"; it has the workloads {', '.join(workloads)}" if workloads else "")
    raise TargetError(f"{target}: {target.place} has no {name}{hint}")


def _a(value: Any) -> str:
    kind = value.__name__ if isinstance(value, type) else type(value).__name__
    return f"the class {kind}" if isinstance(value, type) else f"of type {kind}"
