"""Rows of comparisons that an earlier amptune kept in a file beside the study."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from amptune.measure.results.outcome import outcome_from_dict
from amptune.policy.serialization import policy_from_dict
from amptune.search.table.row import Row

__all__ = ["FILE_NAME", "former_rows", "row_of"]

FILE_NAME = "comparisons.jsonl"
# Such lines have no time. A block took about this long.
_BLOCK_S = 1.0


def former_rows(folder: Path, runs: Collection[str]) -> list[Row]:
    """Returns the rows of these runs, in the order they were measured; [] if there is no such file."""
    try:
        lines = (folder / FILE_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [row for number, line in enumerate(lines) for row in _rows(line, number) if row.run in runs]


def row_of(data: Mapping[str, Any], number: int) -> Row:
    """Returns a line as a row. Raises `LookupError`, `TypeError` or `ValueError` for anything else."""
    return Row(
        policy=policy_from_dict(data["policy"]),
        outcome=outcome_from_dict(data["outcome"]),
        run=str(data["run"]),
        launch=f"comparison {data['comparison']}, {data['launch']}",
        moment_s=_BLOCK_S * number,
    )


def _rows(line: str, number: int) -> Iterator[Row]:
    """Yields nothing for a line that a crash has cut, or that has settings or figures of another amptune."""
    try:
        yield row_of(json.loads(line), number)
    except (LookupError, TypeError, ValueError):
        return
