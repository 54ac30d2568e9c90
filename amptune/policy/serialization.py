"""Policies as plain data, in the form of YAML and JSON files, and the JSON Schemas of these files.

Both follow field by field from the dataclasses. The classes here are a file's form: they hold `Policy`'s fields and the
keys that only a file has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from amptune.policy.former_settings import FORMER, taken_out
from amptune.policy.policy_file import Evidence, PolicyFile
from amptune.policy.settings import KNOBS, Policy

if TYPE_CHECKING:
    import pydantic

__all__ = [
    "POLICY_SCHEMA",
    "PROFILE_SCHEMA",
    "PolicyBody",
    "PolicyDocument",
    "ProfileDocument",
    "adapter_for",
    "finite",
    "in_one_line",
    "policy_file_from",
    "policy_file_to_dict",
    "policy_from_dict",
    "policy_to_dict",
    "schema_of",
    "text",
]

POLICY_SCHEMA = "amptune.policy/1"
PROFILE_SCHEMA = "amptune.profile/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBody(Policy):
    """A policy as an entry of a profile holds it; `compile: default` of the scope `blocks` or `step` is that."""

    schema: Literal["amptune.policy/1"] | None = None
    name: str | None = None
    valid_for: dict[str, str] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=Evidence)
    compile_scope: Literal["model", "blocks", "step"] = "model"

    def __post_init__(self) -> None:
        """Raises `ValueError` as `Policy` does, and for a scope that the mode does not have."""
        Policy.__post_init__(self)
        if self.compile_scope != "model" and self.compile not in ("default", self.compile_scope):
            raise ValueError(f"compile_scope: {self.compile_scope} needs compile: default, not {self.compile}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDocument(PolicyBody):
    """A policy file: the same, and the schema is required."""

    schema: Literal["amptune.policy/1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryBody:
    """An entry of a profile."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    match: dict[str, str]
    policy: PolicyBody


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileDocument:
    """A profile file."""

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    schema: Literal["amptune.profile/1"]
    entries: list[EntryBody]
    default: PolicyBody | None = None


@cache
def adapter_for(kind: type) -> pydantic.TypeAdapter[Any]:
    """Returns pydantic's validator for a class, built on first use because building and importing are slow."""
    import pydantic
    import pydantic_core

    try:
        return pydantic.TypeAdapter(kind)
    except pydantic_core.SchemaError as error:
        if "KeyboardInterrupt" in str(error):  # of a Ctrl-C meanwhile it makes an error of its own
            raise KeyboardInterrupt from None
        raise


def policy_to_dict(policy: Policy) -> dict[str, Any]:
    """Returns the settings that differ from stock PyTorch, and those always written; `policy_from_dict` reverses it."""
    plain = asdict(policy)
    written = [knob.name for knob in KNOBS if knob.is_always_written or knob.departs(policy)]
    return {name: _without_defaults(plain[name]) for name in written}


def policy_from_dict(data: Mapping[str, Any]) -> Policy:
    """Returns the policy. Raises `ValueError` for data `policy_to_dict` never writes, or that older ones wrote."""
    if former := [name for name in data if name in FORMER]:
        raise ValueError(taken_out(former[0]))
    return adapter_for(Policy).validate_python(dict(data))  # type: ignore[no-any-return]


def finite(value: Any) -> float:
    """Returns the number. Raises `ValueError` for anything else, and for one without a finite value."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.60} is no finite number")
    return float(value)


def text(value: Any) -> str:
    """Returns the text. Raises `ValueError` for anything else."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.60} is no text")
    return value


def in_one_line(error: Exception) -> str:
    """Returns one line about an error in data: pydantic's first problem with its place, or the error's own text."""
    import pydantic

    if isinstance(error, pydantic.ValidationError):
        first = error.errors()[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    words = f"there is no {error}" if isinstance(error, KeyError) else str(error)
    return " ".join(words.split()) or type(error).__name__


def policy_file_to_dict(policy_file: PolicyFile, *, schema: bool = True) -> dict[str, Any]:
    """Returns a policy file's content in the order it is written; `policy_file_from` reverses it."""
    head: dict[str, Any] = {"schema": POLICY_SCHEMA} if schema else {}
    if policy_file.name is not None:
        head["name"] = policy_file.name
    tail = {"valid_for": dict(policy_file.valid_for), "evidence": dict(policy_file.evidence)}
    return head | policy_to_dict(policy_file.policy) | {name: value for name, value in tail.items() if value}


def policy_file_from(body: PolicyBody) -> PolicyFile:
    """Splits a file's single mapping into the policy's settings and the rest."""
    settings = {f.name: getattr(body, f.name) for f in fields(Policy)}
    if body.compile_scope != "model":
        settings["compile"] = body.compile_scope
    rest = {f.name: getattr(body, f.name) for f in fields(PolicyFile) if f.name not in ("policy", "origin")}
    return PolicyFile(policy=Policy(**settings), **rest)


def _without_defaults(value: Any) -> Any:
    """Returns rules and their reasons without entries that are None or False."""
    if isinstance(value, tuple | list):
        return [_without_defaults(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_defaults(item) for name, item in value.items() if item is not None and item is not False}
    return value


_KINDS = {"policy": PolicyDocument, "profile": ProfileDocument}


def schema_of(kind: Literal["policy", "profile"]) -> dict[str, Any]:
    """Returns the JSON Schema of a policy or a profile file."""
    schema: dict[str, Any] = adapter_for(_KINDS[kind]).json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"amptune {kind}", **schema}
