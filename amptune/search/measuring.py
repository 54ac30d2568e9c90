"""Rounds: policies measured in turn, in fresh processes or in those that run, each block a row of the table.

What is timed is a turn of the user's training loop; steps by themselves if the loop waits for its data, or the loader
fails.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from amptune.measure.evaluator import Evaluator
from amptune.measure.results.outcome import ENERGY_S, LOADER_FAILED, Effort, Failure, Outcome
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.events import ContenderMeasured, Observer, Stage
from amptune.search.plan.budget import SHORT_S, Budget
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.row import Row

__all__ = ["BLOCK", "MEASURING_LIMIT_S", "TURN", "RoundMeasurer", "loader_findings", "turn_of"]

# A block of steps by themselves, and a turn of the user's loop: 30 steps at least, or as many slow ones as fit into the
# time of a warm-up.
BLOCK = Effort(warmup_s=2.0, measure_s=0.4, min_steps=6, precision=0.003, energy_s=ENERGY_S)
TURN = replace(BLOCK, min_steps=30, in_loop=True)
# The longest time limit of a measurement, unless its trial compiles a graph.
MEASURING_LIMIT_S = 120.0
# A worker that dies or hangs once may be an accident; running out of memory is not.
ACCIDENTS = ("crash", "timeout")


def turn_of(step_ms: float) -> Effort:
    """Returns a turn of the user's loop whose steps take so long."""
    in_time = int(1000 * TURN.warmup_s / step_ms)
    return replace(TURN, min_steps=max(BLOCK.min_steps, min(TURN.min_steps, in_time)))


@dataclass(kw_only=True)
class RoundMeasurer:
    """Measures rounds; `keep` takes each row. `running` names the launch of each policy in the processes that run.

    Without `in_loop`, steps are timed by themselves. `launches` counts the rounds in fresh processes.
    """

    evaluator: Evaluator
    budget: Budget
    observer: Observer
    run: str
    keep: Callable[[Row], None]
    purpose: Stage = "comparison"
    objective: Objective = THROUGHPUT
    seed: int = 0
    in_loop: bool = True
    launches: int = 0
    launch_s: float = 0.0
    """The seconds that the last launch took."""

    running: Mapping[Policy, str] = field(default_factory=dict)
    costs_s: dict[Policy, float] = field(default_factory=dict)
    loader_failure: Failure | None = None

    def __post_init__(self) -> None:
        self._order = random.Random(self.seed)  # noqa: S311  # an order of measuring, no secret

    def measure(
        self, policies: Sequence[Policy], steps_ms: Mapping[Policy, float], *, fresh: bool, until_s: float
    ) -> bool:
        """Measures each policy once, the first two before time is short; False if the budget ended the round.

        `steps_ms` are the known mean steps; a policy is not begun that would end after `until_s` spent.
        """
        if fresh:
            before_s = self.budget.spent_s
            self.evaluator.launch(list(policies))
            self.launch_s = self.budget.spent_s - before_s
            self.running = dict.fromkeys(policies, f"{self.purpose} {self.launches}")
            self.launches += 1
        in_turn = self._order.sample(policies, len(policies))
        for policy in sorted(in_turn, key=lambda policy: policy not in policies[:2]):
            began_s = self.budget.spent_s
            if began_s + self.costs_s.get(policy, 0.0) > until_s:
                return False
            outcome = self._outcome(policy, steps_ms.get(policy))
            if outcome is None:
                return False
            if isinstance(outcome, Failure) and outcome.kind == "killed":  # that says nothing about the policy
                continue
            self.costs_s[policy] = self.budget.spent_s - began_s
            launch, moment_s = self.running.get(policy, "search"), self.budget.clock()
            self.keep(Row(policy=policy, outcome=outcome, run=self.run, launch=launch, moment_s=moment_s))
            self.observer(
                ContenderMeasured(stage=self.purpose, launch=self.launches - 1, policy=policy, outcome=outcome)
            )
        return True

    def _outcome(self, policy: Policy, step_ms: float | None) -> Outcome | None:
        """Returns None if the budget, not the policy, cut the measurement short: that says nothing about the policy."""
        limit_s = min(MEASURING_LIMIT_S, max(SHORT_S, self.budget.left_s))
        effort = TURN if step_ms is None else turn_of(step_ms)
        effort = effort if self.in_loop and self.loader_failure is None else BLOCK
        effort = self.objective.effort(replace(effort, time_limit_s=limit_s))
        outcome = self.evaluator.measure(policy, effort)
        if isinstance(outcome, Failure) and outcome.exception == LOADER_FAILED:
            self.loader_failure = outcome
            return self._outcome(policy, step_ms)
        is_accident = isinstance(outcome, Failure) and outcome.kind in ACCIDENTS
        if is_accident and not _was_cut(outcome, limit_s) and self.budget.left_s >= SHORT_S:
            limit_s = min(limit_s, self.budget.left_s)
            outcome = self.evaluator.measure(policy, replace(effort, time_limit_s=limit_s))
        return None if _was_cut(outcome, limit_s) else outcome


def _was_cut(outcome: Outcome, limit_s: float) -> bool:
    return isinstance(outcome, Failure) and outcome.kind == "timeout" and limit_s < MEASURING_LIMIT_S


def loader_findings(failure: Failure | None) -> tuple[Finding, ...]:
    """Returns the finding that the user's loader failed, if it did."""
    if failure is None:
        return ()
    message = f"the training loop could not be timed, only steps by themselves: {failure}"
    return (Finding(code="loader-failed", message=message),)
