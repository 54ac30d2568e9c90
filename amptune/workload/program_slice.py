"""Program slices: the statements of a script that lead to the values of some names. Pure."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

__all__ = ["contains", "last_of", "names_bound", "names_free", "names_loaded", "root_of", "statements_for", "value_of"]

_DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
# Methods that change nothing that a measured step depends on.
_WITHOUT_EFFECT = {"eval", "info", "log", "print_trainable_parameters", "summary", "train", "watch", "zero_grad"}
# Libraries, which no call changes that a measured step depends on: amptune sets seeds and flags itself.
_LIBRARIES = {"np", "numpy", "os", "random", "torch"}
_TOLD = {"log", "logger", "logging", "mlflow", "print", "pprint", "summary", "wandb", "writer"}


def statements_for(names: Iterable[str], statements: list[ast.stmt]) -> list[ast.stmt]:
    """Returns, in order, those of the statements that give the names their values."""
    needed, kept = set(names), set[int]()
    while True:
        for index in reversed(range(len(statements))):
            if index not in kept and _changes(statements[index], needed):
                kept.add(index)
                needed |= names_loaded(statements[index])
        if not any(_changes(one, needed) for index, one in enumerate(statements) if index not in kept):
            return [statements[index] for index in sorted(kept)]


def names_loaded(*nodes: ast.AST) -> set[str]:
    """Returns the names that are read, those in functions defined there too."""
    return {one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name) and _is_read(one, node)}


def names_bound(*nodes: ast.AST) -> set[str]:
    """Returns the names that executing the nodes gives a value."""
    return {name for node in nodes for name in _bound(node)}


def names_free(*nodes: ast.stmt) -> set[str]:
    """Returns the names that are read and get no value there; parameters of functions have one."""
    inner = {one.arg for node in nodes for one in ast.walk(node) if isinstance(one, ast.arg)} | {
        one.id for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name) and _is_stored(one)
    }
    return names_loaded(*nodes) - names_bound(*nodes) - inner


def _is_read(name: ast.Name, within: ast.AST) -> bool:
    return not _is_stored(name) or (isinstance(within, ast.AugAssign) and within.target is name)


def _is_stored(name: ast.Name) -> bool:
    return not isinstance(name.ctx, ast.Load)


def _bound(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)
    elif isinstance(node, _DEFINITIONS):
        yield node.name
        return
    elif isinstance(node, ast.Lambda | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        return
    elif isinstance(node, ast.Name) and _is_stored(node):
        yield node.id
    for child in ast.iter_child_nodes(node):
        yield from _bound(child)


def _changes(statement: ast.stmt, needed: set[str]) -> bool:
    """Returns True if the statement may change the value of a needed name."""
    if names_bound(statement) & needed:
        return True
    if isinstance(statement, ast.Assign | ast.AugAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return any(root_of(target) in needed - _LIBRARIES for target in targets if not isinstance(target, ast.Name))
    if isinstance(statement, ast.Expr):
        return isinstance(statement.value, ast.Call) and _call_changes(statement.value, needed)
    if isinstance(statement, _DEFINITIONS):
        return False
    return any(_changes(one, needed) for one in ast.iter_child_nodes(statement) if isinstance(one, ast.stmt))


def _call_changes(call: ast.Call, needed: set[str]) -> bool:
    """A method may change its object, and a function what it is given."""
    root = root_of(call.func)
    if (
        root in _TOLD
        or "seed" in ast.unparse(call.func)
        or (isinstance(call.func, ast.Attribute) and call.func.attr in _WITHOUT_EFFECT)
    ):
        return False
    given = {root_of(argument) for argument in call.args if isinstance(argument, ast.Name | ast.Attribute)}
    if given & (needed - _LIBRARIES):
        return True
    return root in needed - _LIBRARIES and isinstance(call.func, ast.Attribute)


def root_of(node: ast.AST) -> str | None:
    """Returns the name that an expression such as `a.b[0].c()` begins with, or None."""
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call | ast.Starred):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def last_of(function: ast.expr) -> str:
    """Returns the last name of a dotted one: `clip_grad_norm_` of `nn.utils.clip_grad_norm_`."""
    return ast.unparse(function).rpartition(".")[2]


def contains(outer: ast.AST, node: ast.AST) -> bool:
    """Returns True if a node is a part of the outer one, or that itself."""
    return any(one is node for one in ast.walk(outer))


def value_of(name: str, statements: Iterable[ast.stmt]) -> ast.expr | None:
    """Returns the expression that the name was given last, or None."""
    found = [
        one.value
        for one in statements
        if isinstance(one, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in one.targets)
    ]
    return found[-1] if found else None
