"""Files in a study's folder beside its trials: the times of its modules, and its long loss curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from amptune.measure.results.half_effects import Sensitivity
from amptune.policy.serialization import adapter_for

__all__ = ["LongCurve", "StudyFiles", "files_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LongCurve:
    """The losses of one long training, in FP32 or under a policy, which is named in words."""

    run: Literal["fp32", "policy"]
    policy: str
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyFiles:
    """The times of the modules by what they were measured under, and the curves of the last `verify --numerics`."""

    modules: Mapping[str, Sensitivity] = field(default_factory=dict)
    curves: tuple[LongCurve, ...] = ()


def files_of(folder: Path) -> StudyFiles:
    """Returns the files of a study; what is missing, broken or of another version is left out."""
    return StudyFiles(modules=_modules(folder / "sensitivity.json"), curves=tuple(_curves(folder / "curves.jsonl")))


def _modules(path: Path) -> dict[str, Sensitivity]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))["sensed"]
        return {name: adapter_for(Sensitivity).validate_python(one) for name, one in content.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _curves(path: Path) -> Iterator[LongCurve]:
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            yield LongCurve(run=one["run"], policy=one["policy"], losses=tuple(map(float, one["losses"])))
    except (OSError, ValueError, KeyError, TypeError):
        return
