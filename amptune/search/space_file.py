"""Search space files: where they are, what they must look like, and which one is for this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, create_model

from amptune.errors import AmptuneError, FileFormatError, Problem
from amptune.policy.yaml_text import Document, read, validate
from amptune.search.space import (
    KINDS,
    LEAST,
    Forbidden,
    Knob,
    Point,
    Space,
    completed,
    forbidden_because,
    nearest_to,
    points,
)

if TYPE_CHECKING:
    from amptune.hardware.machine import Gpu, Hardware

__all__ = ["find", "load_space", "names", "space_for", "space_schema"]

_PACKAGE = Path(__file__).resolve().parent.parent


def names(package: Path = _PACKAGE) -> tuple[str, ...]:
    """The search spaces that come with amptune."""
    return tuple(sorted(file.stem for file in _folder(package).glob("*.yaml")))


def find(architecture: str, package: Path = _PACKAGE) -> Path:
    """The file of a search space that comes with amptune. Raises `AmptuneError` naming those there are."""
    known = names(package)
    if architecture not in known:
        raise AmptuneError(
            f"no search space {architecture!r}{nearest_to(architecture, known)} "
            f"Give one of {', '.join(known)}, or the path of a file"
        )
    return _folder(package) / f"{architecture}.yaml"


def load_space(name_or_path: str | Path) -> Space:
    """A search space by name, or from a file. Raises `FileFormatError` with every problem in it."""
    document = read(_file_of(name_or_path))
    content = validate(document, _ADAPTER).model_dump(by_alias=True, exclude_unset=True)
    space = _space_from(content)
    problems = sorted(_contradictions(document, space), key=lambda problem: (problem.line or 0, problem.column or 0))
    if problems:
        raise FileFormatError(problems)
    return completed(space)


def space_for(hardware: Hardware) -> Space:
    """The search space of this machine's generation, or of the known one that can do the same."""
    return load_space(_name_for(hardware.gpu) if hardware.gpu else "cpu")


def space_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a search space file."""
    schema = _SpaceFile.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _folder(package: Path) -> Path:
    """Inside the package, where a wheel puts it; else beside it, where an editable install leaves it."""
    inside = package / "search_spaces"
    return inside if inside.is_dir() else package.parent / "search_spaces"


def _file_of(name_or_path: str | Path) -> Path:
    path = Path(name_or_path)
    looks_like_a_file = path.suffix in {".yaml", ".yml"} or len(path.parts) > 1 or path.exists()
    if isinstance(name_or_path, Path) or (looks_like_a_file and name_or_path not in names()):
        return path
    return find(name_or_path)


def _name_for(gpu: Gpu) -> str:
    """By compute capability, then by generation, then by what the GPU can do: a new name says nothing."""
    known = names()
    major, minor = gpu.compute_capability
    if gpu.generation == "turing" and not gpu.tensor_cores:
        return "turing-gtx16"
    for name in (f"{gpu.generation}-{major}.{minor}", gpu.generation):
        if name in known:
            return name
    if gpu.generation == "pascal":  # 6.2, a Jetson TX2, has the arithmetic rates of 6.0
        return "pascal-6.0" if (gpu.fp16_rate or 0) >= 1 else "pascal-6.1"
    if gpu.bf16 and gpu.tf32:
        return "blackwell" if gpu.fp8 else "ampere"
    if gpu.tensor_cores:
        return "turing"
    return "turing-gtx16" if gpu.compute_capability > (7, 5) else "maxwell"


def _space_from(content: Mapping[str, Any]) -> Space:
    return Space(
        architecture=content["architecture"],
        compute_capability=tuple(content.get("compute_capability", ())),
        knobs=tuple(Knob(name=name, choices=tuple(choices)) for name, choices in content["knobs"].items()),
        try_first=tuple(Point(entry) for entry in content.get("try_first", ())),
        forbid=tuple(
            Forbidden(
                when=tuple((name, tuple(values)) for name, values in rule["when"].items()),
                because=rule["because"],
                instead=tuple(rule.get("instead", {}).items()),
            )
            for rule in content.get("forbid", ())
        ),
    )


def _contradictions(document: Document, space: Space) -> Iterator[Problem]:
    """What is well formed and cannot be meant."""
    for knob in space.knobs:
        for i, choice in enumerate(knob.choices):
            if choice in knob.choices[:i]:
                yield document.problem(("knobs", knob.name, i), f"knobs.{knob.name}: {_word(choice)} stands here twice")
    for i, entry in enumerate(space.try_first):
        wrong = list(_not_offered(document, space, entry, ("try_first", i)))
        yield from wrong
        because = None if wrong else forbidden_because(space, _whole(space, entry))
        if because:
            yield document.problem(("try_first", i), f"try_first: this point is forbidden below, because {because}")
    for i, rule in enumerate(space.forbid):
        yield from _rule_contradictions(document, space, rule, ("forbid", i))
    if next(points(space), None) is None:
        yield document.problem(("forbid",), "forbid: these rules leave nothing to try", key=True)


def _rule_contradictions(
    document: Document, space: Space, rule: Forbidden, path: tuple[str | int, ...]
) -> Iterator[Problem]:
    if not rule.when:
        yield document.problem((*path, "when"), "forbid.when: names no knob, so it would forbid everything")
    yield from _not_offered(document, space, dict(rule.instead), (*path, "instead"))
    changed = {name: values[0] for name, values in rule.when} | dict(rule.instead)
    if rule.instead and rule.holds(changed):
        yield document.problem((*path, "instead"), "forbid.instead: the rule forbids this as well")


def _not_offered(
    document: Document, space: Space, entry: Mapping[str, Any], path: tuple[str | int, ...]
) -> Iterator[Problem]:
    section = ".".join(part for part in path if isinstance(part, str))
    for name, value in entry.items():
        offered = space.choices.get(name)
        if offered is None:
            message = f"{section}: {name} is no knob of this space. Its knobs: {', '.join(space.choices)}"
            yield document.problem((*path, name), message, key=True)
        elif value not in offered:
            message = f"{section}.{name}: {_word(value)} is not among this knob's choices: "
            yield document.problem((*path, name), message + ", ".join(map(_word, offered)))


def _whole(space: Space, entry: Mapping[str, Any]) -> dict[str, Any]:
    return {knob.name: entry.get(knob.name, knob.default) for knob in space.knobs}


def _word(value: Any) -> str:
    """A value as the file spells it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _kind(name: str) -> Any:
    if name in LEAST:
        return Annotated[int, Field(strict=True, ge=LEAST[name])]
    return Annotated[bool, Field(strict=True)] if KINDS[name] is bool else KINDS[name]


