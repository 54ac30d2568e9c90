"""What a study says of itself: its tuning runs and what they decided, its trials, what was judged. Values."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from amptune.policy.settings import Policy
from amptune.policy.wire import policy_from_dict, policy_to_dict
from amptune.search.gate import Judgement
from amptune.search.judging import graphs_like, is_exempt, numerics_of_policy, without_graph
from amptune.search.objective import Objective
from amptune.search.ratios import Ratio
from amptune.search.trial import Trial

__all__ = ["Basis", "Choice", "Judged", "StudyRecord", "TuningRecord", "without_password"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRecord:
    """One tuning run: what was tuned, where, and against what. `began` is UTC, ISO 8601.

    `target` is what the command line called the workload, None where it came from Python; raw samples of the
    comparisons are in `folder`. `options` are those of `amptune tune` that make it the same study.
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

    def as_dict(self) -> dict[str, Any]:
        """As the study keeps it; `from_dict` is the inverse."""
        return {
            "run": self.run,
            "began": self.began,
            "workload": self.workload,
            "target": self.target,
            "folder": self.folder,
            "hardware": self.hardware,
            "batch_size": self.batch_size,
            "baseline": policy_to_dict(self.baseline),
            "objective": self.objective.name,
            "least_speed": self.objective.least_speed,
            "options": list(self.options),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> TuningRecord:
        rest = {name: data[name] for name in ("run", "began", "workload", "target", "folder", "hardware", "batch_size")}
        return TuningRecord(
            **rest,
            baseline=policy_from_dict(data["baseline"]),
            objective=Objective(data["objective"], data["least_speed"]),
            options=tuple(map(str, data.get("options", ()))),
        )


# What a choice rests on: a comparison in launches enough, one in fewer, a single trial, or that nothing was better.
Basis = Literal["comparison", "few-launches", "trial", "nothing-better"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A policy, and what it gained over the baseline; without an interval where single trials say it."""

    policy: Policy
    gain: Ratio
    speedup: Ratio
    basis: Basis

    def as_dict(self) -> dict[str, Any]:
        """As the study keeps it; `from_dict` is the inverse."""
        ratios = {"gain": _ratio_to_dict(self.gain), "speedup": _ratio_to_dict(self.speedup)}
        return {"policy": policy_to_dict(self.policy), **ratios, "basis": self.basis}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Choice:
        return Choice(
            policy=policy_from_dict(data["policy"]),
            gain=_ratio_from_dict(data["gain"]),
            speedup=_ratio_from_dict(data["speedup"]),
            basis=data["basis"],
        )


def _ratio_to_dict(ratio: Ratio) -> dict[str, Any]:
    """JSON knows no infinity."""
    return {**asdict(ratio), "high": None if math.isinf(ratio.high) else ratio.high}


def _ratio_from_dict(data: Mapping[str, Any]) -> Ratio:
    return Ratio(**{**data, "high": math.inf if data["high"] is None else data["high"]})


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the numerics gate said of a policy: whether it is as good as FP32, how much of what is allowed it uses."""

    policy: Policy
    passes: bool
    used: float
    words: str

    @staticmethod
    def of(judgement: Judgement) -> Judged:
        return Judged(policy=judgement.policy, passes=judgement.passes, used=judgement.used, words=str(judgement))

    def as_dict(self) -> dict[str, Any]:
        """As the study keeps it; `from_dict` is the inverse."""
        return {"policy": policy_to_dict(self.policy), "passes": self.passes, "used": self.used, "words": self.words}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Judged:
        return Judged(**{**data, "policy": policy_from_dict(data["policy"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRecord:
    """A study read back: its tuning runs, the last one last, and all that was tried in them.

    `where` is its folder or database URL; `decided` is what the runs chose, by their names. What stands `outside` the
    space that was searched, the user's wishes among it, was measured to be compared with, and cannot win.
    """

    name: str
    where: str
    tunings: tuple[TuningRecord, ...]
    trials: tuple[Trial, ...]
    judged: tuple[Judged, ...] = ()
    outside: frozenset[Policy] = frozenset()
    decided: Mapping[str, Choice] = field(default_factory=dict)

    @property
    def last(self) -> TuningRecord:
        return self.tunings[-1]

    def judgement_of(self, policy: Policy) -> Judged | None:
        """The last one of a policy with the same numerics; of one that is compiled, else the one without its graph."""
        return self._judged_as(policy) or self._judged_as(without_graph(policy))

    def has_rejected(self, policy: Policy) -> bool:
        """Whether it was judged and did not pass; or its dtype did not, and it lacks the rules that cure that."""
        plain, baseline = without_graph(policy), self.last.baseline
        found = [] if is_exempt(plain, baseline) else [self._judged_as(plain)]
        if not is_exempt(policy, baseline):
            found.append(next(graphs_like(policy, reversed(self.judged)), None))
        if found and not any(found) and not any(rule.is_needed for rule in policy.fp32_modules):
            found = [self._judged_as(policy.recipe)]
        return any(judged is not None and not judged.passes for judged in found)

    def has_passed(self, policy: Policy) -> bool:
        """Whether there was nothing to judge, or it was found to be as good as FP32."""
        judged = self.judgement_of(policy)
        return is_exempt(without_graph(policy), self.last.baseline) if judged is None else judged.passes

    def _judged_as(self, policy: Policy) -> Judged | None:
        own = numerics_of_policy(policy)
        return next((one for one in reversed(self.judged) if numerics_of_policy(one.policy) == own), None)


def without_password(where: str) -> str:
    """A database URL as it may be passed on, in a page or a command to repeat; a folder as it is."""
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:***@", where)
