"""Finds a training in the text of a script: the statements that lead to it, and its step. Pure."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from amptune.errors import TargetError
from amptune.workload.loop_step import LoopStep, step_of
from amptune.workload.script import Script
from amptune.workload.way_to_training import way_to
from amptune.workload.without import without_wrappers

__all__ = ["TrainingCode", "training_of", "without_policy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCode:
    """The training of a script, as a `constructor` of a Workload with its `arguments` as text.

    `before` are the statements in functions and under the `__main__` guard that are executed up to the training;
    `module` are those of the module itself.
    """

    constructor: str
    arguments: list[str]
    module: list[ast.stmt]
    before: list[ast.stmt]
    step: LoopStep | None = None


def without_policy(tree: ast.Module) -> ast.Module:
    """Returns a script as it was before it applied a policy by `amptune.apply`."""
    return ast.fix_missing_locations(_WithoutPolicy(tree).visit(tree))  # type: ignore[no-any-return]


class _WithoutPolicy(ast.NodeTransformer):
    """Puts the model back in the place of `tuned.model`, a batch in that of `tuned.batch(x)`, and so on."""

    def __init__(self, tree: ast.Module) -> None:
        self._models: dict[str, ast.expr] = {}  # by the name of what `apply` returned, also in functions that get it
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign):
                self._applied(node.value, node.targets[0])

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        """Leaves out `tuned = amptune.apply(policy, model)` and `optimizer = tuned.optimizer(optimizer)`."""
        if self._applied(node.value, node.targets[0]):
            return None
        before = ast.dump(node.value)
        self.generic_visit(node)
        changed = ast.dump(node.value) != before
        return None if changed and ast.unparse(node.targets[0]) == ast.unparse(node.value) else node

    def visit_With(self, node: ast.With) -> ast.AST | list[ast.stmt]:
        """Leaves what is under `with amptune.apply(policy, model) as tuned`."""
        applied = [self._applied(item.context_expr, item.optional_vars) for item in node.items]
        self.generic_visit(node)
        return node.body if all(applied) else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        """Leaves clipping and the optimizer's step of `tuned.step(optimizer, clip=1.0)`."""
        call = node.value
        self.generic_visit(node)
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or not call.args:
            return node
        if call.func.attr != "step" or not self._is_tuned(call.func):
            return node
        limits = [ast.unparse(one.value) for one in call.keywords if one.arg == "clip"]
        lines = [f"clip_grad_norm_(_, {limit})" for limit in limits if limit != "None"]
        plain = ast.parse("\n".join([*lines, f"{ast.unparse(call.args[0])}.step()"]))
        return [ast.copy_location(one, node) for one in plain.body]

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Leaves the argument of `tuned.batch(x)` and `tuned.optimizer(o)`."""
        self.generic_visit(node)
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in ("batch", "optimizer") and self._is_tuned(function):
            return node.args[0] if node.args else node
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Leaves the model of `tuned.model`."""
        self.generic_visit(node)
        return self._models[ast.unparse(node.value)] if node.attr == "model" and self._is_tuned(node) else node

    def _applied(self, value: ast.expr, target: ast.expr | None) -> bool:
        if target is None or not isinstance(value, ast.Call) or ast.unparse(value.func) != "amptune.apply":
            return False
        given = [*value.args[1:2], *(one.value for one in value.keywords if one.arg == "model")]
        self._models |= {ast.unparse(target): model for model in given}
        return bool(given)

    def _is_tuned(self, node: ast.Attribute) -> bool:
        return ast.unparse(node.value) in self._models


def training_of(script: Script, name: str) -> TrainingCode:
    """Finds a Trainer's `train()` or `fit()`, else the first loop with a backward pass. Raises `TargetError`."""
    nodes = [node for node in ast.walk(script.tree) if isinstance(node, ast.Call)]
    calls = [(node, node.func) for node in nodes if isinstance(node.func, ast.Attribute)]
    calls.sort(key=lambda one: one[0].lineno)
    own = {node.name for node in script.tree.body if isinstance(node, ast.ClassDef) and not _extends_trainer(node)}
    for call, method in calls:
        if script.is_trainer_call(call):
            built = _built(script, method.value)
            if built is None or ast.unparse(built.func) not in own:
                return _of_trainer(script, call, method, built, name)
    for call, method in calls:
        if method.attr == "backward":
            return _of_loop(script, call, name)
    raise TargetError(
        f"{name} shows no training that amptune recognises: a Trainer's train() or fit(), or a loop with backward() "
        "and an optimizer's step(). `amptune init` without --from writes a starter to fill in"
    )


def _of_trainer(
    script: Script, call: ast.Call, method: ast.Attribute, built: ast.Call | None, name: str
) -> TrainingCode:
    way = way_to(script, call, name)
    arguments = [ast.unparse(method.value)] if method.attr == "train" else _of_lightning(call, built)
    constructor = "from_trainer" if method.attr == "train" else "from_lightning"
    arguments.append(f'name="{Path(name).stem}"')
    return TrainingCode(constructor=constructor, arguments=arguments, module=way.module, before=way.all())


def _of_lightning(call: ast.Call, built: ast.Call | None) -> list[str]:
    """Returns the arguments of `from_lightning`: module, loader or datamodule, and what the Trainer was given."""
    given = {one.arg: one.value for one in call.keywords}
    named = [given[name] for name in ("model", "train_dataloaders", "datamodule") if name in given]
    arguments = [ast.unparse(one) for one in [*call.args[:2], *named]]
    options = {one.arg: ast.unparse(one.value) for one in built.keywords} if built else {}
    for theirs, ours in (("accumulate_grad_batches", "accumulate"), ("gradient_clip_val", "clip")):
        if options.get(theirs, "None") not in ("None", "1" if ours == "accumulate" else "0"):
            arguments.append(f"{ours}={options[theirs]}")
    return arguments


def _of_loop(script: Script, backward: ast.Call, name: str) -> TrainingCode:
    way = way_to(script, backward, name)
    module, before = list(map(without_wrappers, way.module)), list(map(without_wrappers, way.outside))
    step = step_of(script, backward, way, [*module, *before], name)
    arguments = [step.model, step.loader or "Batches()", "training_loss", step.optimizer]
    arguments += [f"accumulate={step.accumulate}"] if step.accumulate else []
    arguments += [f"clip={step.clip}"] if step.clip else []
    arguments.append(f'name="{Path(name).stem}"')
    return TrainingCode(constructor="from_loop", arguments=arguments, module=module, before=before, step=step)


def _built(script: Script, trainer: ast.expr) -> ast.Call | None:
    """Returns the call that makes a Trainer."""
    if isinstance(trainer, ast.Call):
        return trainer
    made = [node for node in ast.walk(script.tree) if isinstance(node, ast.Assign)]
    named = [one.value for one in made if ast.unparse(trainer) in map(ast.unparse, one.targets)]
    calls = [one for one in named if isinstance(one, ast.Call)]
    return calls[-1] if calls else None


def _extends_trainer(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).endswith("Trainer") for base in node.bases)
