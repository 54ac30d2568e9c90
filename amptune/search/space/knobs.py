"""A search space: the knobs, the points to try first, and the points never to try with the reasons. Pure."""

from __future__ import annotations

import difflib
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args, get_type_hints

from amptune.errors import SpaceError
from amptune.policy import settings
from amptune.policy.settings import STOCK, Policy

__all__ = [
    "BATCH_SIZE",
    "EXCLUSIONS",
    "HALF",
    "Forbidden",
    "Knob",
    "Point",
    "Space",
    "Value",
    "digest",
    "forbidden_because",
    "is_in",
    "pin",
    "points",
    "restrict",
    "with_knob",
]

Value = str | int | bool

# How far down the ladder modules stay in FP32, and if modules that autocast keeps in FP32 run in half. All other knobs
# are settings of the policy.
EXCLUSIONS, HALF = "fp32_exclusions", "half_modules"
# A space may leave these out and a user may still pin them: few machines gain by weights in half.
WEIGHTS, MASTERS, BATCHNORM = "weights", "master_weights", "keep_batchnorm_fp32"
OF_WEIGHTS = (WEIGHTS, MASTERS, BATCHNORM)
# The choices of this knob depend on what fits into memory.
BATCH_SIZE = "batch_size"


class Point(Mapping[str, Value]):
    """A value for every knob; hashable, and equal for any order of the knobs."""

    __slots__ = ("_values",)

    def __init__(self, values: Mapping[str, Value]) -> None:
        self._values = dict(values)

    def __getitem__(self, name: str) -> Value:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(frozenset(self._values.items()))

    def __repr__(self) -> str:
        return f"Point({self._values})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """A setting to search, and its values in the order of preference."""

    name: str
    choices: tuple[Value, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forbidden:
    """Points never to try: those in which each knob of `when` has one of the values named there."""

    when: tuple[tuple[str, tuple[Value, ...]], ...]
    because: str

    def forbids(self, point: Mapping[str, Value]) -> bool:
        return all(name in point and is_in(point[name], values) for name, values in self.when)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The settings worth trying on one architecture. Points in `try_first` are complete and allowed."""

    architecture: str
    compute_capability: tuple[str, ...]
    knobs: tuple[Knob, ...]
    try_first: tuple[Point, ...] = ()
    forbid: tuple[Forbidden, ...] = ()

    def choices(self, name: str) -> tuple[Value, ...]:
        """Returns a knob's values; () if the space has no such knob."""
        return next((knob.choices for knob in self.knobs if knob.name == name), ())


def points(space: Space) -> Iterator[Point]:
    """Yields every allowed point, in a stable order."""
    for values in itertools.product(*(knob.choices for knob in space.knobs)):
        point = Point({knob.name: value for knob, value in zip(space.knobs, values, strict=True)})
        if forbidden_because(space, point) is None:
            yield point


def forbidden_because(space: Space, point: Mapping[str, Value]) -> str | None:
    """Returns why a point must not be tried; None if it is allowed."""
    return next((rule.because for rule in space.forbid if rule.forbids(point)), None)


def restrict(space: Space, name: str, choices: tuple[Value, ...]) -> Space:
    """Returns the space with one knob cut to these values; starting points that need another are dropped."""
    knobs = tuple(replace(knob, choices=choices) if knob.name == name else knob for knob in space.knobs)
    kept = tuple(point for point in space.try_first if name not in point or is_in(point[name], choices))
    return replace(space, knobs=knobs, try_first=kept)


def pin(space: Space, name: str, text: str) -> Space:
    """Returns the space with one knob fixed to the value written in `text`, even if it is not among the choices.

    Starting points take that value, and rules against it are lifted: the user knows better. Raises `SpaceError`
    for an unknown knob, or a value no policy can have.
    """
    names = [knob.name for knob in space.knobs]
    if name in OF_WEIGHTS and name not in names:
        return pin(with_knob(space, name, (stock_value(name),), stock=stock_value(name)), name, text)
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}? " if close else "use --batch-size; " if name == "batch_size" else ""
        raise SpaceError(f"{name!r} is no knob of this search; {hint}the knobs are {', '.join(names)}")
    value = _value_of(name, text)
    knobs = tuple(replace(knob, choices=(value,)) if knob.name == name else knob for knob in space.knobs)
    forbid = tuple(rule for rule in space.forbid if not is_in(value, dict(rule.when).get(name, ())))
    pinned = replace(space, knobs=knobs, forbid=forbid)
    moved = dict.fromkeys(Point({**point, name: value}) for point in space.try_first)
    return replace(pinned, try_first=tuple(p for p in moved if forbidden_because(pinned, p) is None))


def with_knob(space: Space, name: str, choices: tuple[Value, ...], *, stock: Value) -> Space:
    """Returns the space with one more knob; starting points have it at `stock`."""
    first = tuple(Point({**point, name: stock}) for point in space.try_first)
    return replace(space, knobs=(*space.knobs, Knob(name=name, choices=choices)), try_first=first)


def digest(space: Space) -> str:
    """Returns a short hash of the knobs and forbidden points, without reasons; each hash has a study of its own.

    Choices that follow from the modules' own times or from the batch sizes that fit are no part of it: policies are
    remembered by their settings.
    """
    content = (
        tuple(
            replace(knob, choices=()) if knob.name == BATCH_SIZE else knob
            for knob in space.knobs
            if knob.name not in (EXCLUSIONS, HALF)
        ),
        [r.when for r in space.forbid],
    )
    return hashlib.sha256(repr(content).encode()).hexdigest()[:8]


def stock_value(name: str) -> Value:
    """Returns stock PyTorch's value of a knob."""
    return {EXCLUSIONS: 0, HALF: False}[name] if name in (EXCLUSIONS, HALF) else getattr(STOCK, name)


def legal_values(name: str) -> tuple[Value, ...] | None:
    """Returns the values a policy can have for a knob; None for any whole number. Raises `KeyError` for no knob."""
    if name == EXCLUSIONS:
        return None
    if name == HALF:
        return (False, True)
    hint = _POLICY_HINTS[name]
    if getattr(hint, "__origin__", None) is Literal:
        return get_args(hint)
    return (False, True) if hint is bool else None


_POLICY_HINTS: dict[str, Any] = {
    name: hint
    for name, hint in get_type_hints(Policy, vars(settings)).items()
    if name in {f.name for f in fields(Policy)} - {"fp32_modules", "half_modules", "loss_scale"}
}
KNOBS = (*(name for name in _POLICY_HINTS if name not in OF_WEIGHTS), EXCLUSIONS, HALF, *OF_WEIGHTS)


def _value_of(name: str, text: str) -> Value:
    legal = legal_values(name)
    if legal is None:
        if not text.isdecimal():
            raise SpaceError(f"{name}={text}: {text!r} is no whole number")
        return int(text)
    words = {str(value).lower(): value for value in legal}
    if legal == (False, True):
        words |= {"on": True, "off": False}
    if text.lower() not in words:
        raise SpaceError(f"{name}={text}: {text!r} is not one of {', '.join(str(value).lower() for value in legal)}")
    return words[text.lower()]


def is_in(value: Any, values: Iterable[Value]) -> bool:
    """Returns True if `values` has the value; 0 and False are kept apart."""
    return any(value == other and type(value) is type(other) for other in values)
