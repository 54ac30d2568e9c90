"""The modules that a policy names, and how each one is to be changed. Changes nothing."""

from __future__ import annotations

import difflib
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from amptune.errors import PolicyApplyError
from amptune.policy.patterns import matcher_of
from amptune.policy.settings import Fp32Rule, ModuleRule, Policy
from amptune.runtime.float8 import no_float8_because

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from amptune.runtime.class_swap import Change, Precision

__all__ = ["Selected", "changes_of", "has_forward", "precisions_of", "select"]

# The names that torch.compile, and DistributedDataParallel or DataParallel, put before every path.
_WRAPPER_NAMES = ("_orig_mod", "module")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A module that is to be changed, with the first of its paths; the root's path is empty.

    `rule` is the rule that names the module, or None if the policy selects it without a rule.
    """

    path: str
    module: nn.Module
    rule: ModuleRule | None = None

    def __str__(self) -> str:
        return self.path or "the model itself"


def select(model: nn.Module, rules: Sequence[ModuleRule], setting: str = "fp32_modules") -> list[Selected]:
    """Returns the modules that the rules of a setting name, each once, in the model's order.

    The first rule that names a module decides. A container without a forward of its own stands for its children.
    A module that only runs inside another selected module is left out, since that one covers it. Raises
    `PolicyApplyError` naming every rule that matches nothing.
    """
    if not rules:
        return []
    paths = _paths_by_module(model)
    rule_of: dict[nn.Module, ModuleRule] = {}
    idle: list[ModuleRule] = []
    for rule in rules:
        matches = _matches(rule)
        matched = [module for module in paths if any(matches(path, module) for path in paths[module])]
        runnable = [module for top in matched for module in _runnable_in(top)]
        for module in runnable:
            rule_of.setdefault(module, rule)
        if not runnable:
            idle.append(rule)
    if idle:
        raise PolicyApplyError(_no_match(model, idle, paths, setting))
    return list(_outermost(paths, rule_of))


def _paths_by_module(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Returns every module with all its paths; a shared module has several."""
    paths: dict[nn.Module, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        paths[module].append(path)
    return paths


def _matches(rule: ModuleRule) -> Callable[[str, nn.Module], bool]:
    names = matcher_of(rule)
    if rule.path is not None:
        return lambda path, _: names(path, ())
    return lambda path, module: names(path, [base.__name__ for base in type(module).__mro__])


def _runnable_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yields the module, or the modules it holds if it has no forward (a ModuleList, a ModuleDict)."""
    if has_forward(module):
        yield module
    else:
        for child in module.children():
            yield from _runnable_in(child)


def has_forward(module: nn.Module) -> bool:
    """Returns True if the module has a forward; a ModuleList or a ModuleDict has none."""
    if isinstance(module, torch.jit.ScriptModule):  # only the object has it: asking the class raises
        return hasattr(module, "forward")
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _outermost(paths: dict[nn.Module, list[str]], rule_of: dict[nn.Module, ModuleRule]) -> Iterator[Selected]:
    """Leaves out the modules that have a selected ancestor on each of their paths."""
    tops = {path for module in rule_of for path in paths[module]}
    for module, own in paths.items():
        if module in rule_of and any(tops.isdisjoint(_ancestors(path)) for path in own):
            yield Selected(path=own[0], module=module, rule=rule_of[module])


def _ancestors(path: str) -> Iterator[str]:
    """Yields `a.b`, `a` and the root (an empty path) for `a.b.c`; yields nothing for the root."""
    while path:
        path = path.rpartition(".")[0]
        yield path


# To look for what was meant takes long.
MOST_HINTS = 10


def _no_match(model: nn.Module, idle: Sequence[ModuleRule], paths: dict[nn.Module, list[str]], setting: str) -> str:
    every_path = [path for own in paths.values() for path in own if path]
    every_type = sorted({type(module).__name__ for module in paths})
    lines = [f"these rules of {setting} match no module of {type(model).__name__}:"]
    for place, rule in enumerate(idle):
        known = (every_type if rule.path is None else every_path) if place < MOST_HINTS else ()
        lines.append(f"  {rule}{_closest(rule.path or rule.type or '', known)}")
    lines.append(
        "A path is exact, or * stands for one name and ** for any depth; a container must hold a module that "
        "runs. `[path for path, _ in model.named_modules()]` lists the paths there are."
    )
    if [name for name, _ in model.named_children()] in [[name] for name in _WRAPPER_NAMES]:
        lines.append("The model looks wrapped: apply the policy before torch.compile and DistributedDataParallel.")
    return "\n".join(lines)


def _closest(wanted: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(wanted, list(known), cutoff=0.5)
    return f": did you mean {', '.join(close)}?" if close else ""


def changes_of(settings: Policy, model: nn.Module) -> list[tuple[Selected, Change]]:
    """Returns the modules whose forward changes, in the order of the changes: a module may come twice."""
    recomputed = select(model, [ModuleRule(path=pattern) for pattern in settings.checkpoint], "checkpoint")
    wide = {inner for one in select(model, settings.fp32_modules) for inner in one.module.modules()}
    float8 = [one for one in _linears_in_float8(settings, model) if one.module not in wide]
    taken = {one.module for one in float8}
    own = [(one, precision) for one, precision in precisions_of(settings, model) if one.module not in taken]
    return [*own, *((one, "float8") for one in float8), *((one, "recomputed") for one in recomputed)]


def _linears_in_float8(settings: Policy, model: nn.Module) -> list[Selected]:
    """Returns the Linears that the rules name, and those inside of what they name, each once.

    Raises `PolicyApplyError` if this machine has no FP8, or if a rule names no Linear.
    """
    found: dict[nn.Module, Selected] = {}
    idle = []
    for rule in settings.float8_modules:
        inside = [
            Selected(path=path, module=module, rule=rule)
            for one in select(model, [rule], "float8_modules")
            for path, module in one.module.named_modules(prefix=one.path)
            if isinstance(module, nn.Linear)
        ]
        found |= {one.module: one for one in inside if one.module not in found}
        idle += [] if inside else [rule]
    if idle:
        raise PolicyApplyError(f"these rules of float8_modules name no Linear: {', '.join(map(str, idle))}")
    if found and (why := no_float8_because(next(model.parameters()).device)) is not None:
        raise PolicyApplyError(f"float8_modules: {why}")
    return list(found.values())


def precisions_of(settings: Policy, model: nn.Module) -> list[tuple[Selected, Precision]]:
    """Returns the modules that get a precision of their own. FP32 rules win for all that is inside their modules."""
    wide = select(model, settings.fp32_modules)
    narrow = select(model, settings.half_modules, "half_modules")
    if settings.weights == "half":
        return list(_around_half_weights(model, wide))
    if settings.autocast == "off":
        return []
    inside = {module for one in wide for module in one.module.modules()}
    kept: list[tuple[Selected, Precision]] = [(one, _precision_of(one.rule)) for one in wide]
    return kept + [(one, "half") for one in narrow if one.module not in inside]


def _around_half_weights(model: nn.Module, wide: Sequence[Selected]) -> Iterator[tuple[Selected, Precision]]:
    """Yields the outermost modules that run (FP32 in and out, half inside), and the FP32 modules within them."""
    tops = list(_runnable_in(model))
    for top in tops:
        if all(one.module is not top for one in wide):
            path = next(path for path, module in model.named_modules() if module is top)
            yield Selected(path=path, module=top), "half-weights"
    for one in wide:
        yield one, "fp32-weights" if one.module not in tops else "fp32"


def _precision_of(rule: ModuleRule | None) -> Precision:
    return "fp32-cast" if isinstance(rule, Fp32Rule) and rule.cast_output else "fp32"
