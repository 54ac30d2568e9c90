"""What a script trains, found in its text: the statements up to the training, and what a step of it is. Pure."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

from amptune.errors import TargetError
from amptune.workload.program_slice import names_bound, names_loaded, root_of, statements_for
from amptune.workload.script import Script, is_guard

__all__ = ["LoopStep", "TrainingCode", "training_code"]

_LOOPS = ast.For | ast.While
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
# What a loader is wrapped in, and what a model is: a step is measured without.
_SHOWING = {"cycle", "enumerate", "iter", "tqdm", "track", "trange"}
_WRAPPING = {"DDP", "DataParallel", "DistributedDataParallel", "compile", "prepare", "setup", "setup_dataloaders"}
# Blocks that decide the precision, or how gradients are sent: the policy does.
_CONTEXTS = ("accumulate", "amp_ctx", "autocast", "no_sync", "nullcontext", "record_function")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopStep:
    """A step of a loop: `batches` draws a batch where the loop has no loader, `body` leads from `target` to `loss`."""

    model: str
    optimizer: str
    loader: str | None
    batches: list[ast.stmt]
    target: str
    body: list[ast.stmt]
    loss: ast.expr


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCode:
    """What a script trains: `constructor` of a Workload, and its `arguments` as text.

    `before` are the statements in functions and under the `__main__` guard that are executed up to the training;
    `module` are those of the module itself.
    """

    constructor: str
    arguments: list[str]
    module: list[ast.stmt]
    before: list[ast.stmt]
    step: LoopStep | None = None


def training_code(script: Script, name: str) -> TrainingCode:
    """Finds a Trainer's `train()` or `fit()`, else the first loop with a backward pass. Raises `TargetError`."""
    calls = sorted((node for node in ast.walk(script.tree) if isinstance(node, ast.Call)), key=lambda one: one.lineno)
    own = {node.name for node in script.tree.body if isinstance(node, ast.ClassDef) and not _extends_trainer(node)}
    for call in calls:
        if script.is_trainer_call(call) and _class_of_trainer(script, call) not in own:
            return _of_trainer(script, call)
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            return _of_loop(script, call, name)
    raise TargetError(
        f"{name} shows no training that amptune recognises: a Trainer's train() or fit(), or a loop with backward() and "
        "an optimizer's step(). `amptune init` without --from writes a starter to fill in"
    )


def _of_trainer(script: Script, call: ast.Call) -> TrainingCode:
    way = _way_to(script, call, "")
    assert isinstance(call.func, ast.Attribute)
    trainer = call.func.value
    if call.func.attr == "train":
        return TrainingCode(
            constructor="from_trainer", arguments=[ast.unparse(trainer)], module=way.module, before=way.outside
        )
    keywords = {one.arg: one.value for one in call.keywords if one.arg}
    given = [*call.args, *(keywords[name] for name in ("train_dataloaders", "datamodule") if name in keywords)]
    given = ([keywords["model"]] if "model" in keywords else []) + given
    built = _constructor_of(script, trainer)
    arguments = [ast.unparse(one) for one in given[:2]]
    for option, ours in (("accumulate_grad_batches", "accumulate"), ("gradient_clip_val", "clip")):
        value = next((one.value for one in built.keywords if one.arg == option), None) if built else None
        if value is not None and not (isinstance(value, ast.Constant) and value.value in (None, 0, 1) and ours != "clip"):
            arguments.append(f"{ours}={ast.unparse(value)}")
    return TrainingCode(constructor="from_lightning", arguments=arguments, module=way.module, before=way.outside)


