"""The timed modules of a model, in as few groups as a reader can take in. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from amptune.measure.results.half_effects import ModuleSensitivity
from amptune.policy.patterns import matcher_of
from amptune.policy.settings import Fp32Rule

__all__ = ["ModuleGroup", "grouped", "kept_by"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleGroup:
    """Modules whose paths differ in a number alone, or begin alike; times are sums, in ms a step."""

    name: str
    paths: tuple[str, ...]
    fp32_ms: float
    half_ms: Mapping[str, float]


def grouped(modules: Sequence[ModuleSensitivity], most: int) -> list[ModuleGroup]:
    """Returns the timed modules in the order of their calls, as at most about `most` groups.

    Paths stand by themselves, then with * for each number, then cut after fewer and fewer names.
    """
    timed = [one for one in modules if one.fp32_ms is not None]
    names = [one.path or "the model" for one in timed]
    if len(names) > most:
        starred = [re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "*", name) for name in names]
        deepest = max(name.count(".") + 1 for name in starred)
        cuts = ([".".join(name.split(".")[:depth]) for name in starred] for depth in range(deepest, 0, -1))
        names = next((cut for cut in cuts if len(set(cut)) <= most), [name.split(".")[0] for name in starred])
    members: dict[str, list[ModuleSensitivity]] = {}
    for name, module in zip(names, timed, strict=True):
        members.setdefault(name, []).append(module)
    return [_group(name, own) for name, own in members.items()]


def _group(name: str, modules: Sequence[ModuleSensitivity]) -> ModuleGroup:
    dtypes = {dtype for module in modules for dtype, ms in module.half_ms.items() if ms is not None}
    return ModuleGroup(
        name=name,
        paths=tuple(module.path for module in modules),
        fp32_ms=sum(module.fp32_ms or 0.0 for module in modules),
        half_ms={dtype: sum(module.half_ms.get(dtype) or 0.0 for module in modules) for dtype in dtypes},
    )


def kept_by(rule: Fp32Rule, path: str) -> bool:
    """Returns whether a rule names a module, or one that it is in, by path: of types a study knows nothing."""
    names, is_named = path.split("."), matcher_of(rule)
    return any(is_named(".".join(names[:depth]), ()) for depth in range(1, len(names) + 1))
