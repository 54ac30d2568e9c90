"""The text of a workload's file, written from a training script that stands beside it."""

from __future__ import annotations

import ast
import builtins
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from amptune.errors import TargetError
from amptune.workload.loop_step import LoopStep
from amptune.workload.program_slice import last_of, names_bound, names_free, names_loaded, statements_for
from amptune.workload.script import Script
from amptune.workload.training_code import TrainingCode, training_of, without_policy

__all__ = ["ARGUMENTS", "FILL_IN", "doubt_of", "options_for", "workload_text"]

# What the user has to write: arguments of the script behind `--`, and values that its text does not tell.
ARGUMENTS, FILL_IN = "-- ARGUMENTS", "# fill in"

# A longer call is written with one argument a line.
WIDTH = 100
_NAMES_OF_PYTHON = {*dir(builtins), "__file__", "__name__", "__doc__"}
_MIXED = re.compile(r"autocast|GradScaler|mixed_precision=|\b[bf][pf]?16=True|16-mixed")


def workload_text(script_path: Path, file: Path) -> str:
    """Returns the text of `file`: a workload of what the script trains. The script is read, never run.

    Definitions are imported from the script if importing it does not train, else they are copied. Raises `TargetError`
    if the script cannot be read, or shows no training.
    """
    source = _source_of(script_path)
    try:
        script = Script(without_policy(ast.parse(source)))
    except SyntaxError as error:
        raise TargetError(f"{script_path}:{error.lineno}: {error.msg}") from error
    code = training_of(script, script_path.name)
    trains = any(script.training_in(one) is not None for one in script.tree.body)
    parts = _Parts(source, code, script_path, file, copied=trains or not script_path.stem.isidentifier())
    return parts.text()


def options_for(script_path: Path) -> str:
    """Returns what `amptune tune` should be given beside the file: the precision of today's training, arguments.

    The precision is left out if an option of the script decides it (`doubt_of`).
    """
    source = _source_of(script_path)
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    baseline = "" if _condition_in(calls) else _baseline_in(source)
    required = [name for call in calls if last_of(call.func) == "add_argument" and (name := _required(call))]
    takes_arguments = re.search(r"ArgumentParser\(|sys\.argv", source)
    return baseline + (f" -- {' '.join(required)}" if required else f" {ARGUMENTS}" if takes_arguments else "")


def doubt_of(script_path: Path) -> str | None:
    """Returns what to add to `amptune tune` if the script's mixed precision depends on a condition, and which."""
    source = _source_of(script_path)
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    condition, baseline = _condition_in(calls), _baseline_in(source).strip()
    return f"if {condition} is true in your training, add {baseline}" if condition and baseline else None


def _baseline_in(source: str) -> str:
    if "amptune.apply(" in source or not _MIXED.search(source):
        return ""
    return f" --baseline amp-{'bf16' if re.search('bfloat16|bf16', source) else 'fp16'}"


def _condition_in(calls: Sequence[ast.Call]) -> str | None:
    """Returns the condition `enabled=` of autocast, or None if there is none."""
    given = [one for call in calls if last_of(call.func) == "autocast" for one in call.keywords]
    conditions = [one.value for one in given if one.arg == "enabled" and not isinstance(one.value, ast.Constant)]
    return ast.unparse(conditions[0]) if conditions else None


