"""A job: what a tuning run does next, with the policies that it is about; or the answer, when nothing is left."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from amptune.policy.serialization import policy_to_dict
from amptune.policy.settings import Policy

__all__ = ["Answer", "Job", "JobKind"]

JobKind = Literal[
    "study",
    "build",
    "batch size",
    "compile",
    "trial",
    "numerics",
    "cure",
    "modules",
    "wait",
    "graph",
    "comparison",
    "loader",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job, which is expected to take `seconds` and may take `limit_s`.

    A "trial" without a policy measures what the user's sampler proposes. A "comparison" is a round, in `fresh`
    processes or in those that run. "numerics" judges a policy, "graph" a compiled one with its graph; "modules" times
    each module by itself, "loader" tries settings of the user's DataLoader.
    """

    kind: JobKind
    policies: tuple[Policy, ...] = ()
    seconds: float
    limit_s: float
    fresh: bool = False

    @property
    def what(self) -> str:
        """The subject of the job, in words."""
        if self.kind == "comparison":
            count = len(self.policies)
            return f"{count} {'policy' if count == 1 else 'policies'}{' in fresh processes' if self.fresh else ''}"
        match self.kind, self.policies:
            case "study", _:
                return "the study"
            case "build", _:
                return "the workload"
            case "batch size", [policy]:
                return f"the largest batch under {policy}"
            case "modules", _:
                return "the modules by themselves"
            case "loader", [policy]:
                return f"settings of the loader under {policy}"
            case "wait", _:
                return "for a graph"
            case "trial", []:
                return "what the sampler proposes"
            case _, [policy, *_]:
                return str(policy)
            case _:
                return ""

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for the timeline of a run."""
        return {
            "stage": self.kind,
            "what": self.what,
            "policies": [policy_to_dict(policy) for policy in self.policies],
            "expected_s": round(self.seconds, 3),
            "fresh": self.fresh,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The end of a run: nothing more is worth its time; `because` says in words why."""

    because: str