def _of_loop(script: Script, backward: ast.Call, name: str) -> TrainingCode:
    way = _way_to(script, backward, name)
    if way.loop is None:
        raise TargetError(f"{name}:{backward.lineno}: backward() stands in no loop that amptune recognises")
    inside = [one for statement in way.inside for one in _without_contexts(statement)]
    reached = [way.loop, *(script.functions[one] for one in names_loaded(way.loop) if one in script.functions)]
    optimizer = _optimizer_in(reached, name, way.loop)
    before = [_unwrapped(one) for one in way.outside]
    module = [_unwrapped(one) for one in way.module]
    known = [*module, *before]
    accumulate, clip = _accumulation_in(script, reached, optimizer), _clip_in(reached)
    loss = _loss_of(backward, accumulate)
    body = statements_for(names_loaded(loss), inside)
    body = [one for one in body if not isinstance(one, ast.Expr) or names_bound(*inside) & names_loaded(one)]
    body = [one for one in body if not _is_division(one, accumulate)]
    model = _model_in(script, [*body, ast.Expr(loss)], known, optimizer, name, way.loop)
    loader, target = _loader_of(way.loop, known)
    batches: list[ast.stmt] = []
    if loader is None:
        batches, body = _drawn(body, model)
        loader, target = _drawn_from(batches, known) or (None, _common(batches, [*body, ast.Expr(loss)]))
        batches = [] if loader else batches
        if not target:
            raise TargetError(f"{name}:{way.loop.lineno}: amptune does not see where this loop gets its batches from")
    body = [one for one in map(_moved_nowhere, body) if not _is_identity(one)]
    step = LoopStep(
        model=model, optimizer=optimizer, loader=loader, batches=batches, target=target, body=body,
        loss=_ToDevice().visit(copy.deepcopy(loss)),
    )  # fmt: skip
    arguments = [model, loader or "Batches()", "training_loss", optimizer]
    arguments += [f"accumulate={accumulate}"] if accumulate else []
    arguments += [f"clip={clip}"] if clip else []
    return TrainingCode(
        constructor="from_loop", arguments=arguments, module=module, before=before, step=step
    )


# The way to the training: what is executed before it.


@dataclass(slots=True)
class _Way:
    module: list[ast.stmt] = field(default_factory=list)
    outside: list[ast.stmt] = field(default_factory=list)
    loop: ast.For | ast.While | None = None
    inside: list[ast.stmt] = field(default_factory=list)

    def enter(self, loop: ast.For | ast.While) -> None:
        """A loop in a loop: the outer one's first turn leads to it."""
        if self.loop is not None:
            if isinstance(self.loop, ast.For):
                first = f"{ast.unparse(self.loop.target)} = next(iter({ast.unparse(self.loop.iter)}))"
                self.outside += ast.parse(first).body
            self.outside += self.inside
        self.loop, self.inside = loop, []

    def pass_by(self, statement: ast.stmt) -> None:
        (self.outside if self.loop is None else self.inside).append(statement)


def _way_to(script: Script, node: ast.AST, name: str) -> _Way:
    """Follows calls of the script's functions from the module to a node."""
    way, frames = _Way(), [(_owner_of(script, node, name), node)]
    while (owner := frames[0][0]) is not None and len(frames) < 20:
        call = _call_of(script, owner)
        frames.insert(0, (_owner_of(script, call, name) if call else None, call or owner))
    for index, (owner, inner) in enumerate(frames):
        if owner is None:
            _through_module(script, inner, way)
        else:
            call = frames[index - 1][1] if index else None
            _bind(owner, call if isinstance(call, ast.Call) else None, way)
            _through(owner.body, inner, way)
    return way


def _owner_of(script: Script, node: ast.AST, name: str) -> ast.FunctionDef | None:
    """Returns the innermost function around a node. Raises `TargetError` for a method."""
    owner: ast.FunctionDef | None = None
    inner: ast.AST = script.tree
    while (child := next((one for one in ast.iter_child_nodes(inner) if _contains(one, node)), None)) is not None:
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


