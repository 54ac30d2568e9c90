"""Search space files: where they are, what they must look like, and which one is this machine's."""

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
    Choice,
    Forbidden,
    Knob,
    Point,
    Space,
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
            f"Give the path of a file, or one of {', '.join(known)}"
        )
    return _folder(package) / f"{architecture}.yaml"


def load_space(name_or_path: str | Path) -> Space:
    """A search space by name, or from a file. Raises `FileFormatError` with every problem in it."""
    is_name = isinstance(name_or_path, str) and (name_or_path in names() or not Path(name_or_path).exists())
    is_path = isinstance(name_or_path, str) and (Path(name_or_path).suffix or len(Path(name_or_path).parts) > 1)
    document = read(find(str(name_or_path)) if is_name and not is_path else name_or_path)
    space = _space_from(validate(document, _ADAPTER).model_dump(by_alias=True, exclude_unset=True))
    problems = sorted(_contradictions(document, space), key=lambda problem: (problem.line or 0, problem.column or 0))
    if problems:
        raise FileFormatError(problems)
    return space
