"""The patterns by which a module rule names modules: `*` for one name, `**` for any depth."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amptune.policy.settings import ModuleRule

__all__ = ["matcher_of"]


def matcher_of(rule: ModuleRule) -> Callable[[str, Sequence[str]], bool]:
    """Returns a function that tells if a rule names a module, from its path and the names of its class and bases."""
    if rule.path is None:
        return lambda _, types: rule.type in types
    pattern = _pattern(rule.path)
    return lambda path, _: pattern.fullmatch(path and path + ".") is not None


def _pattern(path: str) -> re.Pattern[str]:
    """Returns a pattern for paths with a dot after every name, so that `**` can stand for no name at all."""
    names = path.split(".")
    return re.compile("".join(r"(?:[^.]+\.)*" if name == "**" else _name_pattern(name) for name in names))


def _name_pattern(name: str) -> str:
    inside = r"[^.]+" if name == "*" else re.escape(name).replace(r"\*", r"[^.]*")
    return inside + r"\."