def _through_module(script: Script, node: ast.AST, way: _Way) -> None:
    """Passes the module's statements, of those behind the training only definitions."""
    reached = False
    for statement in script.tree.body:
        if statement is node or _contains(statement, node):
            reached = True
            if isinstance(statement, _FUNCTIONS):  # a function that nothing calls
                reached = False
                way.module.append(statement)
            elif is_guard(statement):
                assert isinstance(statement, ast.If)
                _through(statement.body, node, way)
            else:
                _through_block(statement, node, way)
        elif not is_guard(statement) and script.training_in(statement) is None:
            if not reached or isinstance(statement, _FUNCTIONS | ast.ClassDef | ast.Import | ast.ImportFrom):
                way.module.append(statement)


def _through(body: list[ast.stmt], node: ast.AST, way: _Way) -> None:
    for statement in body:
        if not _contains(statement, node):
            way.pass_by(statement)
        else:
            _through_block(statement, node, way)
            return


def _through_block(statement: ast.stmt, node: ast.AST, way: _Way) -> None:
    if isinstance(statement, _LOOPS):
        way.enter(statement)
    for part in ("body", "orelse", "finalbody"):
        block = getattr(statement, part, [])
        if any(_contains(one, node) for one in block):
            _through(block, node, way)


def _bind(function: ast.FunctionDef, call: ast.Call | None, way: _Way) -> None:
    """Gives the function's parameters the values of the call, else their defaults."""
    parameters = [*function.args.posonlyargs, *function.args.args]
    values: dict[str, ast.expr] = {}
    defaults = function.args.defaults
    values |= {one.arg: value for one, value in zip(parameters[len(parameters) - len(defaults) :], defaults, strict=True)}
    values |= {
        one.arg: value for one, value in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True) if value
    }
    if call is not None:
        values |= {one.arg: value for one, value in zip(parameters, call.args, strict=False)}
        values |= {one.arg: one.value for one in call.keywords if one.arg}
    for parameter in [*parameters, *function.args.kwonlyargs]:
        value = values.get(parameter.arg)
        if value is None:
            continue
        if ast.unparse(value) != parameter.arg:
            way.pass_by(ast.parse(f"{parameter.arg} = {ast.unparse(value)}").body[0])


# A step of a loop.


def _optimizer_in(nodes: list[ast.AST], name: str, loop: ast.stmt) -> str:
    found: dict[str, None] = {}
    for node in nodes:
        for call in ast.walk(node):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "step":
                continue
            holder = call.args[0] if call.args and "scaler" in ast.unparse(call.func.value) else call.func.value
            text = ast.unparse(holder)
            if not any(word in text.lower() for word in ("sched", "scaler", "prof", "warmup", "ema")):
                found[text] = None
        if found:
            break
    if len(found) == 1 and (only := next(iter(found))).isidentifier():
        return only
    what = "no optimizer's step()" if not found else f"steps of {', '.join(found)}"
    raise TargetError(
        f"{name}:{loop.lineno}: this loop has {what}; amptune writes a workload for one optimizer with a name. "
        "`amptune init` without --from writes a starter; several optimizers need its step="
    )