def _one_or_more(kind: Any) -> Any:
    """A list, or one value that stands for a list of one."""
    as_list = BeforeValidator(lambda v: v if isinstance(v, list) else [v], json_schema_input_type=kind | list[kind])
    return Annotated[list[kind], Field(min_length=1), as_list]


def _per_knob(model: str, shape: Callable[[Any], Any]) -> Any:
    """A mapping that may name any knob, each with a value of the knob's own kind in the given shape."""
    fields: dict[str, Any] = {name: (shape(_kind(name)), Field(default_factory=lambda: None)) for name in KINDS}
    return create_model(model, __config__=_NO_OTHER_KEYS, **fields)


_NO_OTHER_KEYS = ConfigDict(extra="forbid")
_Text = Annotated[str, Field(min_length=1, pattern=r"\S")]
_Choices = _per_knob("Choices", lambda kind: Annotated[list[kind], Field(min_length=1)])
_Entry = _per_knob("Point", lambda kind: kind)
_When = _per_knob("When", _one_or_more)

_Rule: Any = create_model(
    "Rule",
    __config__=_NO_OTHER_KEYS,
    when=(_When, Field(description="The rule holds where every knob has the value, or one of the values, given here.")),
    instead=(_Entry, Field(default=None, description="The choice that loses nothing; without it the rule is lifted.")),
    because=(_Text, Field(description="Why, with a source.")),
)
_SpaceFile: type[BaseModel] = create_model(
    "SearchSpace",
    __config__=_NO_OTHER_KEYS,
    schema_=(Literal["amptune.space/1"], Field(alias="schema")),
    architecture=(_Text, Field(description="The name of this space.")),
    compute_capability=(list[Annotated[str, Field(pattern=r"^\d+\.\d+$")]], Field(default=[])),
    knobs=(_Choices, Field(description="What may be set, and to what.")),
    try_first=(list[_Entry], Field(default=[], description="The most promising points; knobs left out as stock.")),
    forbid=(list[_Rule], Field(default=[], description="What is not to be tried, and why.")),
)
_ADAPTER = TypeAdapter(_SpaceFile)
