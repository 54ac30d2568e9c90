"""A check of the tuner's samples per second against the workload's own training loop."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from amptune.errors import StudyError
from amptune.measure.results.loop_timing import LoopTiming, compare_with_loop
from amptune.measure.results.outcome import Failure
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.decide.decision import Decision, in_order
from amptune.search.plan.budget import Budget
from amptune.search.plan.stages import SHORTEST_LOOP_S, loop_s

__all__ = ["Trainer", "checked_in_a_loop"]

# Extra time, beyond the budget, for a loop whose loader is slow to start.
GRACE_S = 10.0


class Trainer(Protocol):
    """An object that runs the workload's own training loop."""

    def train(self, policy: Policy, seconds: float, limit_s: float) -> LoopTiming | Failure: ...


def checked_in_a_loop(trainer: Trainer, decision: Decision, budget: Budget) -> Decision:
    """Returns the decision with `evidence.end_to_end` and the findings of the loop, if the budget is enough for one.

    A loop that fails becomes a finding: the policy and its claim do not depend on the loop.
    """
    seconds = min(loop_s(budget), budget.left_s) / 2
    samples_per_s = decision.verdict.winner.samples_per_s
    if seconds < SHORTEST_LOOP_S or samples_per_s is None:
        return decision
    try:
        timing = trainer.train(decision.verdict.winner.policy, seconds, max(budget.left_s, 0.0) + GRACE_S)
    except StudyError as error:  # no worker can be started any more
        timing = Failure(kind="crash", message=str(error))
    if isinstance(timing, Failure):
        finding = Finding(code="end-to-end-failed", message=f"the training loop with fresh data failed: {timing}")
        return decision.with_findings([finding])
    told = decision.with_findings(compare_with_loop(timing, samples_per_s=samples_per_s))
    evidence = told.policy_file.evidence.copy()
    evidence["end_to_end"] = _figures(timing)
    return told.with_evidence(in_order(evidence))


def _figures(timing: LoopTiming) -> dict[str, Any]:
    """Returns the loop's figures with four significant digits."""
    found = {name: value for name, value in asdict(timing).items() if value is not None}
    return {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in found.items()}