def _model_in(
    script: Script, step: list[ast.stmt], known: list[ast.stmt], optimizer: str, name: str, loop: ast.stmt
) -> str:
    """Returns the name of the model whose parameters the optimizer has, as the step calls it."""
    read = names_loaded(*step)
    roots = dict.fromkeys(_parameters_of(statements_for({optimizer}, known)))
    aliases = {
        target.id: one.value.id
        for one in known
        if isinstance(one, ast.Assign) and isinstance(one.value, ast.Name)
        for target in one.targets
        if isinstance(target, ast.Name)
    }
    trained = {
        root_of(node.func) for node in ast.walk(script.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "train"
    }  # fmt: skip
    for candidates in (
        [one for one in roots if one in read],
        [one for one, other in aliases.items() if other in roots and one in read],
        [one for one in sorted(read) if one in trained],
        [one for one in sorted(read) if "model" in one or one.endswith("net")],
    ):
        if candidates:
            return candidates[0]
    raise TargetError(f"{name}:{loop.lineno}: amptune does not see which model this loop trains")


def _parameters_of(statements: list[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                root = root_of(node.func.value)
                if node.func.attr in ("parameters", "named_parameters") and root:
                    yield root


def _loader_of(loop: ast.For | ast.While, known: list[ast.stmt]) -> tuple[str | None, str]:
    """Returns what the loop iterates over and the text of a batch, or None if that is no loader."""
    if isinstance(loop, ast.While):
        return None, ""
    source, target = loop.iter, loop.target
    for _ in range(5):
        if isinstance(source, ast.Name):
            made = _value_of(source.id, known)
            if not isinstance(made, ast.Call) or _last(made.func) not in _SHOWING or not made.args:
                break
            source = made
        if isinstance(source, ast.Call) and _last(source.func) in _SHOWING and source.args:
            if _last(source.func) == "enumerate" and isinstance(target, ast.Tuple) and len(target.elts) == 2:
                target = target.elts[1]
            source = source.args[0]
    if isinstance(source, ast.Call) and _last(source.func) in ("range", "count", "trange"):
        return None, ""
    return ast.unparse(source), _names_of(target)


def _drawn(body: list[ast.stmt], model: str) -> tuple[list[ast.stmt], list[ast.stmt]]:
    """Parts a step into statements that draw its batch and those from the first that needs the model."""
    first = next((index for index, one in enumerate(body) if model in names_loaded(one)), len(body))
    return body[:first], body[first:]


def _drawn_from(batches: list[ast.stmt], known: list[ast.stmt]) -> tuple[str, str] | None:
    """Returns (loader, batch) of `batch = next(iterator)`, where the iterator is made of a loader."""
    if len(batches) != 1 or not isinstance(batches[0], ast.Assign):
        return None
    call = batches[0].value
    if not isinstance(call, ast.Call) or _last(call.func) != "next" or not isinstance(call.args[0], ast.Name):
        return None
    made = _value_of(call.args[0].id, known)
    if not isinstance(made, ast.Call) or _last(made.func) not in _SHOWING or not made.args:
        return None
    while isinstance(made, ast.Call) and _last(made.func) in _SHOWING and made.args:
        made = made.args[0]
    return ast.unparse(made), _names_of(batches[0].targets[0])


def _common(batches: list[ast.stmt], step: list[ast.stmt]) -> str:
    return ", ".join(sorted(names_bound(*batches) & names_loaded(*step)))


def _loss_of(backward: ast.Call, accumulate: str | None) -> ast.expr:
    assert isinstance(backward.func, ast.Attribute)
    loss = backward.args[0] if backward.args else backward.func.value
    if isinstance(loss, ast.Call) and _last(loss.func) == "scale" and loss.args:
        loss = loss.args[0]
    return loss.left if isinstance(loss, ast.BinOp) and _divides(loss, accumulate) else loss


def _divides(value: ast.BinOp | ast.AugAssign, accumulate: str | None) -> bool:
    """Returns True for a division by the number of accumulated batches, which amptune does by itself."""
    by = ast.unparse(value.right if isinstance(value, ast.BinOp) else value.value)
    return isinstance(value.op, ast.Div) and (by == accumulate or "accum" in by.lower())


def _is_division(statement: ast.stmt, accumulate: str | None) -> bool:
    if isinstance(statement, ast.AugAssign):
        return _divides(statement, accumulate)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.BinOp):
        return False
    same = ast.unparse(statement.targets[0]) == ast.unparse(statement.value.left)
    return same and _divides(statement.value, accumulate)


def _accumulation_in(script: Script, nodes: list[ast.AST], optimizer: str) -> str | None:
    for node in nodes:
        for test in ast.walk(node):
            if not isinstance(test, ast.If) or f"{optimizer}" not in names_loaded(*test.body):
                continue
            counts = [one.right for one in ast.walk(test.test) if isinstance(one, ast.BinOp) and isinstance(one.op, ast.Mod)]
            if counts and any(_last(one.func) == "step" for one in ast.walk(test) if isinstance(one, ast.Call)):
                return ast.unparse(counts[0])
    for call in ast.walk(script.tree):
        if isinstance(call, ast.Call) and _last(call.func) == "Accelerator":
            steps = [one.value for one in call.keywords if one.arg == "gradient_accumulation_steps"]
            return ast.unparse(steps[0]) if steps else None
    return None


def _clip_in(nodes: list[ast.AST]) -> str | None:
    for node in nodes:
        for call in ast.walk(node):
            if isinstance(call, ast.Call) and _last(call.func) == "clip_grad_norm_":
                limits = [one.value for one in call.keywords if one.arg == "max_norm"] + call.args[1:]
                return ast.unparse(limits[0]) if limits else None
    return None


# Expressions.


class _ToDevice(ast.NodeTransformer):
    """Leaves out `.to(device)` and `.cuda()`: amptune moves model and batches."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute):
            where = ast.unparse(node.args[0]) if node.args else ""
            if node.func.attr == "cuda" or (node.func.attr == "to" and ("device" in where or "cuda" in where)):
                return node.func.value
        return node


def _moved_nowhere(statement: ast.stmt) -> ast.stmt:
    """Returns the statement itself if it moves nothing to a device."""
    changed = _ToDevice().visit(copy.deepcopy(statement))
    if ast.dump(changed) == ast.dump(statement):
        return statement
    return ast.parse(ast.unparse(changed)).body[0]


def _unwrapped(statement: ast.stmt) -> ast.stmt:
    """Returns an assignment of a wrapped model without the wrapper, others as they are."""
    if not isinstance(statement, ast.Assign) or not isinstance(statement.value, ast.Call):
        return statement
    call = statement.value
    if _last(call.func) not in _WRAPPING or not call.args or not all(isinstance(one, ast.Name) for one in call.args):
        return statement
    targets = statement.targets[0].elts if isinstance(statement.targets[0], ast.Tuple) else statement.targets
    pairs = zip(map(ast.unparse, targets), map(ast.unparse, call.args), strict=False)
    different = [f"{target} = {value}" for target, value in pairs if target != value]
    return ast.parse("\n".join(different) or "pass").body[0]


def _without_contexts(statement: ast.stmt) -> Iterator[ast.stmt]:
    if isinstance(statement, ast.With) and any(
        word in ast.unparse(one.context_expr).lower() for one in statement.items for word in _CONTEXTS
    ):
        for inner in statement.body:
            yield from _without_contexts(inner)
    else:
        yield statement


def _is_identity(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
        return False
    return ast.unparse(statement.targets[0]) == ast.unparse(statement.value)


def _value_of(name: str, statements: list[ast.stmt]) -> ast.expr | None:
    for one in reversed(statements):
        if isinstance(one, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in one.targets):
            return one.value
    return None


def _names_of(target: ast.expr) -> str:
    return ast.unparse(target).strip("()")


def _last(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def _contains(outer: ast.AST, node: ast.AST) -> bool:
    return any(one is node for one in ast.walk(outer))


def _extends_trainer(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("Trainer") for base in node.bases)


def _constructor_of(script: Script, trainer: ast.expr) -> ast.Call | None:
    if isinstance(trainer, ast.Call):
        return trainer
    made = [
        node.value for node in ast.walk(script.tree)
        if isinstance(node, ast.Assign) and ast.unparse(trainer) in map(ast.unparse, node.targets)
        and isinstance(node.value, ast.Call)
    ]  # fmt: skip
    return made[-1] if made else None


def _class_of_trainer(script: Script, call: ast.Call) -> str | None:
    assert isinstance(call.func, ast.Attribute)
    built = _constructor_of(script, call.func.value)
    return ast.unparse(built.func) if built else None
