"""Raw samples of the comparisons, a line as each is measured: what a claim can be computed from again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from amptune.measure.outcome import outcome_from_dict, outcome_to_dict
from amptune.policy.wire import policy_from_dict, policy_to_dict
from amptune.search.events import ContenderMeasured, Event, Observer

__all__ = ["FILE_NAME", "from_line", "keeping_samples", "to_line"]

FILE_NAME = "comparisons.jsonl"


def keeping_samples(folder: Path, observer: Observer) -> Observer:
    """The observer, and every contender's block appended to `comparisons.jsonl`; a full disk loses those alone."""

    def observe(event: Event) -> None:
        if isinstance(event, ContenderMeasured):
            _append(folder / FILE_NAME, json.dumps(to_line(event)))
        observer(event)

    return observe


def to_line(event: ContenderMeasured) -> dict[str, Any]:
    """The event as plain data; `from_line` is the inverse."""
    return {
        "stage": event.stage,
        "launch": event.launch,
        "policy": policy_to_dict(event.policy),
        "outcome": outcome_to_dict(event.outcome),
    }


def from_line(data: Mapping[str, Any]) -> ContenderMeasured:
    return ContenderMeasured(
        stage=data["stage"],
        launch=data["launch"],
        policy=policy_from_dict(data["policy"]),
        outcome=outcome_from_dict(data["outcome"]),
    )


def _append(path: Path, line: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError:
        return  # evidence of the claim, not the claim: the tuning goes on