def _required(call: ast.Call) -> str | None:
    """Returns how an argument of argparse is given if it has to be: `--data DATA`, or `FILE` by its place."""
    flags = [one.value for one in call.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    options = {one.arg: ast.unparse(one.value) for one in call.keywords}
    if not flags:
        return None
    name = flags[-1].lstrip("-").upper()
    if flags[0].startswith("-"):
        return f"{flags[-1]} {name}" if options.get("required") == "True" else None
    return None if options.get("nargs") in ("'?'", "'*'") else name


def _source_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TargetError(f"{path} cannot be read: {error.strerror}") from error


class _Parts:
    """The parts of the file, in the order in which they stand there."""

    def __init__(self, source: str, code: TrainingCode, script: Path, file: Path, *, copied: bool) -> None:
        self.lines, self.code, self.script, self.file, self.copied = source.splitlines(), code, script, file, copied
        step = code.step
        functions = [*step.batches, *step.body, ast.Expr(step.loss)] if step else []
        needed = {name for argument in code.arguments for name in names_loaded(ast.parse(f"f({argument})"))} - {"f"}
        needed = (needed | names_free(*functions)) - _given_by(step)
        self.local = statements_for(needed, code.before)
        bound = names_bound(*self.local)
        self.of_module = (needed - bound) | (names_free(*self.local) - bound)

    def text(self) -> str:
        head = (
            f'"""What amptune tunes: a training step of {self.script.name}, as `amptune init --from` found it.\n\n'
            f'Then: amptune tune {self.file.name}{options_for(self.script)}\n"""'
        )
        futures, imports, definitions = self._module_parts()
        body = [*self._fill_ins(), *map(self._text_of, self.local), *self._functions()]
        made = f"amptune.Workload.{self.code.constructor}({', '.join(self.code.arguments)})"
        if len(made) > WIDTH:
            made = f"amptune.Workload.{self.code.constructor}(\n    " + ",\n    ".join(self.code.arguments) + ",\n)"
        if self.local:
            inner = textwrap.indent("\n".join([*body, f"return {made}"]), "    ", lambda line: bool(line.strip()))
            body = [f"\ndef workload() -> amptune.Workload:\n{inner}"]
        else:
            body.append(f"\n\nworkload = {made}" if len(body) else f"workload = {made}")
        imports = [one for one in imports if one != "import amptune"]
        parts = ["\n".join([*futures, *imports]), "import amptune" + self._from_script(), definitions, "\n".join(body)]
        text = "\n\n".join([head, *filter(None, parts)]) + "\n"
        compile(text, str(self.file), "exec")
        return text

    def _module_parts(self) -> tuple[list[str], list[str], str]:
        """Returns lines of imports, those from __future__ first, and the text of what is copied beside."""
        module = self.code.module
        kept = statements_for(self.of_module, module) if self.copied else []
        names = self.of_module | names_loaded(*kept)
        futures, imports = [], []
        for one in module:
            if isinstance(one, ast.ImportFrom) and one.module == "__future__":
                futures.append(ast.unparse(one))
            elif isinstance(one, ast.Import | ast.ImportFrom) and (trimmed := _trimmed(one, names)):
                imports.append(trimmed)
        copied = [one for one in kept if not isinstance(one, ast.Import | ast.ImportFrom)]
        return futures, imports, self._spaced(copied)

    def _from_script(self) -> str:
        if self.copied:
            return ""
        others = [one for one in self.code.module if not isinstance(one, ast.Import | ast.ImportFrom)]
        names = sorted(self.of_module & names_bound(*others))
        return f"\nfrom {self.script.stem} import {', '.join(names)}" if names else ""

    def _fill_ins(self) -> list[str]:
        """Returns a line for each name that the script does not give a value."""
        known = names_bound(*self.code.module) | names_bound(*self.local) | _NAMES_OF_PYTHON
        if any(isinstance(one, ast.ImportFrom) and one.names[0].name == "*" for one in self.code.module):
            return []
        missing = sorted(self.of_module - known)
        return [f"{name} = ...  {FILL_IN}: {self.script.name} does not say what it is" for name in missing]

    def _functions(self) -> list[str]:
        """Returns the loss of a loop's step, and what draws its batches if there is no loader."""
        step = self.code.step
        if step is None:
            return []
        written = []
        if step.loader is None:
            drawn = "\n".join(["while True:", *(textwrap.indent(self._text_of(one), "    ") for one in step.batches)])
            drawn += f"\n    yield {step.target}"
            body = textwrap.indent(f"def __iter__(self):\n{textwrap.indent(drawn, '    ')}", "    ")
            written.append(f"\nclass Batches:\n{body}")
        single = step.target.isidentifier()
        lines = [] if single else [f"{step.target} = batch"]
        lines += [self._text_of(one) for one in step.body]
        loss = step.loss
        if (
            lines
            and step.body
            and isinstance(loss, ast.Name)
            and (last := _assigned(step.body[-1], loss.id)) is not None
        ):
            lines[-1] = f"return {ast.unparse(last)}"
        else:
            lines.append(f"return {ast.unparse(loss)}")
        taken = step.target if single else "batch"
        written.append(f"\ndef training_loss({step.model}, {taken}):\n" + textwrap.indent("\n".join(lines), "    "))
        return [*written, ""] if self.local else [f"\n{one}" if index else one for index, one in enumerate(written)]

    def _spaced(self, statements: list[ast.stmt]) -> str:
        """Returns the statements' text, with blank lines between those that do not follow one another."""
        text, last = "", None
        for one in statements:
            if last is not None:
                definition = any(isinstance(each, ast.FunctionDef | ast.ClassDef) for each in (one, last))
                adjacent = one.lineno == (last.end_lineno or 0) + 1
                text += "\n" if adjacent else "\n\n\n" if definition else "\n\n"
            text, last = text + self._text_of(one), one
        return text

    def _text_of(self, statement: ast.stmt) -> str:
        """Returns the script's own text of a statement, without its indentation; that of a changed one is made anew."""
        first = min([statement.lineno, *(one.lineno for one in getattr(statement, "decorator_list", []))])
        lines = self.lines[first - 1 : statement.end_lineno]
        own = textwrap.dedent("\n".join(lines))
        try:
            same = ast.unparse(ast.parse(own)) == ast.unparse(statement)
        except SyntaxError:
            same = False
        return own if same else ast.unparse(statement)


def _given_by(step: LoopStep | None) -> set[str]:
    """Returns the names that a step's own functions are given or define."""
    if step is None:
        return set()
    given = names_bound(*ast.parse(f"{step.target} = None").body) if step.target else set()
    return (given | {"Batches", "training_loss"}) - {step.model}


def _trimmed(statement: ast.Import | ast.ImportFrom, names: set[str]) -> str:
    """Returns an import statement with those of its names that are needed, or "" if there are none."""
    kept = [one for one in statement.names if (one.asname or one.name.partition(".")[0]) in names or one.name == "*"]
    if not kept:
        return ""
    if isinstance(statement, ast.Import):
        return ast.unparse(ast.Import(names=kept))
    return ast.unparse(ast.ImportFrom(module=statement.module, names=kept, level=statement.level))


def _assigned(statement: ast.stmt, name: str) -> ast.expr | None:
    if isinstance(statement, ast.Assign) and [ast.unparse(one) for one in statement.targets] == [name]:
        return statement.value
    return None
