"""Search space files: found by name or by hardware, read, checked."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from amptune.errors import FileFormatError, Problem, SpaceError, suggestion
from amptune.hardware.machine import Gpu, Hardware
from amptune.policy.former_settings import FORMER, taken_out
from amptune.policy.knobs.knob import is_in
from amptune.policy.serialization import adapter_for
from amptune.policy.validation import validate
from amptune.policy.yaml_text import Document, read
from amptune.search.space.knobs import SEARCHED, Dimension, Forbidden, Point, Space, Value, misfit, reason_against

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


def spaces_folder() -> Path:
    """Returns the folder of the spaces: inside the package (in a wheel), else beside it (in a checkout)."""
    package = Path(__file__).resolve().parents[2]
    inside = package / "search_spaces"
    return inside if inside.is_dir() else package.parent / "search_spaces"


def space_names() -> tuple[str, ...]:
    """Returns the names of the spaces that come with amptune."""
    return tuple(sorted(path.stem for path in spaces_folder().glob("*.yaml")))


def load_space(name_or_path: str | Path) -> Space:
    """Returns a space by name or file. Raises `SpaceError` if there is none, `FileFormatError` if it is malformed."""
    path = _file_of(str(name_or_path), Path())
    if path is None:
        raise SpaceError(_no_space(str(name_or_path)))
    return parse_space(read(path))


def _file_of(name: str, folder: Path) -> Path | None:
    """Returns the file of one of amptune's spaces, or a file by its path from a folder; None if there is none."""
    path = spaces_folder() / f"{name}.yaml" if name in space_names() else folder / name
    return path if os.path.isfile(path) else None  # unlike Path.is_file, False for a name that no file can have


def _no_space(name: str) -> str:
    hint = suggestion(name, space_names())
    return f"{name!r} is no file and no space of amptune's; {hint}there are {', '.join(space_names())}"


def space_for(hardware: Hardware) -> Space:
    """Returns the space of this machine's GPU, or of its CPU; an unknown newer GPU gets the one for its features."""
    if hardware.gpu is not None:
        return load_space(_name_for(hardware.gpu))
    return load_space("cpu-bf16" if hardware.cpu.avx512_bf16 or hardware.cpu.amx_bf16 else "cpu")


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


def space_schema() -> dict[str, Any]:
    """Returns the JSON Schema of a space file."""
    schema: dict[str, Any] = adapter_for(_SpaceDocument).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "amptune search space"}


def parse_space(document: Document, extended_by: tuple[Path, ...] = ()) -> Space:
    """Returns the space in a document, which other files extend. Raises `FileFormatError` with every problem.

    Its knobs and starting points replace those of the space that it extends, and a rule the one with the same `when`.
    """
    data = document.data
    if isinstance(data, dict) and data.get("schema") != SPACE_SCHEMA:
        said = "this key is missing" if "schema" not in data else f"{data['schema']!r} is not known"
        raise FileFormatError([document.problem(("schema",), f"schema: {said}; amptune reads {SPACE_SCHEMA}")])
    body = validate(document, _SpaceDocument)
    base = _base_of(document, body.extends, (*extended_by, Path(document.source).resolve()))
    choices = {knob.name: knob.choices for knob in base.knobs}
    for name, values in (body.knobs or {}).items():
        legal = (value for value in values if name in SEARCHED and misfit(name, value) is None)
        choices[name] = tuple(dict.fromkeys(legal))
    knobs = tuple(Dimension(name=name, choices=values) for name, values in choices.items() if values)
    own = tuple(map(_rule_of, body.forbid or ()))
    problems = list(_problems(document, body, knobs, (*own, *base.forbid)))
    if problems:
        raise FileFormatError(problems)
    rules = tuple({rule.when: rule for rule in (*base.forbid, *own)}.values())
    count, most = math.prod(len(knob.choices) for knob in knobs), LARGEST_SPACE // (len(rules) + 1)
    if count > most:
        message = f"{count:,} points: beside {len(rules)} rules, a space has at most {most:,}"
        raise FileFormatError([document.problem((), message)])
    first = [_completed(point, knobs) for point in (base.try_first if body.try_first is None else body.try_first)]
    allowed = (point for point in first if all(is_in(point[name], choices[name]) for name in point))
    return Space(
        architecture=body.architecture,
        compute_capability=tuple(body.compute_capability),
        knobs=knobs,
        forbid=rules,
        try_first=tuple(point for point in allowed if reason_against(point, rules) is None),
    )


