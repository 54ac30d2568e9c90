"""Narrowing: after the search, rounds of the user's training loop under the policies that may win, in turn.

Each round is the one that tells most about the verdict, until more tell little. If the loop waits for its data, or the
loader fails, steps are timed without it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from amptune.measure.evaluator import Evaluator
from amptune.measure.results.outcome import ENERGY_S, LOADER_FAILED, Effort, Failure, Outcome
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.events import ComparisonStarted, ContenderMeasured, Observer, Stage
from amptune.search.plan.budget import SHORT_S, Budget
from amptune.search.plan.plan import WORTHWHILE, Step
from amptune.search.table.next_rows import NextRound, launch_s, named_by, next_round, round_again
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.row import Row
from amptune.search.table.verdict import Bar, Verdict

__all__ = ["BLOCK", "MEASURING_LIMIT_S", "TURN", "Narrowing", "turn_of"]

# A block of steps by themselves, and a turn of the user's loop: 30 steps at least, or as many slow ones as fit into the
# time of a warm-up.
BLOCK = Effort(warmup_s=2.0, measure_s=0.4, min_steps=6, precision=0.003, energy_s=ENERGY_S)
TURN = replace(BLOCK, min_steps=30, in_loop=True)
# The longest time limit of a measurement, unless its trial compiles a graph.
MEASURING_LIMIT_S = 120.0
# A worker that dies or hangs once may be an accident; running out of memory is not.
ACCIDENTS = ("crash", "timeout")


@dataclass(kw_only=True)
class Narrowing:
    """Rounds of measurements, each chosen by the verdict on all rows so far.

    `verdict` returns it, `keep` adds a row to the table. `bar` says who cannot win. `unseen` returns policies without a
    row that may be better than a leader, `beside` those that are shown beside the winner. `rejects` judges the numerics
    of a leader; the bar then knows the result. A turn takes about `cost_s`, starting a process `start_s`, and loading
    a policy's graph there `load_s`. Judging a leader that a round brings takes `judging_s`; no round is begun that
    leaves less than that, and `reserve_s` besides. `running` names the launch of each policy that a process can measure
    without being started. Without `in_loop`, steps are timed alone. `rounds` counts those in fresh processes so far.
    """

    evaluator: Evaluator
    budget: Budget
    observer: Observer
    run: str
    verdict: Callable[[], Verdict | None]
    keep: Callable[[Row], None]
    stage: Stage = "comparison"
    objective: Objective = THROUGHPUT
    bar: Bar = lambda _: None
    unseen: Callable[[Policy], Iterable[Policy]] = lambda _: ()
    beside: Callable[[Verdict], Sequence[Policy]] = lambda _: ()
    rejects: Callable[[Policy], bool] = lambda _: False
    cost_s: Callable[[Policy], float] = lambda _: BLOCK.warmup_s
    start_s: float = 0.0
    load_s: Callable[[Policy], float] = lambda _: 0.0
    judging_s: Callable[[Policy], float] = lambda _: 0.0
    reserve_s: Callable[[], float] = lambda: 0.0
    running: Mapping[Policy, str] = field(default_factory=dict)
    seed: int = 0
    in_loop: bool = True
    loader_failure: Failure | None = field(default=None, init=False)
    is_over: bool = field(default=False, init=False)
    """True if no round is left to measure, or the budget ended one."""

    rounds: int = field(default=0, init=False)

    _costs_s: dict[Policy, float] = field(default_factory=dict, init=False)
    _announced: set[Policy] = field(default_factory=set, init=False)
    _wanted_by: Verdict | None = field(default=None, init=False)

    def wants(self) -> Step | None:
        """Returns the step that measures the round that tells most; None if more tell little, or none fits."""
        verdict = None if self.is_over else self.verdict()
        chosen = None if verdict is None else self._next(verdict)
        if chosen is None:
            return None
        self._wanted_by = verdict
        return Step(
            stage="comparison",
            what=f"{len(chosen.policies)} policies" + (" in fresh processes" if chosen.fresh else ""),
            seconds=chosen.seconds,
            worth=max(chosen.worth, WORTHWHILE * max(chosen.seconds, 1.0)),
            is_needed=True,
            policies=chosen.policies,
            fresh=chosen.fresh,
        )

    def take(self, step: Step, _limit_s: float) -> None:
        """Judges the leader, then measures the round of a step, or another one if the judgement changed it."""
        verdict = self._judged()
        chosen: NextRound | None = NextRound(policies=step.policies, fresh=step.fresh)
        if verdict is None:
            chosen = None
        elif verdict is not self._wanted_by or step.seconds > self._left_s:
            chosen = self._next(verdict)
        self.is_over = chosen is None or not self._measured(chosen, verdict)

    def round_of(self, policies: Sequence[Policy]) -> None:
        """Measures these policies once each, in fresh processes, whatever the verdict is."""
        self._measured(NextRound(policies=tuple(policies), fresh=True), None)

    def again(self, policies: Sequence[Policy], *, fresh: bool) -> bool:
        """Measures these policies once more, in `fresh` processes or where it tells most; False if the budget ends."""
        verdict = self.verdict()
        if verdict is None:
            return False
        chosen = round_again(
            verdict,
            policies,
            fresh=fresh,
            running=self.running,
            fresh_s=self._fresh_s,
            cost_s=self._cost_s,
            left_s=self._left_s,
        )
        return chosen is not None and self._measured(chosen, verdict)

    def _judged(self) -> Verdict | None:
        """Returns the verdict whose leader has passed the numerics gate."""
        while (verdict := self.verdict()) is not None:
            if verdict.leader is None or not self.rejects(verdict.leader.policy):
                return verdict
        return None

    @cached_property
    def _order(self) -> random.Random:
        return random.Random(self.seed)  # noqa: S311  # an order of measuring, no secret

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The finding that the user's loader failed, if it did."""
        if self.loader_failure is None:
            return ()
        message = f"the training loop could not be timed, only steps by themselves: {self.loader_failure}"
        return (Finding(code="loader-failed", message=message),)

    def _next(self, verdict: Verdict) -> NextRound | None:
        leader = verdict.leader.policy if verdict.leader is not None else verdict.baseline.policy
        seen = {one.policy for one in verdict.contenders if one.failure is not None or one.gain is not None}
        return next_round(
            verdict,
            self.bar,
            beside=self.beside(verdict),
            unseen=[policy for policy in self.unseen(leader) if policy not in seen and self.bar(policy) is None],
            running=self.running,
            fresh_s=self._fresh_s,
            cost_s=self._cost_s,
            judging_s=self.judging_s,
            left_s=self._left_s,
        )

    @property
    def _left_s(self) -> float:
        """Returns the seconds that a round may take, and judging a leader that it brings."""
        return self.budget.left_s - self.reserve_s()

    def _fresh_s(self, policies: Sequence[Policy]) -> float:
        return launch_s(self.start_s + max(map(self.load_s, policies)), len(policies))

    def _cost_s(self, policy: Policy) -> float:
        return self._costs_s.get(policy) or self.cost_s(policy)

    def _measured(self, chosen: NextRound, verdict: Verdict | None) -> bool:
        """Measures one round; returns False if the budget ended it."""
        self._announce(chosen.policies, verdict)
        if chosen.fresh:
            self._launch(chosen.policies)
        named = () if verdict is None else named_by(verdict)
        in_turn = self._order.sample(chosen.policies, len(chosen.policies))
        for policy in sorted(in_turn, key=lambda policy: policy not in named):  # what decides, before time is short
            if verdict is not None and self._left_s < self._cost_s(policy):
                return False
            began_s = self.budget.spent_s
            outcome = self._outcome(policy, verdict)
            if outcome is None:
                return False
            if isinstance(outcome, Failure) and outcome.kind == "killed":  # that says nothing about the policy
                continue
            self._costs_s[policy] = self.budget.spent_s - began_s
            launch, moment_s = self.running[policy], self.budget.clock()
            self.keep(Row(policy=policy, outcome=outcome, run=self.run, launch=launch, moment_s=moment_s))
            self.observer(ContenderMeasured(stage=self.stage, launch=self.rounds - 1, policy=policy, outcome=outcome))
        return True

    def _launch(self, policies: Collection[Policy]) -> None:
        before_s = self.budget.spent_s
        self.evaluator.launch(list(policies))
        self.running = dict.fromkeys(policies, f"{self.stage} {self.rounds}")
        self.rounds += 1
        one_s = (self.budget.spent_s - before_s) / launch_s(1.0, len(policies))
        self.start_s = max(0.0, one_s - max(map(self.load_s, policies)))

    def _announce(self, policies: Sequence[Policy], verdict: Verdict | None) -> None:
        """Tells of a round that has a policy no round before had."""
        if not set(policies) <= self._announced:
            self._announced.update(policies)
            leader = verdict.leader.policy if verdict is not None and verdict.leader is not None else None
            left_s = self.budget.left_s
            self.observer(ComparisonStarted(stage=self.stage, policies=tuple(policies), left_s=left_s, leader=leader))

    def _outcome(self, policy: Policy, verdict: Verdict | None) -> Outcome | None:
        """Returns None if the budget, not the policy, cut the measurement short: that says nothing about the policy."""
        limit_s = min(MEASURING_LIMIT_S, max(SHORT_S, self.budget.left_s))
        effort = self.objective.effort(replace(self._effort(policy, verdict), time_limit_s=limit_s))
        outcome = self.evaluator.measure(policy, effort)
        if isinstance(outcome, Failure) and outcome.exception == LOADER_FAILED:
            self.loader_failure = outcome
            return self._outcome(policy, verdict)
        is_accident = isinstance(outcome, Failure) and outcome.kind in ACCIDENTS
        if is_accident and not self._was_cut(outcome, limit_s) and self.budget.left_s >= SHORT_S:
            outcome = self.evaluator.measure(policy, effort)
        return None if self._was_cut(outcome, limit_s) else outcome

    def _effort(self, policy: Policy, verdict: Verdict | None) -> Effort:
        """Returns a turn of the user's loop, or a block of steps by themselves if the loop cannot tell their speed."""
        waits = verdict is not None and verdict.waits_for_data
        if not self.in_loop or self.loader_failure is not None or waits:
            return BLOCK
        known = None if verdict is None else verdict.contender_of(policy)
        return TURN if known is None or known.step_ms is None else turn_of(known.step_ms)

    @staticmethod
    def _was_cut(outcome: Outcome, limit_s: float) -> bool:
        return isinstance(outcome, Failure) and outcome.kind == "timeout" and limit_s < MEASURING_LIMIT_S


def turn_of(step_ms: float) -> Effort:
    """Returns a turn of the user's loop whose steps take so long."""
    in_time = int(1000 * TURN.warmup_s / step_ms)
    return replace(TURN, min_steps=max(BLOCK.min_steps, min(TURN.min_steps, in_time)))
