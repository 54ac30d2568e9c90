"""A step of a script's training loop: its model, optimizer, batches and loss, found in the loop's text. Pure."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from amptune.errors import TargetError
from amptune.workload.program_slice import last_of, names_bound, names_loaded, root_of, statements_for, value_of
from amptune.workload.script import Script
from amptune.workload.way_to_training import Way
from amptune.workload.without import without_contexts, without_device, without_device_in

__all__ = ["LoopStep", "step_of"]

# What a loader is wrapped in.
_SHOWING = {"cycle", "enumerate", "iter", "tqdm", "track", "trange"}
# What has a step() beside the optimizer.
_NO_OPTIMIZERS = ("sched", "scaler", "prof", "warmup", "ema")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStep:
    """A step of a loop: `batches` draws a batch where there is no `loader`; `body` leads from `target` to `loss`.

    `accumulate` and `clip` are texts of expressions, as `loader` and `target` are.
    """

    model: str
    optimizer: str
    loader: str | None
    batches: list[ast.stmt]
    target: str
    body: list[ast.stmt]
    loss: ast.expr
    accumulate: str | None
    clip: str | None


def step_of(script: Script, backward: ast.Call, way: Way, known: list[ast.stmt], name: str) -> LoopStep:
    """Returns the step of the loop around a backward pass; `known` is executed before. Raises `TargetError`."""
    loop = way.loop
    if loop is None:
        raise TargetError(f"{name}:{backward.lineno}: backward() stands in no loop that amptune recognises")
    parts = _micro_batches(way)  # a loop over the parts of a step stands within the loop over steps
    steps = way.around if parts and way.around is not None else loop
    reached = [steps, *(script.functions[one] for one in names_loaded(steps) if one in script.functions)]
    optimizer = _optimizer_in(reached, f"{name}:{steps.lineno}")
    accumulate = parts or _accumulation_in(script, reached, optimizer)
    loss = _loss_of(backward, accumulate)
    body = _body_of(loss, [one for statement in way.inside for one in without_contexts(statement, known)])
    body = [kept for one in body if (kept := _undivided(one, loss, accumulate)) is not None]
    model = _model_in(script, [*body, ast.Expr(loss)], known, optimizer)
    loader, target = _loader_of(loop, known)
    batches: list[ast.stmt] = []
    if loader is None:
        batches, body = _drawn(body, model)
        bound = sorted(names_bound(*batches) & names_loaded(*body, loss))
        loader, target = _drawn_from(batches, known) or (None, ", ".join(bound))
    if not model or not target:
        missing = "which model this loop trains" if not model else "where this loop gets its batches from"
        raise TargetError(
            f"{name}:{loop.lineno}: amptune does not see {missing}. `amptune init` without --from writes a starter"
        )
    return LoopStep(
        model=model,
        optimizer=optimizer,
        loader=loader,
        batches=batches,
        target=target,
        body=[one for one in map(without_device, body) if not _is_identity(one)],
        loss=without_device_in(loss),
        accumulate=accumulate,
        clip=_clip_in(reached),
    )


def _body_of(loss: ast.expr, inside: list[ast.stmt]) -> list[ast.stmt]:
    """Returns the statements that lead to the loss; calls without a value only if they change what is made there."""
    made = names_bound(*inside)
    return [
        one
        for one in statements_for(names_loaded(loss), inside)
        if not isinstance(one, ast.Expr) or made & names_loaded(one)
    ]


def _micro_batches(way: Way) -> str | None:
    """Returns how many turns a loop without an optimizer's step takes within another loop, or None."""
    loop = way.loop
    if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Call) or way.around is None:
        return None
    steps = any(isinstance(one, ast.Call) and last_of(one.func) == "step" for one in ast.walk(loop))
    return ast.unparse(loop.iter.args[-1]) if last_of(loop.iter.func) == "range" and not steps else None


def _optimizer_in(nodes: Sequence[ast.AST], place: str) -> str:
    """Returns the name of the one optimizer that steps in the first of the nodes where one does."""
    found: list[str] = []
    for node in nodes:
        calls = [one for one in ast.walk(node) if isinstance(one, ast.Call) and last_of(one.func) == "step"]
        found = found or list(dict.fromkeys(name for name in map(_stepped, calls) if name))
    if len(found) == 1 and found[0].isidentifier():
        return found[0]
    what = f"steps of {', '.join(found)}" if found else "no optimizer's step()"
    raise TargetError(
        f"{place}: this loop has {what}; amptune writes a workload for one optimizer with a name. `amptune init` "
        "without --from writes a starter; several optimizers need its step="
    )


def _stepped(call: ast.Call) -> str | None:
    """Returns what `optimizer.step()` or `scaler.step(optimizer)` steps, unless that is no optimizer."""
    if not isinstance(call.func, ast.Attribute):
        return None
    by_scaler = call.args and "scaler" in ast.unparse(call.func.value).lower()
    text = ast.unparse(call.args[0] if by_scaler else call.func.value)
    return None if any(word in text.lower() for word in _NO_OPTIMIZERS) else text


