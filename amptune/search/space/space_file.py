"""Search space files: found by name or by hardware, read, checked."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from amptune.errors import FileFormatError, Problem, SpaceError, suggestion
from amptune.hardware.machine import Gpu, Hardware
from amptune.policy.former_settings import FORMER, taken_out
from amptune.policy.knobs.knob import LARGEST, is_in
from amptune.policy.serialization import adapter_for
from amptune.policy.validation import validate
from amptune.policy.yaml_text import Document, read
from amptune.search.space.knobs import (
    SEARCHED,
    Dimension,
    Forbidden,
    Point,
    Space,
    Value,
    forbidden_because,
    points,
)

__all__ = ["load_space", "parse_space", "space_for", "space_names", "space_schema", "spaces_folder"]

SPACE_SCHEMA = "amptune.space/1"
# Every point is looked at under every rule. The largest space that comes with amptune has 38,880 points and 6 rules.
LARGEST_SPACE = 2_000_000
NO_TENSOR_CORES = "turing-gtx16"


@dataclass(frozen=True, slots=True, kw_only=True)
class _ForbidBody:
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    when: dict[str, Any]
    because: str
    for_speed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _SpaceDocument:
    """The file's shape; what its values may be is checked behind it."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    schema: Literal["amptune.space/1"]
    architecture: str
    compute_capability: list[str]
    extends: str | None = None
    knobs: dict[str, list[Any]] | None = None
    try_first: list[dict[str, Any]] | None = None
    forbid: list[_ForbidBody] | None = None


def spaces_folder(package: Path | None = None) -> Path:
    """Returns the folder of the spaces: inside the package (in a wheel), else beside it (in a checkout)."""
    package = package or Path(__file__).resolve().parents[2]
    inside = package / "search_spaces"
    return inside if inside.is_dir() else package.parent / "search_spaces"


def space_names() -> tuple[str, ...]:
    """Returns the names of the spaces that come with amptune."""
    return tuple(sorted(path.stem for path in spaces_folder().glob("*.yaml")))


def load_space(name_or_path: str | Path) -> Space:
    """Returns a space by name or file. Raises `SpaceError` if there is none, `FileFormatError` if it is malformed."""
    own = spaces_folder() / f"{name_or_path}.yaml"
    path = own if str(name_or_path) in space_names() else Path(name_or_path)
    if os.path.isfile(path):  # unlike Path.is_file, False for a name that no file can have
        return parse_space(read(path))
    raise SpaceError(_no_space(str(name_or_path)))


def _no_space(name: str) -> str:
    hint = suggestion(name, space_names())
    return f"{name!r} is no file and no space of amptune's; {hint}there are {', '.join(space_names())}"


def space_for(hardware: Hardware) -> Space:
    """Returns the space of this machine's GPU, or of the CPU; an unknown newer GPU gets the one for its features."""
    return load_space("cpu" if hardware.gpu is None else _name_for(hardware.gpu))


def parse_space(document: Document, extended_by: tuple[Path, ...] = ()) -> Space:
    """Returns the space in a document, which other files extend. Raises `FileFormatError` with every problem."""
    data = document.data
    if isinstance(data, dict) and data.get("schema") != SPACE_SCHEMA:
        said = "this key is missing" if "schema" not in data else f"{data['schema']!r} is not known"
        raise FileFormatError([document.problem(("schema",), f"schema: {said}; amptune reads {SPACE_SCHEMA}")])
    body = validate(document, _SpaceDocument)
    chain = (*extended_by, Path(document.source).resolve())
    base = _base_of(document, body.extends, chain) if body.extends is not None else None
    problems = [*_knob_problems(document, body), *_shape_problems(document, body)]
    if not problems:
        space = _space_of(body, base)
        points, rules = math.prod(len(knob.choices) for knob in space.knobs), len(space.forbid)
        if points * (rules + 1) > LARGEST_SPACE:
            most = LARGEST_SPACE // (rules + 1)
            message = f"{points:,} points: beside {rules} rules, a space has at most {most:,}"
            raise FileFormatError([document.problem((), message)])
        problems = list(_point_problems(document, body, space))
    if problems:
        raise FileFormatError(problems)
    return space


def _base_of(document: Document, extends: str, seen: tuple[Path, ...]) -> Space:
    """Returns the space that a document extends: amptune's own by name, or a file by its path from the document's."""
    own = spaces_folder() / f"{extends}.yaml"
    path = own if extends in space_names() else Path(document.source).parent / extends
    if not os.path.isfile(path):
        raise FileFormatError([document.problem(("extends",), f"extends: {_no_space(extends)}")])
    if path.resolve() in seen:
        way = " → ".join(one.name for one in (*seen, path))
        raise FileFormatError([document.problem(("extends",), f"extends: {way} goes in a circle")])
    return parse_space(read(path), seen)


def space_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a space file."""
    schema: dict[str, Any] = adapter_for(_SpaceDocument).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "amptune search space"}


def _name_for(gpu: Gpu) -> str:
    """Chooses by compute capability, then by generation, then by the GPU's features, as a new name says nothing."""
    if gpu.compute_capability >= (7, 5) and not gpu.tensor_cores:
        return NO_TENSOR_CORES
    capability = ".".join(map(str, gpu.compute_capability))
    names = [name for name in space_names() if name != NO_TENSOR_CORES]
    exact = (name for name in names if capability in load_space(name).compute_capability)
    by_name = (name for name in names if name == gpu.generation)
    able = "blackwell" if gpu.fp8 else "ampere" if gpu.bf16 else "turing" if gpu.tensor_cores else "maxwell"
    return next(exact, None) or next(by_name, able)


