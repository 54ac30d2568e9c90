"""Conditions of a profile's entry on one label: a value, or comparisons that all hold. Pure."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass

from amptune.hardware.labels import is_software_label

__all__ = ["Condition", "condition_of"]

_COMPARISON = re.compile(r"\s*(>=|<=|!=|>|<)\s*([^<>=!,\s](?:[^<>=!,]*[^<>=!,\s])?)\s*")
_ORDER = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}
# A comparison begins with a sign, and no label's own value has one of these two.
_SIGNED = re.compile(r"\s*[<>=!]|.*[<>]", re.DOTALL)
# Python itself reads `1_000`, and digits of any script.
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)
_VERSION = re.compile(r"\d{1,18}(\.\d{1,18})*", re.ASCII)
# Kubernetes marks a GPU that several containers share: it is the same GPU.
_SHARED = "-SHARED"


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on the label `name`: `wanted` has each sign with its limit; "=" wants the value itself."""

    name: str
    wanted: tuple[tuple[str, str], ...]

    def holds(self, value: str) -> bool:
        """Returns whether a machine with this value fits."""
        return all(_holds(self.name, sign, limit, value) for sign, limit in self.wanted)

    @property
    def can_hold(self) -> bool:
        """False if no value fits, because the comparisons contradict one another."""
        return not any(_exclude(self.name, one, other) for one in self.wanted for other in self.wanted)

    def implies(self, other: Condition) -> bool:
        """Returns whether every value that fits here fits `other` too."""
        return all(any(_implies(self.name, own, its) for own in self.wanted) for its in other.wanted)


def condition_of(name: str, text: str) -> Condition:
    """Returns the condition that a profile states for a label. Raises `ValueError` for a malformed comparison."""
    if not _SIGNED.match(text):
        return Condition(name, (("=", text),))
    found = [_COMPARISON.fullmatch(part) for part in text.split(",")]
    wanted = tuple((one[1], one[2]) for one in found if one is not None)
    if len(wanted) < len(found) or any(sign in _ORDER and _size(name, limit) is None for sign, limit in wanted):
        what = "a version" if is_software_label(name) else "a number"
        raise ValueError(
            f"{text!r} is no comparison: write one of >=, <=, >, < before {what}, or !=VALUE; several with a comma "
            'between, as ">=70000,<90000"'
        )
    return Condition(name, wanted)


def _holds(name: str, sign: str, limit: str, value: str) -> bool:
    if sign in _ORDER:
        size, most = _size(name, value), _size(name, limit)
        return size is not None and most is not None and bool(_ORDER[sign](size, most))  # "80GB" is no number
    return (value.removesuffix(_SHARED) == limit.removesuffix(_SHARED)) == (sign == "=")


def _exclude(name: str, one: tuple[str, str], other: tuple[str, str]) -> bool:
    """Returns whether no value fits both."""
    for same, its in ((one, other), (other, one)):
        if same[0] == "=":
            return not _holds(name, *its, same[1])
    is_interval = {one[0][0], other[0][0]} == {"<", ">"}
    return is_interval and not (_holds(name, *one, other[1]) and _holds(name, *other, one[1]))


def _implies(name: str, own: tuple[str, str], its: tuple[str, str]) -> bool:
    """Returns whether every value that fits `own` is known to fit `its`."""
    sign, limit = own
    if own == its:
        return True
    if sign == "=":
        return _holds(name, *its, limit)
    if its[0] == "!=":
        return sign in _ORDER and not _holds(name, *own, its[1])
    is_same = sign == its[0] and _size(name, limit) == _size(name, its[1])
    return sign[0] == its[0][0] and (is_same or _holds(name, *its, limit))


def _size(name: str, text: str) -> tuple[float, ...] | None:
    """Returns the sort key: a number, or a tuple for software versions, where 2.10 comes after 2.9; None if neither."""
    if not is_software_label(name):
        return (float(text),) if _NUMBER.fullmatch(text) and math.isfinite(float(text)) else None
    if not _VERSION.fullmatch(text):
        return None
    parts = [int(part) for part in text.split(".")]
    while parts and not parts[-1]:  # 2.0 equals 2
        parts.pop()
    return tuple(parts)
