"""Raw samples of the comparisons, one line per measurement, from which a claim can be computed again."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from amptune.measure.results.outcome import Outcome, outcome_from_dict, outcome_to_dict
from amptune.policy.serialization import policy_from_dict, policy_to_dict
from amptune.policy.settings import Policy
from amptune.search.events import ComparisonStarted, ContenderMeasured, Event, Observer, Stage
from amptune.search.table.objective import Objective
from amptune.search.table.ratio import Round

__all__ = [
    "FILE_NAME",
    "KeptComparison",
    "comparisons_of",
    "from_line",
    "keeping_samples",
    "read_comparisons",
    "to_line",
]

FILE_NAME = "comparisons.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptComparison:
    """One comparison of a tuning run as it was kept, with the rounds that were measured."""

    run: str
    stage: Stage
    rounds: tuple[Round, ...]

    def by(self, objective: Objective) -> KeptComparison:
        """Returns the comparison with its rounds compared by another objective."""
        return replace(self, rounds=tuple(replace(one, objective=objective) for one in self.rounds))


def keeping_samples(folder: Path, observer: Observer, run: str = "") -> Observer:
    """Returns an observer that also appends contenders' blocks to `comparisons.jsonl`; a full disk loses only those.

    Each line has its tuning `run` and the number of the comparison within that run.
    """
    started: list[ComparisonStarted] = []

    def observe(event: Event) -> None:
        if isinstance(event, ComparisonStarted):
            started.append(event)
        if isinstance(event, ContenderMeasured):
            of = {"run": run, "comparison": len(started)}
            _append(folder / FILE_NAME, json.dumps({**of, **to_line(event)}))
        observer(event)

    return observe


def to_line(event: ContenderMeasured) -> dict[str, Any]:
    """Returns the event as plain data; `from_line` is the inverse."""
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


def read_comparisons(folder: Path, runs: Collection[str]) -> tuple[KeptComparison, ...]:
    """Returns these runs' comparisons from a study's folder, in the order they were made; () if there is no file."""
    try:
        lines = (folder / FILE_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    kept = (data for data in map(_parsed, lines) if data.get("run") in runs)
    return comparisons_of(data for data in kept if _is_whole(data))


def comparisons_of(lines: Iterable[Mapping[str, Any]]) -> tuple[KeptComparison, ...]:
    """Returns the comparisons from lines as they were kept; lines of one comparison must be consecutive."""
    groups = groupby(lines, key=lambda data: (data["run"], data["comparison"]))
    blocks = [(key[0], list(map(from_line, group))) for key, group in groups]
    return tuple(KeptComparison(run=run, stage=some[0].stage, rounds=tuple(_rounds(some))) for run, some in blocks)


def _rounds(blocks: Iterable[ContenderMeasured]) -> Iterator[Round]:
    """Groups blocks, in the order they were measured, into rounds; a policy that comes again begins a new one."""
    launch, outcomes = 0, dict[Policy, Outcome]()
    for block in blocks:
        if outcomes and (block.launch != launch or block.policy in outcomes):
            yield Round(launch=launch, outcomes=outcomes)
            outcomes = {}
        launch = block.launch
        outcomes[block.policy] = block.outcome
    if outcomes:
        yield Round(launch=launch, outcomes=outcomes)


def _parsed(line: str) -> dict[str, Any]:
    """Returns {} for a broken line: a crash may have cut it, and it is one sample of many."""
    try:
        data = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return data if isinstance(data, dict) else {}


def _is_whole(data: Mapping[str, Any]) -> bool:
    """Returns True if this amptune understands the block; one with settings or figures of another is left out."""
    try:
        from_line(data)
    except (LookupError, TypeError, ValueError):
        return False
    return "comparison" in data


def _append(path: Path, line: str) -> None:
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    except OSError:
        return  # samples are only the evidence of a claim, so the tuning goes on
