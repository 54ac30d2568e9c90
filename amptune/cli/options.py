"""Option types and outputs that several commands share."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import click

__all__ = ["SECONDS", "json_option", "print_json"]


class _Seconds(click.ParamType[float]):
    """A duration: `90`, `90s`, `5m`, `1h`."""

    name = "duration"
    _UNITS: ClassVar = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h|)\s*", str(value))
        seconds = float(match[1]) * self._UNITS[match[2]] if match else 0.0
        if seconds <= 0:
            self.fail(f"{value!r} is no duration; write 90s, 5m or 1h", param, ctx)
        return seconds


SECONDS = _Seconds()

F = TypeVar("F", bound=Callable[..., Any])


def json_option(function: F) -> F:
    """Adds `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(function)


def print_json(schema: str, data: Mapping[str, Any]) -> None:
    """One versioned object on stdout; a number that JSON does not have (an open interval's end) is null."""
    click.echo(json.dumps({"schema": schema, **_finite(data)}, indent=2, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
