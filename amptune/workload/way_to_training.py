"""The way to the training in a script: what is executed before it, through calls of its own functions. Pure."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from amptune.errors import TargetError
from amptune.workload.program_slice import contains
from amptune.workload.script import Script, is_guard

__all__ = ["Way", "way_to"]

_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_LOOPS = ast.For | ast.While
# Functions that call one another in a circle lead nowhere.
MOST_CALLS = 20


@dataclass(slots=True)
class Way:
    """The statements before a node: those of the module, then those in functions, outside and inside of `loop`.

    `loop` is the innermost loop around the node, calls of the script's functions included, and `around` the next one.
    """

    module: list[ast.stmt] = field(default_factory=list)
    outside: list[ast.stmt] = field(default_factory=list)
    loop: ast.For | ast.While | None = None
    around: ast.For | ast.While | None = None
    inside: list[ast.stmt] = field(default_factory=list)

    def all(self) -> list[ast.stmt]:
        """Returns all of them that are not of the module, of loops the first turn."""
        first: list[ast.stmt] = []
        if isinstance(self.loop, ast.For):
            first = ast.parse(f"{ast.unparse(self.loop.target)} = next(iter({ast.unparse(self.loop.iter)}))").body
        return [*self.outside, *first, *self.inside]

    def enter(self, loop: ast.For | ast.While) -> None:
        """Goes into a loop: the first turn of the one around it leads there."""
        self.outside = self.all()
        self.loop, self.around, self.inside = loop, self.loop, []

    def pass_by(self, statement: ast.stmt) -> None:
        """Adds a statement that is executed before the node."""
        (self.outside if self.loop is None else self.inside).append(statement)


def way_to(script: Script, node: ast.AST, name: str) -> Way:
    """Follows calls of the script's functions from the module to a node."""
    frames: list[tuple[ast.FunctionDef | None, ast.AST]] = [(_owner_of(script, node, name), node)]
    while (owner := frames[0][0]) is not None and len(frames) < MOST_CALLS:
        call = _call_of(script, owner)
        frames.insert(0, (_owner_of(script, call, name) if call else None, call or owner))
    way, outer = Way(), None
    for owner, inner in frames:
        if owner is None:
            _through_module(script, inner, way)
        else:
            _bind(owner, outer if isinstance(outer, ast.Call) else None, way)
            _through(owner.body, inner, way)
        outer = inner
    return way


def _owner_of(script: Script, node: ast.AST, name: str) -> ast.FunctionDef | None:
    """Returns the innermost function around a node. Raises `TargetError` for a method."""
    owner: ast.FunctionDef | None = None
    inner: ast.AST = script.tree
    while (child := next((one for one in ast.iter_child_nodes(inner) if contains(one, node)), None)) is not None:
        if isinstance(child, ast.FunctionDef) and child is not node:
            if isinstance(inner, ast.ClassDef):
                line = getattr(node, "lineno", child.lineno)
                raise TargetError(
                    f"{name}:{line}: {inner.name}.{child.name} trains attributes of an object, which amptune does not "
                    "follow. Write a function:\n\n    def workload():\n        …\n"
                    "        return amptune.Workload.from_loop(model, loader, loss, optimizer)"
                )
            owner = child
        if child is node:
            break
        inner = child
    return owner


def _call_of(script: Script, function: ast.FunctionDef) -> ast.Call | None:
    inside = set(map(id, ast.walk(function)))
    found = [
        node for node in ast.walk(script.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == function.name
        and id(node) not in inside
    ]  # fmt: skip
    return min(found, key=lambda one: one.lineno, default=None)


def _through_module(script: Script, node: ast.AST, way: Way) -> None:
    """Passes the module's statements, of those behind the training only definitions."""
    reached = False
    for statement in script.tree.body:
        if statement is node or contains(statement, node):
            reached = not isinstance(statement, _DEFINITIONS)
            if reached:
                _through_block(statement, node, way)
            else:  # a function that nothing calls
                way.module.append(statement)
        elif is_guard(statement) or script.training_in(statement) is not None:
            continue
        elif not reached or isinstance(statement, _DEFINITIONS | ast.Import | ast.ImportFrom):
            way.module.append(statement)


def _through(body: list[ast.stmt], node: ast.AST, way: Way) -> None:
    for statement in body:
        if not contains(statement, node):
            way.pass_by(statement)
        else:
            _through_block(statement, node, way)
            return


def _through_block(statement: ast.stmt, node: ast.AST, way: Way) -> None:
    if isinstance(statement, _LOOPS):
        way.enter(statement)
    for item in statement.items if isinstance(statement, ast.With) else ():
        if item.optional_vars is not None:  # such as a progress bar
            way.pass_by(_assignment(item.optional_vars, item.context_expr))
    for part in ("body", "orelse", "finalbody"):
        block = getattr(statement, part, [])
        if any(contains(one, node) for one in block):
            _through(block, node, way)


def _bind(function: ast.FunctionDef, call: ast.Call | None, way: Way) -> None:
    """Gives the function's parameters the values of the call, else their defaults."""
    parameters, options = [*function.args.posonlyargs, *function.args.args], function.args.kwonlyargs
    values = _default_options(function)
    for one, default in zip(reversed(parameters), reversed(function.args.defaults), strict=False):
        values[one.arg] = default
    values |= {one.arg: value for one, value in zip(options, function.args.kw_defaults, strict=True) if value}
    if call is not None:
        values |= {one.arg: value for one, value in zip(parameters, call.args, strict=False)}
        values |= {one.arg: one.value for one in call.keywords if one.arg}
    for parameter in (one.arg for one in [*parameters, *options] if one.arg in values):
        if ast.unparse(values[parameter]) != parameter:
            way.pass_by(_assignment(ast.Name(parameter), values[parameter]))


def _default_options(function: ast.FunctionDef) -> dict[str, ast.expr]:
    """Returns the defaults of options that decorators declare, as click's do, by the name of the parameter."""
    found: dict[str, ast.expr] = {}
    for one in function.decorator_list:
        if isinstance(one, ast.Call) and one.args and isinstance(one.args[0], ast.Constant):
            defaults = [keyword.value for keyword in one.keywords if keyword.arg == "default"]
            if defaults:
                found[str(one.args[0].value).lstrip("-").replace("-", "_")] = defaults[0]
    return found


def _assignment(target: ast.expr, value: ast.expr) -> ast.stmt:
    return ast.parse(f"{ast.unparse(target)} = {ast.unparse(value)}").body[0]
