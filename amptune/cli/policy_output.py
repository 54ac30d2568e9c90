"""Writes the policy of `amptune tune`, and protects files that `tune` did not write."""

from __future__ import annotations

from pathlib import Path

import click

from amptune.errors import OutputError
from amptune.policy.file_io import require_writable, write
from amptune.policy.file_mark import mark_of, marked

__all__ = ["require_outputs", "require_replaceable", "write_policy"]


def require_outputs(output: str, report: str | None) -> None:
    """Raises an error if a file cannot be written: `OutputError`, or `click.BadParameter` if both are one file."""
    require_writable(output)
    if report is not None:
        require_writable(report)
        if Path(report).resolve() == Path(output).resolve():
            raise click.BadParameter(f"{report} is where the policy is written (-o)", param_hint="--report")


def require_replaceable(output: str, target: str, *, force: bool) -> None:
    """Raises `OutputError` if the policy cannot be written there, or would replace what `tune` did not write.

    It may replace an empty file, and what it wrote for the same target if nobody has edited that since.
    """
    require_writable(output)
    reason = None if force else _reason_to_keep(Path(output), target)
    if reason is not None:
        raise OutputError(f"{output} {reason}; write to another file with -o, or replace this one with --force")


def write_policy(text: str, output: str, target: str) -> None:
    """Writes the text of a policy file, with the mark by which `require_replaceable` knows it. Raises `OutputError`."""
    write(marked(text, target), output)


def _reason_to_keep(path: Path, target: str) -> str | None:
    from amptune.search.request import place_of

    if not path.is_file() or path.stat().st_size == 0:
        return None
    mark = mark_of(path.read_text(encoding="utf-8", errors="replace"))
    if mark is None:
        return "exists, and `amptune tune` did not write it"
    if not mark.is_intact:
        return f"was edited since `amptune tune` wrote it for {mark.target}"
    if place_of(None, mark.target) != place_of(None, target):
        return f"holds the policy of {mark.target}, not of {target}"
    return None