def _base_of(document: Document, extends: str | None, seen: tuple[Path, ...]) -> Space:
    """Returns the space that a document extends: amptune's own by name, or a file by its path from the document's."""
    if extends is None:
        return Space(architecture="", compute_capability=(), knobs=())
    path = _file_of(extends, Path(document.source).parent)
    if path is None:
        raise FileFormatError([document.problem(("extends",), f"extends: {_no_space(extends)}")])
    if path.resolve() in seen:
        way = " → ".join(one.name for one in (*seen, path))
        raise FileFormatError([document.problem(("extends",), f"extends: {way} goes in a circle")])
    return parse_space(read(path), seen)


def _rule_of(body: _ForbidBody) -> Forbidden:
    when = tuple((name, tuple(_listed(values))) for name, values in body.when.items())
    return Forbidden(when=when, because=body.because, for_speed=body.for_speed)


def _completed(point: Mapping[str, Value], knobs: Iterable[Dimension]) -> Point:
    """Returns a starting point that has stock PyTorch's value, or the knob's first, for each knob it leaves out."""
    return Point({**{knob.name: knob.plain for knob in knobs}, **point})


def _listed(values: Any) -> list[Any]:
    """Returns a rule's values; an empty list counts as one value, which no knob has."""
    return values if isinstance(values, list) and values else [values]


def _problems(
    document: Document, body: _SpaceDocument, knobs: Sequence[Dimension], rules: Sequence[Forbidden]
) -> Iterator[Problem]:
    if body.knobs is None and body.extends is None:
        yield document.problem((), "knobs: this key is missing")
    for name, values in (body.knobs or {}).items():
        yield from _wrong_values(document, ("knobs", name), values, dict.fromkeys(SEARCHED, ()))
        if not values:
            yield document.problem(("knobs", name), f"{name}: a knob needs at least one value")
    choices = {knob.name: knob.choices for knob in knobs}
    for index, point in enumerate(body.try_first or ()):
        path = ("try_first", index)
        wrong = [one for name in point for one in _wrong_values(document, (*path, name), [point[name]], choices)]
        yield from wrong
        reason = None if wrong else reason_against(_completed(point, knobs), rules)
        if reason is not None:
            yield document.problem(path, f"this starting point is forbidden: {reason}")
    for index, rule in enumerate(body.forbid or ()):
        if not rule.when:
            yield document.problem(("forbid", index), "when: names no knob, and so would forbid everything")
        if not rule.because.strip():
            yield document.problem(("forbid", index, "because"), "because: say why, with a source")
        for name, values in rule.when.items():
            yield from _wrong_values(document, ("forbid", index, "when", name), _listed(values), choices)


def _wrong_values(
    document: Document, path: tuple[str | int, ...], values: Sequence[Any], choices: Mapping[str, tuple[Value, ...]]
) -> Iterator[Problem]:
    """Yields a problem for an unknown knob, or for each value of a known one that is none of its choices."""
    name = str(path[-1])
    if name not in choices:
        unknown = f"unknown knob {name!r}; {suggestion(name, choices)}the knobs are {', '.join(choices)}"
        told = f"{taken_out(name)}: remove it" if name in FORMER else unknown
        yield document.problem(path, told, key=True)
        return
    for index, value in enumerate(values):
        if (problem := misfit(name, value, choices[name])) is not None:
            yield document.problem((*path, index), f"{name}: {problem}")
