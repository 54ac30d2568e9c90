"""Bundled workloads, written from the published architectures; importing this package loads none of them.

A target is written `amptune.workload.zoo:resnet50`: each name is a function that returns a `Workload`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from amptune.errors import TargetError

if TYPE_CHECKING:
    from collections.abc import Callable

    from amptune.workload.workload import Workload

__all__ = ["NAMES", "workload"]

# No module has its workload's name: importing a module `zoo.digits` would replace the function `digits`.
_MODULES = {"resnet50": "resnet", "bert_base": "bert", "digits": "handwriting"}

NAMES: tuple[str, ...] = tuple(_MODULES)


def workload(name: str) -> Workload:
    """Returns the bundled workload of that name, at its published size. Raises `TargetError` if there is none."""
    if name not in _MODULES:
        raise TargetError(f"{name!r} is no bundled workload; there are {', '.join(NAMES)}")
    return _builder(name)()


def __getattr__(name: str) -> Callable[..., Workload]:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; its workloads are {', '.join(NAMES)}")
    return _builder(name)


def __dir__() -> list[str]:
    return sorted([*globals(), *NAMES])


def _builder(name: str) -> Callable[..., Workload]:
    builder: Callable[..., Workload] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return builder
