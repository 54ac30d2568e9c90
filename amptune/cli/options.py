"""Option types and outputs that several commands share."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click
from click.shell_completion import CompletionItem

from amptune.errors import visible
from amptune.policy.knobs.knob import LARGEST

__all__ = [
    "COUNT",
    "FILE",
    "MEMORY",
    "SECONDS",
    "AtLeast",
    "GroupedCommand",
    "json_option",
    "objective_options",
    "print_error",
    "print_json",
    "progress_unless",
    "quiet_option",
    "say",
    "target_argument",
]

if TYPE_CHECKING:
    from amptune.search.events import Observer
    from amptune.search.plan.budget import Budget

    _FloatType = click.ParamType[float]
    _TextType = click.ParamType[str]
else:  # before click 8.4 it takes no type argument
    _FloatType = _TextType = click.ParamType


class _Seconds(_FloatType):
    """A duration in seconds, written `90`, `90s`, `5m` or `1h`."""

    name = "duration"
    _UNITS: ClassVar = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
    _MOST_S = 8760 * 3600.0

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|m|min|h|)\s*", str(value))
        seconds = float(match[1]) * self._UNITS[match[2]] if match else 0.0
        if seconds <= 0:
            self.fail(f"{value!r} is no duration; write 90s, 5m or 1h", param, ctx)
        if seconds > self._MOST_S:
            self.fail("this is more than a year, 8760h", param, ctx)
        return seconds


class _Memory(_FloatType):
    """An amount of memory in MiB, written `60GiB`, `512MiB` or `80GB`."""

    name = "memory"
    _MIB: ClassVar = {"kb": 1e3 / 2**20, "mb": 1e6 / 2**20, "gb": 1e9 / 2**20, "kib": 2**-10, "mib": 1.0, "gib": 2**10}

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?b)\s*", str(value).lower())
        mib = float(match[1]) * self._MIB[match[2]] if match else 0.0
        if not 0 < mib < math.inf:
            self.fail(f"{value!r} is no amount of memory; write 60GiB or 512MiB", param, ctx)
        return mib


class _File(_TextType):
    """A path, a URL or a name, as text; shells complete it as a file."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:  # noqa: ARG002
        return [CompletionItem(incomplete, type="file")]


FILE = _File()
SECONDS = _Seconds()


class AtLeast(click.IntRange):
    """A whole number, and no larger than a file may hold one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        number: int = super().convert(value, param, ctx)
        if number > LARGEST:
            self.fail(f"{number} is more than {LARGEST}.", param, ctx)
        return number


COUNT = AtLeast(1)
MEMORY = _Memory()

F = TypeVar("F", bound=Callable[..., Any])


class GroupedCommand(click.Command):
    """A command whose help lists its options in groups; `groups` maps a heading to names of parameters.

    What is `rare` stands in `--help-all` alone.
    """

    def __init__(
        self, *args: Any, groups: Mapping[str, Sequence[str]], rare: Sequence[str] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.groups, self.rare, self._shows_all = groups, rare, False
        if rare:
            all_help = "Show all options, the rarely used too, and exit."
            self.params.append(
                click.Option(
                    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=self._all, help=all_help
                )
            )

    def _all(self, ctx: click.Context, _: click.Parameter, asked: bool) -> None:
        if asked:
            self._shows_all = True
            click.echo(ctx.get_help())
            ctx.exit()

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes each group's options, and those of no group last."""
        hidden = () if self._shows_all else self.rare
        records = {
            param.name: None if param.name in hidden else param.get_help_record(ctx)
            for param in self.get_params(ctx)
            if isinstance(param, click.Option)
        }
        grouped = {name for names in self.groups.values() for name in names}
        rest = {"Other options": [name for name in records if name not in grouped]}
        for heading, names in {**self.groups, **rest}.items():
            shown = [record for name in names if (record := records[name]) is not None]
            if shown:
                with formatter.section(heading):
                    formatter.write_dl(shown)


def objective_options(default: str | None, help_text: str) -> Callable[[F], F]:
    """Adds `--objective` and `--least-speed`."""

    def add(function: F) -> F:
        objective = click.option(
            "--objective",
            type=click.Choice(["throughput", "memory", "energy"]),
            default=default,
            show_default=default is not None,
            help=help_text,
        )
        least_speed = click.option(
            "--least-speed",
            type=float,
            metavar="SHARE",
            help="Of the baseline's samples per second, with --objective memory. Default: 1.",
        )
        return objective(least_speed(function))

    return add


def target_argument(function: F) -> F:
    """Adds TARGET, and `arguments`: what stands behind `--` for the target's script."""
    arguments = click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENTS]")
    return click.argument("target", type=FILE)(arguments(function))


def json_option(function: F) -> F:
    """Adds `--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")(function)


def quiet_option(function: F) -> F:
    """Adds `-q`."""
    return click.option("-q", "--quiet", is_flag=True, help="Print no progress.")(function)


def progress_unless(quiet: bool, budget: Budget, *, verbose: bool = False) -> AbstractContextManager[Observer]:
    """Returns a context manager that gives an observer: one that prints progress on stderr, or if `quiet` nothing."""
    from amptune.report.progress import progress_for

    return nullcontext(_told_nothing) if quiet else progress_for(sys.stderr, budget, verbose=verbose)


def _told_nothing(_: object) -> None:
    """Takes an event."""


def say(text: str, *, err: bool = False) -> None:
    """Prints a text, on stderr if `err`, with what a terminal would not show escaped: it may come from any file."""
    print(visible(text), file=sys.stderr if err else sys.stdout, flush=True)  # click takes ASCII for UTF-8


def print_json(schema: str, data: Mapping[str, Any]) -> None:
    """Prints one versioned object on stdout; numbers JSON does not have (an open interval's end) become null."""
    click.echo(json.dumps({"schema": schema, **_finite(data)}, indent=2, default=str, allow_nan=False))


def print_error(exit_code: int, code: str, message: str) -> None:
    """Prints the object that stands for an error."""
    finding = {"code": code, "module": None, "message": message}
    print_json("amptune.error/1", {"exit_code": exit_code, "findings": [finding]})


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