def _model_in(script: Script, step: list[ast.stmt], known: list[ast.stmt], optimizer: str) -> str:
    """Returns the name of the model whose parameters the optimizer has, as the step calls it, or ""."""
    read = sorted(names_loaded(*step))
    roots = list(dict.fromkeys(_parameters_of(statements_for({optimizer}, known))))
    aliases = {one: made.id for one in read if isinstance(made := value_of(one, known), ast.Name)}
    calls = [one for one in ast.walk(script.tree) if isinstance(one, ast.Call)]
    trained = {root_of(one.func) for one in calls if isinstance(one.func, ast.Attribute) and one.func.attr == "train"}
    found = [
        *(one for one in roots if one in read),
        *(one for one in read if aliases.get(one) in roots),
        *(one for one in read if one in trained),
        *(one for one in read if "model" in one or one.endswith("net")),
    ]
    return found[0] if found else ""


def _parameters_of(statements: list[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                root = root_of(node.func.value)
                if node.func.attr in ("parameters", "named_parameters") and root:
                    yield root


def _loader_of(loop: ast.For | ast.While, known: list[ast.stmt]) -> tuple[str | None, str]:
    """Returns what the loop iterates over and the text of a batch, or (None, "") if that is no loader."""
    if isinstance(loop, ast.While):
        return None, ""
    target, source = loop.target, loop.iter
    counted = "enumerate(" in ast.unparse(source)
    while True:
        source = _shown(source)
        made = value_of(source.id, known) if isinstance(source, ast.Name) else None
        if made is None or _shown(made) is made:
            break
        counted, source = counted or "enumerate(" in ast.unparse(made), made
    if isinstance(source, ast.Call) and last_of(source.func) in ("range", "count", "trange"):
        return None, ""
    if counted and isinstance(target, ast.Tuple) and len(target.elts) == 2:
        target = target.elts[1]
    return ast.unparse(source), _names_of(target)


def _drawn(body: list[ast.stmt], model: str) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Parts a step into statements that draw its batch and those that need the model's output."""
    drawn, rest, outputs = [], [], {model}
    for statement in body:
        if names_loaded(statement) & outputs:
            rest.append(statement)
            outputs |= names_bound(statement)
        else:
            drawn.append(statement)
    return drawn, rest


def _drawn_from(batches: list[ast.stmt], known: list[ast.stmt]) -> tuple[str, str] | None:
    """Returns (loader, batch) of `batch = next(iterator)`, where the iterator is made of a loader."""
    draw = batches[0] if len(batches) == 1 else None
    if not isinstance(draw, ast.Assign) or not isinstance(draw.value, ast.Call) or last_of(draw.value.func) != "next":
        return None
    made = value_of(ast.unparse(draw.value.args[0]), known)
    if made is None or (source := _shown(made)) is made:
        return None
    return ast.unparse(source), _names_of(draw.targets[0])


def _shown(source: ast.expr) -> ast.expr:
    """Returns what an iterator or a progress bar is made of."""
    while isinstance(source, ast.Call) and last_of(source.func) in _SHOWING and source.args:
        source = source.args[0]
    return source


def _loss_of(backward: ast.Call, accumulate: str | None) -> ast.expr:
    loss = backward.args[0] if backward.args or not isinstance(backward.func, ast.Attribute) else backward.func.value
    if isinstance(loss, ast.Call) and last_of(loss.func) == "scale" and loss.args:
        loss = loss.args[0]
    return loss.left if isinstance(loss, ast.BinOp) and _divides(loss, accumulate) else loss


def _divides(value: ast.BinOp | ast.AugAssign, accumulate: str | None) -> bool:
    """Returns True for a division by the number of accumulated batches, which amptune does by itself."""
    by = ast.unparse(value.right if isinstance(value, ast.BinOp) else value.value)
    return isinstance(value.op, ast.Div) and (by == accumulate or "accum" in by.lower())


def _undivided(statement: ast.stmt, loss: ast.expr, accumulate: str | None) -> ast.stmt | None:
    """Returns a statement without the division by the number of accumulated batches, or None if it is that alone."""
    if isinstance(statement, ast.AugAssign):
        return None if _divides(statement, accumulate) else statement
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.BinOp):
        return statement
    target, divided = ast.unparse(statement.targets[0]), ast.unparse(statement.value.left)
    if target not in (divided, ast.unparse(loss)) or not _divides(statement.value, accumulate):
        return statement
    changed = copy.copy(statement)
    changed.value = statement.value.left
    return None if target == divided else changed


def _accumulation_in(script: Script, nodes: Sequence[ast.AST], optimizer: str) -> str | None:
    for node in nodes:
        for test in ast.walk(node):
            if not isinstance(test, ast.If) or optimizer not in names_loaded(*test.body):
                continue
            counts = [
                one.right for one in ast.walk(test.test) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod)
            ]
            if counts and any(last_of(one.func) == "step" for one in ast.walk(test) if isinstance(one, ast.Call)):
                return ast.unparse(counts[0])
    for call in ast.walk(script.tree):
        if isinstance(call, ast.Call) and last_of(call.func) == "Accelerator":
            steps = [one.value for one in call.keywords if one.arg == "gradient_accumulation_steps"]
            return ast.unparse(steps[0]) if steps else None
    return None


def _clip_in(nodes: Sequence[ast.AST]) -> str | None:
    for node in nodes:
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and last_of(call.func) == "clip_grad_norm_":
                limits = [one.value for one in call.keywords if one.arg == "max_norm"] + call.args[1:]
                return ast.unparse(limits[0]) if limits else None
    return None


def _is_identity(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    return ast.unparse(statement.targets[0]) == ast.unparse(statement.value)


def _names_of(target: ast.expr) -> str:
    return ast.unparse(target).strip("()")
