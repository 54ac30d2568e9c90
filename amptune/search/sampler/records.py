"""Records that a study keeps: its tuning runs and their decisions, its trials, its judgements. Values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amptune.measure.results.outcome import outcome_from_dict
from amptune.policy.findings import Finding
from amptune.policy.serialization import adapter_for, finite, policy_from_dict, policy_to_dict, text
from amptune.policy.settings import Policy
from amptune.search.gate.judgement import Judgement
from amptune.search.gate.judgements import Judgements
from amptune.search.table.effects import Machine, machine_of
from amptune.search.table.objective import Objective
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

__all__ = ["OF_A_TRIAL", "READERS", "GateRecord", "StudyRecord", "TuningRecord", "findings_from", "without_password"]

# What a study keeps of a tuning run as it is.
_AS_THEY_ARE = ("run", "began", "workload", "target", "folder", "hardware", "batch_size", "device", "memory_mib")
# Figures of a judgement that a study keeps.
MOST_WORST = 30


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
class GateRecord:
    """The numerics gate's result for a policy: whether it is as good as FP32, and the share it uses of the limits.

    `worst` are the figures nearest to their limits, one a module; `losses` is the policy's loss curve there,
    `losses_fp32` that of FP32 and of its replicas. A study of an earlier amptune has none of these.
    """

    policy: Policy
    passes: bool
    used: float
    words: str
    worst: tuple[Finding, ...] = ()
    losses: tuple[float, ...] = ()
    losses_fp32: tuple[tuple[float, ...], ...] = ()

    @staticmethod
    def of(judgement: Judgement) -> GateRecord:
        return GateRecord(
            policy=judgement.policy,
            passes=judgement.passes,
            used=judgement.used,
            words=str(judgement),
            worst=judgement.worst[:MOST_WORST],
            losses=judgement.parity.losses,
            losses_fp32=judgement.parity.losses_fp32,
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for the study; `from_dict` is the inverse."""
        return {
            "policy": policy_to_dict(self.policy),
            "passes": self.passes,
            "used": self.used,
            "words": self.words,
            "worst": [finding.as_dict() for finding in self.worst],
            "losses": _short(self.losses),
            "losses_fp32": [_short(losses) for losses in self.losses_fp32],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> GateRecord:
        worst = tuple(map(Finding.from_dict, data.get("worst", ())))
        read = {**data, "policy": policy_from_dict(data["policy"]), "worst": worst}
        return adapter_for(GateRecord).validate_python(read)  # type: ignore[no-any-return]


def _short(losses: Sequence[float]) -> list[float]:
    """Returns the losses to six digits, which is what a chart shows of them."""
    return [float(f"{loss:.6g}") for loss in losses]


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
    judged: tuple[GateRecord, ...] = ()
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
    def judgements(self) -> Judgements[GateRecord]:
        none: Judgements[GateRecord] = Judgements(self.last.baseline)
        return none.also(*self.judged)


def findings_from(data: Iterable[Mapping[str, Any]]) -> tuple[Finding, ...]:
    """Reads the findings of a tuning run."""
    return tuple(map(Finding.from_dict, data))


OF_A_TRIAL = {"policy", "outcome", "seconds", "run", "moment_s"}
# What reads an attribute of a study or of a trial, by its name, and raises an error for what amptune does not write.
READERS: dict[str, Callable[[Any], Any]] = {
    "tuning": TuningRecord.from_dict,
    "judged": GateRecord.from_dict,
    "row": Row.from_dict,
    "timeline": tuple,
    "findings": findings_from,
    "policy": policy_from_dict,
    "outcome": outcome_from_dict,
    "seconds": finite,
    "moment_s": finite,
    "run": text,
    "worker": text,
    "alive": finite,
}


def without_password(where: str) -> str:
    """Returns a database URL without its password, to be shown in a page or a command; a folder unchanged."""
    where = re.sub(r"(://[^:/]*):.*@", r"\1:***@", where)
    return re.sub(r"([?&]\w*(?:password|passwd|pwd)=)[^&]*", r"\1***", where)
