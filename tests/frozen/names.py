"""What a user's code may name: the import paths that stand in the documentation, with their parameters."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from importlib import import_module
from typing import Any

import amptune

__all__ = ["names"]

# Documented beside the public names of `amptune` itself.
DOCUMENTED = {
    "amptune.runtime.integrations.lightning": ("PolicyPrecision",),
    "amptune.runtime.integrations.transformers": ("PolicyCallback", "training_arguments"),
    "amptune.runtime.integrations.accelerate": ("accelerator_kwargs", "apply_before_prepare"),
    "amptune.runtime.integrations.fsdp": ("fully_shard",),
    "amptune.workload.zoo": ("resnet50", "bert_base", "digits"),
    "amptune.cli.entry": ("main",),
}


def names() -> str:
    """A line a name: what it is, and what it takes. A module whose framework is not installed says so."""
    lines = [line for name in sorted(amptune.__all__) for line in _told(f"amptune.{name}", getattr(amptune, name))]
    for module, members in sorted(DOCUMENTED.items()):
        lines += _members(module, members)
    return "\n".join(lines) + "\n"


def _members(module: str, members: tuple[str, ...]) -> Iterator[str]:
    home = import_module(module)
    for name in members:
        yield from _told(f"{module}.{name}", getattr(home, name))


def _told(path: str, thing: Any) -> Iterator[str]:
    if isinstance(thing, str):
        yield f"{path}: text"
    elif inspect.isclass(thing) and issubclass(thing, BaseException | Warning):
        yield f"{path}: {' < '.join(base.__name__ for base in thing.__mro__[1:-1])}"
    elif callable(thing):
        yield f"{path}({_parameters(thing)})"
    else:
        yield f"{path}: {type(thing).__name__}"
    if inspect.isclass(thing):
        yield from (f"{path}.{name}" for name in _public(thing))


def _parameters(thing: Any) -> str:
    """Names, kinds and defaults; annotations are words for the same."""
    parameters = inspect.signature(thing).parameters.values()
    plain = [one.replace(annotation=inspect.Parameter.empty) for one in parameters]
    return str(inspect.Signature(plain))[1:-1]


def _public(kind: type) -> list[str]:
    """Fields, methods and properties of amptune's own classes in its line."""
    own = [base for base in kind.__mro__ if base.__module__.startswith("amptune")]
    named = {name for base in own for name in vars(base) if not name.startswith("_")}
    named |= {field.name for field in fields(kind)} if is_dataclass(kind) else set()
    return sorted(named)