def _space_of(body: _SpaceDocument, base: Space | None) -> Space:
    """Returns the space; its knobs and starting points replace the base's, and a rule that with the same `when`."""
    base = base or Space(architecture="", compute_capability=(), knobs=())
    choices = {knob.name: knob.choices for knob in base.knobs}
    choices |= {name: tuple(values) for name, values in (body.knobs or {}).items()}
    own = (
        Forbidden(
            when=tuple((k, _as_tuple(v)) for k, v in rule.when.items()), because=rule.because, for_speed=rule.for_speed
        )
        for rule in body.forbid or ()
    )
    rules = {rule.when: rule for rule in (*base.forbid, *own)}
    space = Space(
        architecture=body.architecture,
        compute_capability=tuple(body.compute_capability),
        knobs=tuple(Dimension(name=name, choices=values) for name, values in choices.items()),
        forbid=tuple(rules.values()),
    )
    if body.try_first is not None:
        return replace(space, try_first=tuple(_completed(point, space.knobs) for point in body.try_first))
    inherited = [_completed(point, space.knobs) for point in base.try_first]
    allowed = (point for point in inherited if all(is_in(point[name], choices[name]) for name in point))
    return replace(space, try_first=tuple(point for point in allowed if forbidden_because(space, point) is None))


def _completed(point: Mapping[str, Value], knobs: Iterable[Dimension]) -> Point:
    """Returns a starting point that has stock PyTorch's value, or the knob's first, for each knob it leaves out."""
    return Point({**{knob.name: knob.plain for knob in knobs}, **point})


def _knob_problems(document: Document, body: _SpaceDocument) -> Iterator[Problem]:
    if body.knobs is None and body.extends is None:
        yield document.problem((), "knobs: this key is missing")
    for name, choices in (body.knobs or {}).items():
        if name not in SEARCHED:
            message = f"unknown knob {name!r}; {suggestion(name, SEARCHED)}the knobs are {', '.join(SEARCHED)}"
            yield document.problem(("knobs", name), _told_if_former(name, message), key=True)
            continue
        if not choices:
            yield document.problem(("knobs", name), f"{name}: a knob needs at least one value")
        seen: set[tuple[type, Any]] = set()
        for index, value in enumerate(choices):
            if not _is_legal(name, value):
                yield document.problem(("knobs", name, index), f"{name}: {value!r} is not {_legal_in_words(name)}")
            elif (type(value), value) in seen:
                yield document.problem(("knobs", name, index), f"{name}: {value!r} stands here twice")
            else:
                seen.add((type(value), value))


def _shape_problems(document: Document, body: _SpaceDocument) -> Iterator[Problem]:
    """Yields a problem for each list and mapping where a value is wanted; only `when` takes a list of values."""
    points = [(("try_first", index), point) for index, point in enumerate(body.try_first or ())]
    rules = [(("forbid", index, "when"), rule.when) for index, rule in enumerate(body.forbid or ())]
    for path, values in (*points, *rules):
        for name, value in values.items():
            several = _as_tuple(value) if path[-1] == "when" else (value,)
            if not several or any(isinstance(one, list | dict) for one in several):
                wanted = "a value, or a list of values" if path[-1] == "when" else "a value"
                yield document.problem((*path, name), f"{name}: {value!r} is not {wanted}")


def _point_problems(document: Document, body: _SpaceDocument, space: Space) -> Iterator[Problem]:
    choices = {knob.name: knob.choices for knob in space.knobs}
    for index, point in enumerate(body.try_first or ()):
        wrong = list(_values_outside(document, ("try_first", index), point, choices))
        yield from wrong
        reason = None if wrong else forbidden_because(space, _completed(point, space.knobs))
        if reason is not None:
            yield document.problem(("try_first", index), f"this starting point is forbidden: {reason}")
    for index, rule in enumerate(body.forbid or ()):
        if not rule.when:
            yield document.problem(("forbid", index), "when: names no knob, and so would forbid everything")
        if not rule.because.strip():
            yield document.problem(("forbid", index, "because"), "because: say why, with a source")
        yield from _values_outside(document, ("forbid", index, "when"), rule.when, choices)
    if space.forbid and next(points(space), None) is None:
        yield document.problem(("forbid",), "forbid: these rules leave nothing to try", key=True)


def _values_outside(
    document: Document,
    path: tuple[str | int, ...],
    point: Mapping[str, Any],
    choices: Mapping[str, tuple[Value, ...]],
) -> Iterator[Problem]:
    for name, values in point.items():
        if name not in choices:
            message = f"{name!r} is no knob of this space; {suggestion(name, choices)}".removesuffix("; ").rstrip()
            yield document.problem((*path, name), _told_if_former(name, message), key=True)
            continue
        for value in _as_tuple(values):
            if not is_in(value, choices[name]):
                offered = ", ".join(map(_word, choices[name]))
                yield document.problem(
                    (*path, name), f"{name}: {_word(value)} is not among this knob's values {offered}"
                )


def _told_if_former(name: str, message: str) -> str:
    return f"{taken_out(name)}: remove it" if name in FORMER else message


def _is_legal(name: str, value: Any) -> bool:
    legal = SEARCHED[name].values
    if not legal:
        least = 0 if SEARCHED[name].stock == 0 else 1
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST
    return is_in(value, legal)


def _legal_in_words(name: str) -> str:
    legal = SEARCHED[name].values
    return "one of " + ", ".join(map(_word, legal)) if legal else "a whole number"


def _word(value: Any) -> str:
    """Returns a value as the file spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _as_tuple(values: Any) -> tuple[Any, ...]:
    return tuple(values) if isinstance(values, list) else (values,)
