"""A search space: the knobs, the points to try first, and the points never to try with the reasons. Pure."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from amptune.errors import SpaceError, suggestion
from amptune.policy.former_settings import FORMER, taken_out
from amptune.policy.knobs.checkpoint import CHECKPOINT
from amptune.policy.knobs.float8_modules import FLOAT8_MODULES
from amptune.policy.knobs.knob import LARGEST, TRUTH, in_file, is_in
from amptune.policy.knobs.precision_rules import FP32_MODULES, HALF_MODULES
from amptune.policy.settings import KNOBS

__all__ = [
    "BATCH_SIZE",
    "CHECKPOINTS",
    "EXCLUSIONS",
    "FLOAT8",
    "IN_HALF",
    "SEARCHED",
    "Dimension",
    "Forbidden",
    "Point",
    "Space",
    "Value",
    "digest",
    "pin",
    "points",
    "reason_against",
    "with_choices",
    "without_knob",
]

Value = str | int | bool

# How far down the ladder modules stay in FP32, and if modules that autocast keeps in FP32 run in half: what a search
# varies in place of the rules. All others are settings of the policy.
EXCLUSIONS, IN_HALF = "fp32_exclusions", "half_modules"
# Which repeated blocks compute their activations again, in place of patterns; for a search that saves memory.
CHECKPOINTS, REPEATED = "checkpoint", ("none", "alternate", "all")
# Whether all wide Linears but the head run in FP8, in place of rules.
FLOAT8 = FLOAT8_MODULES.name
WEIGHTS, MASTERS, BATCHNORM = "weights", "master_weights", "keep_batchnorm_fp32"
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
class Dimension:
    """One dimension of a space: the name of a knob, and the values to try in the order of preference."""

    name: str
    choices: tuple[Value, ...]

    @property
    def plain(self) -> Value:
        """Stock PyTorch's value if it is among the choices, else the first."""
        stock = SEARCHED[self.name].stock
        return stock if is_in(stock, self.choices) else self.choices[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Forbidden:
    """Points never to try: those in which each knob of `when` has one of the values named there.

    What is forbidden `for_speed` may save memory: a search for that tries it.
    """

    when: tuple[tuple[str, tuple[Value, ...]], ...]
    because: str
    for_speed: bool = False

    def forbids(self, point: Mapping[str, Value]) -> bool:
        return all(name in point and is_in(point[name], values) for name, values in self.when)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The settings worth trying on one architecture.

    Points in `try_first` are complete and allowed, the likeliest winner first.
    """

    architecture: str
    compute_capability: tuple[str, ...]
    knobs: tuple[Dimension, ...]
    try_first: tuple[Point, ...] = ()
    forbid: tuple[Forbidden, ...] = ()

    def choices(self, name: str) -> tuple[Value, ...]:
        """Returns a knob's values; () if the space has no such knob."""
        return next((knob.choices for knob in self.knobs if knob.name == name), ())

    @property
    def half_dtypes(self) -> tuple[Any, ...]:
        """The dtypes that autocast is tried in."""
        return tuple(dtype for dtype in self.choices("autocast") if dtype != "off")


def points(space: Space) -> Iterator[Point]:
    """Yields every allowed point, in a stable order."""
    for values in itertools.product(*(knob.choices for knob in space.knobs)):
        point = Point({knob.name: value for knob, value in zip(space.knobs, values, strict=True)})
        if reason_against(point, space.forbid) is None:
            yield point


def reason_against(point: Mapping[str, Value], rules: Iterable[Forbidden]) -> str | None:
    """Returns why a point must not be tried; None if these rules allow it."""
    return next((rule.because for rule in rules if rule.forbids(point)), None)


def with_choices(space: Space, name: str, choices: tuple[Value, ...], otherwise: Value | None = None) -> Space:
    """Returns the space with these values of a knob, which it may have lacked.

    Starting points with another value, or none, take the one given for this and are merged with their equals; without
    one they are dropped.
    """
    known = {knob.name: knob for knob in space.knobs} | {name: Dimension(name=name, choices=choices)}
    moved = (
        one if otherwise is None or is_in(one.get(name), choices) else Point({**one, name: otherwise})
        for one in space.try_first
    )
    kept = (one for one in moved if is_in(one.get(name), choices) and reason_against(one, space.forbid) is None)
    return replace(space, knobs=tuple(known.values()), try_first=tuple(dict.fromkeys(kept)))


def pin(space: Space, name: str, text: str) -> Space:
    """Returns the space with one knob fixed to the value written in `text`, even if it is not among the choices.

    Starting points take that value, and rules against it are lifted: the user knows better. Raises `SpaceError`
    for an unknown knob, or a value no policy can have.
    """
    names = [knob.name for knob in space.knobs]
    if name not in names and name in SEARCHED and SEARCHED[name].is_optional:
        return pin(with_choices(space, name, (SEARCHED[name].stock,), SEARCHED[name].stock), name, text)
    if name in FORMER:
        raise SpaceError(f"{taken_out(name)}; leave --set {name}={text} out")
    if name not in names:
        hint = "use --batch-size; " if name == BATCH_SIZE else suggestion(name, (*names, BATCH_SIZE))
        raise SpaceError(f"{name!r} is no knob of this search; {hint}the knobs are {', '.join(names)}")
    value = _value_of(name, text)
    forbid = tuple(rule for rule in space.forbid if not is_in(value, dict(rule.when).get(name, ())))
    return with_choices(replace(space, forbid=forbid), name, (value,), value)


def without_knob(space: Space, name: str) -> Space:
    """Returns the space without a knob that it may leave out, and without what was said of it."""
    first = (Point({one: value for one, value in point.items() if one != name}) for point in space.try_first)
    return replace(
        space,
        knobs=tuple(knob for knob in space.knobs if knob.name != name),
        try_first=tuple(dict.fromkeys(first)),
        forbid=tuple(rule for rule in space.forbid if name not in dict(rule.when)),
    )


def digest(space: Space) -> str:
    """Returns a short hash of the knobs and forbidden points, without reasons; each hash has a study of its own.

    Choices that follow from the modules' own times or from the batch sizes that fit are no part of it, nor what only
    some objectives vary or forbid, unless pinned: policies are remembered by their settings.
    """
    kept = [one for one in space.knobs if one.name not in (EXCLUSIONS, IN_HALF)]
    kept = [one for one in kept if one.name != CHECKPOINTS or set(one.choices) != set(REPEATED)]
    knobs = [(one.name, () if one.name == BATCH_SIZE else one.choices) for one in kept]
    content = (knobs, [rule.when for rule in space.forbid if not rule.for_speed])
    return hashlib.sha256(repr(content).encode()).hexdigest()[:8]


_OF_RULES = (
    replace(FP32_MODULES, name=EXCLUSIONS, stock=0, is_count=True),
    replace(HALF_MODULES, stock=False, values=TRUTH),
    replace(CHECKPOINT, stock="none", values=REPEATED),
    replace(FLOAT8_MODULES, stock="none", values=("none", "wide")),
)
_OF_POLICIES = (knob for knob in KNOBS if knob.values or knob.is_count)
# The knobs that a space may have, by name. Those that it may leave out stand last.
SEARCHED = {knob.name: knob for knob in sorted((*_OF_POLICIES, *_OF_RULES), key=lambda knob: knob.is_optional)}


def _value_of(name: str, text: str) -> Value:
    legal = SEARCHED[name].values
    if not legal:
        if not re.fullmatch("[0-9]{1,10}", text) or int(text) > LARGEST:
            raise SpaceError(f"{name}={text}: {text!r} is no whole number of at most {LARGEST}")
        return int(text)
    words = {str(value).lower(): value for value in legal}
    if True in legal:
        words |= {"on": True, "off": False}
    if text.lower() not in words:
        hint = suggestion(text, words)
        raise SpaceError(f"{name}={text}: {text!r} is not one of {in_file(legal)}{hint and '; '}{hint}".rstrip())
    return words[text.lower()]
