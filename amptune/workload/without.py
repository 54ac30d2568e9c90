"""Statements of a training loop without what a policy, or amptune, does by itself. Pure."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from typing import TypeVar, cast

from amptune.workload.program_slice import last_of, value_of

__all__ = ["without_contexts", "without_device", "without_device_in", "without_wrappers"]

N = TypeVar("N", bound=ast.AST)

# What a model is wrapped in: a step is measured without.
_WRAPPING = {"DDP", "DataParallel", "DistributedDataParallel", "compile", "prepare", "setup", "setup_dataloaders"}
# Blocks that decide the precision, or how gradients are sent: the policy does.
_CONTEXTS = ("accumulate", "autocast", "no_sync", "nullcontext", "record_function")


class _ToDevice(ast.NodeTransformer):
    """Leaves out `.to(device)` and `.cuda()`: amptune moves model and batches."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute):
            where = ast.unparse(node.args[0]) if node.args else ""
            if node.func.attr == "cuda" or (node.func.attr == "to" and ("device" in where or "cuda" in where)):
                return node.func.value
        return node


def without_device_in(node: N) -> N:
    """Returns a copy of the node that moves nothing to a device."""
    return cast("N", _ToDevice().visit(copy.deepcopy(node)))


def without_device(statement: ast.stmt) -> ast.stmt:
    """Returns the statement without moves to a device, the same object if it moves nothing."""
    changed = without_device_in(statement)
    if ast.dump(changed) == ast.dump(statement):
        return statement
    return ast.parse(ast.unparse(changed)).body[0]


def without_wrappers(statement: ast.stmt) -> ast.stmt:
    """Returns an assignment of a wrapped model without the wrapper, others as they are."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return statement
    call = statement.value
    if last_of(call.func) not in _WRAPPING or not call.args or not all(isinstance(one, ast.Name) for one in call.args):
        return statement
    targets = statement.targets[0].elts if isinstance(statement.targets[0], ast.Tuple) else statement.targets
    pairs = zip(map(ast.unparse, targets), map(ast.unparse, call.args), strict=False)
    different = [f"{target} = {value}" for target, value in pairs if target != value]
    return ast.parse("\n".join(different) or "pass").body[0]


def without_contexts(statement: ast.stmt, known: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yields the statements of a block that decides the precision or how gradients are sent; others as they are."""
    if isinstance(statement, ast.With) and any(_is_context(one.context_expr, known) for one in statement.items):
        for inner in statement.body:
            yield from without_contexts(inner, known)
    else:
        yield statement


def _is_context(expression: ast.expr, known: list[ast.stmt]) -> bool:
    made = value_of(expression.id, known) if isinstance(expression, ast.Name) else None
    return any(word in ast.unparse(made or expression).lower() for word in _CONTEXTS)
