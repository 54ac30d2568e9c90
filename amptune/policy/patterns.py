"""The patterns by which a module rule names modules: `*` for one name, `**` for any depth."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from amptune.policy.settings import ModuleRule

__all__ = ["matcher_of"]

ANY_DEPTH = "**"


def matcher_of(rule: ModuleRule) -> Callable[[str, Sequence[str]], bool]:
    """Returns a function that tells if a rule names a module, from its path and the names of its class and bases."""
    if rule.path is None:
        return lambda _, types: rule.type in types
    if "*" not in rule.path:
        return lambda path, _: path == rule.path
    names = _once(list(map(_name_in, rule.path.split("."))), ANY_DEPTH)
    return lambda path, _: _fits(path.split(".") if path else [], names, ANY_DEPTH, _name_fits)


def _once(parts: list[Any], star: Any) -> list[Any]:
    """Returns the parts of a pattern, of stars in a row the first alone."""
    return [part for place, part in enumerate(parts) if part != star or place == 0 or parts[place - 1] != star]


def _name_in(text: str) -> str | list[str]:
    """Returns one name of a pattern: its characters if a star is among them."""
    return _once(list(text), "*") if "*" in text and text != ANY_DEPTH else text


def _name_fits(name: str, pattern: str | list[str]) -> bool:
    return name == pattern if isinstance(pattern, str) else _fits(name, pattern, "*", operator.eq)


def _fits(items: Sequence[str], pattern: Sequence[Any], star: Any, alike: Callable[[str, Any], bool]) -> bool:
    """Returns True if the items are the pattern's, in order, with any number in the place of a star.

    It suffices to lengthen the last star that was met: an earlier one could not bring more. So the time is bounded by
    the product of both lengths, whatever the pattern.
    """
    item = part = 0
    begin = last = -1
    while item < len(items):
        if part < len(pattern) and pattern[part] == star:
            begin, last, part = item, part, part + 1
        elif part < len(pattern) and alike(items[item], pattern[part]):
            item, part = item + 1, part + 1
        elif last >= 0:
            begin += 1
            item, part = begin, last + 1
        else:
            return False
    return part == len(pattern) or (part == len(pattern) - 1 and pattern[part] == star)
