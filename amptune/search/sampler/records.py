"""Records that a study keeps: its tuning runs and their decisions, its trials, its judgements. Values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from amptune.measure.results.half_effects import Sensitivity
from amptune.policy.findings import Finding
from amptune.policy.serialization import adapter_for, policy_from_dict, policy_to_dict
from amptune.policy.settings import Policy
from amptune.search.gate.judgement import Judgement
from amptune.search.gate.judgements import Judgements
from amptune.search.table.effects import Machine, machine_of
from amptune.search.table.objective import Objective
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

__all__ = [
    "READERS",
    "Claim",
    "StudyRecord",
    "TuningRecord",
    "WorkerRecord",
    "findings_from",
    "without_password",
]

# A policy, or the name of something else that one worker alone is to do.
Claim = Policy | str

# What a study keeps of a tuning run as it is.
_AS_THEY_ARE = ("run", "began", "workload", "target", "folder", "hardware", "batch_size", "device", "memory_mib")


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

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for the study; `from_dict` is the inverse."""
        return {
            **{name: getattr(self, name) for name in _AS_THEY_ARE},
            "baseline": policy_to_dict(self.baseline),
            "objective": self.objective.name,
            "least_speed": self.objective.least_speed,
            "options": list(self.options),
            "arguments": list(self.arguments),
            "software": dict(self.software),
            "valid_for": dict(self.valid_for),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> TuningRecord:
        read = {
            **{name: data[name] for name in (*_AS_THEY_ARE, "options", "arguments")},
            "baseline": policy_from_dict(data["baseline"]),
            "objective": Objective(data["objective"], data["least_speed"]),
            "software": tuple(data["software"].items()),
            "valid_for": tuple(data["valid_for"].items()),
        }
        return adapter_for(TuningRecord).validate_python(read)  # type: ignore[no-any-return]


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
    """One worker's word of itself: what it claims, and the policies whose graphs it compiles; `beats` count on."""

    beats: int = 0
    claims: tuple[Claim, ...] = ()
    compiling: tuple[Claim, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for the study; `from_dict` is the inverse."""
        return {
            "beats": self.beats,
            "claims": list(map(_claim_to_plain, self.claims)),
            "compiling": list(map(_claim_to_plain, self.compiling)),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> WorkerRecord:
        claims, compiling = (tuple(map(_claim_from_plain, data[name])) for name in ("claims", "compiling"))
        return WorkerRecord(beats=int(data["beats"]), claims=claims, compiling=compiling)


def _claim_to_plain(claim: Claim) -> Any:
    return claim if isinstance(claim, str) else policy_to_dict(claim)


def _claim_from_plain(plain: Any) -> Claim:
    return plain if isinstance(plain, str) else policy_from_dict(plain)


def findings_from(data: Iterable[Mapping[str, Any]]) -> tuple[Finding, ...]:
    """Reads the findings of a tuning run."""
    return tuple(map(Finding.from_dict, data))


def sensitivity_from(data: Any) -> Sensitivity:
    """Reads the times of modules."""
    return adapter_for(Sensitivity).validate_python(data)  # type: ignore[no-any-return]


# Readers of a study's attributes by the first word of their names; they raise errors for what amptune does not write.
READERS: dict[str, Callable[[Any], Any]] = {
    "tuning": TuningRecord.from_dict,
    "judged": Judgement.from_dict,
    "row": Row.from_dict,
    "sensed": sensitivity_from,
    "timeline": tuple,
    "findings": findings_from,
    "worker": WorkerRecord.from_dict,
}


def without_password(where: str) -> str:
    """Returns a database URL without its password, to be shown in a page or a command; a folder unchanged."""
    where = re.sub(r"(://[^:/]*):.*@", r"\1:***@", where)
    return re.sub(r"([?&]\w*(?:password|passwd|pwd)=)[^&]*", r"\1***", where)
