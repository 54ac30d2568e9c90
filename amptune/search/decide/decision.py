"""The decision of a tuning run: the policy that wins, and the figures that its claim rests on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from amptune.hardware.machine import Hardware
from amptune.measure.results.subject import Subject
from amptune.policy.findings import Finding
from amptune.policy.policy_file import Evidence, PolicyFile
from amptune.policy.settings import Policy
from amptune.search.decide.pareto import ParetoPoint
from amptune.search.table.ablation import Ablated
from amptune.search.table.contenders import Contender
from amptune.search.table.objective import Objective
from amptune.search.table.ratio import Ratio
from amptune.search.table.trial import Trial
from amptune.search.table.verdict import Verdict

__all__ = ["Decision", "in_order"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The result of a tuning.

    It is `provisional` if the gain is likely and not confirmed, the policy's numerics were not judged, or the run was
    interrupted. The claim rests on `verdict`. `finalists` are the policies measured more than once, `ablation` says
    what each setting of the winner buys. `amp_recipe` is the better of the compared AMP recipes, or a failure if all of
    them failed. `points` are the trials that ran and are sound, `memory_mib` is the memory that the device had
    available. `timeline` says what was done when, and why. `artifacts` is the file of what torch.compile made of the
    winner, in the study's folder: `amptune.apply` takes it.
    """

    policy_file: PolicyFile
    verdict: Verdict
    finalists: tuple[Contender, ...]
    ablation: tuple[Ablated, ...]
    amp_recipe: Contender | None
    findings: tuple[Finding, ...]
    trials: tuple[Trial, ...]
    points: tuple[ParetoPoint, ...]
    hardware: Hardware
    subject: Subject
    seconds: float
    provisional: bool
    memory_mib: float | None = None
    timeline: tuple[Mapping[str, Any], ...] = ()
    artifacts: Path | None = None

    @property
    def policy(self) -> Policy:
        return self.policy_file.policy

    @property
    def winner(self) -> Policy:
        """The policy as it was measured: its batch size is None if it is the workload's own."""
        return self.verdict.winner.policy

    def with_evidence(self, evidence: Evidence) -> Decision:
        """Returns this decision with `evidence` in its policy file."""
        return replace(self, policy_file=replace(self.policy_file, evidence=evidence))

    def with_findings(self, findings: Iterable[Finding]) -> Decision:
        """Returns this decision with `findings` added after its own, also in its policy file."""
        new = tuple(findings)
        evidence = self.policy_file.evidence.copy()
        evidence["findings"] = [*evidence.get("findings", []), *(finding.as_dict() for finding in new)]
        return replace(self, findings=(*self.findings, *new)).with_evidence(in_order(evidence))

    @property
    def speedup(self) -> Ratio:
        """Samples per second under the policy over those of the baseline."""
        return self.verdict.speedup

    @property
    def gain(self) -> Ratio:
        """The gain by the objective: speedup, or peak memory or energy a sample, the baseline's over the policy's."""
        return self.verdict.gain

    @property
    def objective(self) -> Objective:
        """The objective that the policy was chosen by."""
        return self.verdict.objective

    @property
    def baseline(self) -> Contender:
        return self.verdict.baseline


def in_order(evidence: Evidence) -> Evidence:
    """Returns the evidence with its keys in the order of the format."""
    found: Any = evidence
    return cast("Evidence", {key: found[key] for key in Evidence.__annotations__ if key in found})
