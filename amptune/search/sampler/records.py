"""Records that a study keeps: its tuning runs and their decisions, its trials, its judgements. Values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from amptune.measure.results.half_effects import Sensitivity
from amptune.policy.findings import Finding
from amptune.policy.serialization import adapter_for
from amptune.policy.settings import Policy
from amptune.search.gate.judgement import Judgement
from amptune.search.gate.judgements import Judgements
from amptune.search.table.effects import Machine, machine_of
from amptune.search.table.objective import Objective
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

__all__ = [
    "KINDS",
    "Claim",
    "StudyRecord",
    "TuningRecord",
    "WorkerRecord",
    "from_plain",
    "kind_of",
    "to_plain",
    "without_password",
]

# A policy, or the name of something else that one worker alone is to do.
Claim = Policy | str


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRecord:
    """One tuning run: what was tuned, where, and against which baseline. `began` is UTC, ISO 8601.

    `target` is the workload's name on the command line, None if it came from Python. `folder` has the files of a study
    beside its trials. `options` are those of `amptune tune` that select the same study, `arguments` those of the
    target's script. `software` are the versions of what ran, by name, amptune's among them, `memory_mib` the memory
    that the device had available, `valid_for` the labels of the machines that the answer holds for.
    """

    run: str
    began: str
    workload: str
    target: str | None
    folder: str
    hardware: str
    batch_size: int
    baseline: Policy
    objective: Objective
    options: tuple[str, ...] = ()
    device: str = "cpu"
    arguments: tuple[str, ...] = ()
    software: tuple[tuple[str, str], ...] = ()
    memory_mib: float | None = None
    valid_for: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """A study read back: its tuning runs, the last one last, and all their trials.

    `where` is its folder or database URL; `rows` are the timings that are no trials, `timeline` what the
    last tuning did when, `findings` what it noticed. Policies `outside` the searched
    space, which the user's wishes limit, were measured for comparison and cannot win.
    """

    name: str
    where: str
    tunings: tuple[TuningRecord, ...]
    trials: tuple[Trial, ...]
    judged: tuple[Judgement, ...] = ()
    outside: frozenset[Policy] = frozenset()
    rows: tuple[Row, ...] = ()
    timeline: tuple[Mapping[str, Any], ...] = ()
    findings: tuple[Finding, ...] = ()

    @property
    def table(self) -> tuple[Row, ...]:
        """Every timing of the study: its trials and its other rows."""
        return (*(trial.row for trial in self.trials), *self.rows)

    @property
    def machine(self) -> Machine:
        return machine_of(self.last.device)

    @property
    def last(self) -> TuningRecord:
        return self.tunings[-1]

    @property
    def judgements(self) -> Judgements:
        return Judgements(self.last.baseline).also(*self.judged)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRecord:
    """One worker's word of itself: what it claims; `beats` count on."""

    beats: int = 0
    claims: tuple[Claim, ...] = ()


# The records among a study's attributes, by the first word of their names.
KINDS: dict[str, Any] = {
    "tuning": TuningRecord,
    "judged": Judgement,
    "row": Row,
    "sensed": Sensitivity,
    "timeline": tuple[dict[str, Any], ...],
    "findings": tuple[Finding, ...],
    "worker": WorkerRecord,
}


def kind_of(attribute: str) -> Any:
    """Returns the kind of record that an attribute of a study is. Raises `ValueError` if it is none of this version."""
    word = attribute.partition(" ")[0]
    if word not in KINDS:
        raise ValueError(f"another version of amptune wrote {attribute!r:.60}")
    return KINDS[word]


def to_plain(kind: Any, record: Any) -> Any:
    """Returns a record of this kind as plain data; `from_plain` is the inverse."""
    if hasattr(kind, "as_dict"):
        return record.as_dict()
    return adapter_for(kind).dump_python(record, mode="json", exclude_defaults=True)


def from_plain(kind: Any, data: Any) -> Any:
    """Reads a record of this kind. Raises an error for anything that `to_plain` does not return."""
    return kind.from_dict(data) if hasattr(kind, "from_dict") else adapter_for(kind).validate_python(data)


def without_password(where: str) -> str:
    """Returns a database URL without its password, to be shown in a page or a command; a folder unchanged."""
    where = re.sub(r"(://[^:/]*):.*@", r"\1:***@", where)
    return re.sub(r"([?&]\w*(?:password|passwd|pwd)=)[^&]*", r"\1***", where)
