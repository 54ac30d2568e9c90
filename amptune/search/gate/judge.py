"""The judge: measures policies for the numerics gate, each once, and remembers the judgements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from amptune.errors import StudyError
from amptune.measure.evaluator import Evaluator
from amptune.measure.results.half_effects import ModuleTrace
from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import Parity
from amptune.policy.setting_effects import numerics_of
from amptune.policy.settings import Policy
from amptune.search.gate.judgement import Judgement, judged
from amptune.search.gate.judgements import Judgements, fp32_of, without_graph
from amptune.search.plan.budget import Budget

__all__ = ["SHORTEST_LIMIT_S", "Judge", "OutOfTimeError", "PolicyJudged", "raised_by"]

# The share of the time left that the reference may take: the more time, the more steps it compares.
REFERENCE_SHARE = 0.08
# The share of the budget that judging may take with a graph, which is compiled anew: one once took 104 of 300 s.
JUDGING_SHARE = 0.15
# The least time for the reference, even if the budget is short: one made in less time says too little.
SHORTEST_REFERENCE_S = 2.0
# The least time limit of what is asked of a worker, however little time is left: it may be about the winner.
SHORTEST_LIMIT_S = 15.0


class OutOfTimeError(Exception):
    """The time to look for a cure is used up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyJudged:
    """The event that the numerics gate has judged a policy; `left_s` seconds of the budget are left."""

    judgement: Judgement
    left_s: float


@dataclass
class Judge:
    """A judge of policies that remembers its judgements.

    The FP32 reference takes `reference_share` of the time that is left. A cure is looked for until `cures_until_s` of
    the budget are spent. `last_s` are the seconds of the last judgement, without the reference; `spent_s` those of all,
    and of cures.
    """

    evaluator: Evaluator
    baseline: Policy
    budget: Budget
    observer: Callable[[PolicyJudged], None]
    tolerance: float | None = None
    reference_share: float = REFERENCE_SHARE
    cures_until_s: float = math.inf
    last_s: float = 0.0
    spent_s: float = 0.0
    judgements: Judgements[Judgement] = field(init=False)

    def __post_init__(self) -> None:
        self.judgements = Judgements(self.baseline)

    def judgement_of(self, policy: Policy) -> Judgement | None:
        """Returns None if the policy is exempt or cannot be judged. A compiled policy is judged without its graph."""
        self._judge(without_graph(policy), self._limit_s)
        return None if self.judgements.is_exempt(policy) else self.judgements.known(policy)

    def judge_graph(self, policy: Policy, limit_s: float = math.inf) -> None:
        """Judges a compiled policy with its graph, which takes time: it is compiled anew for the gate's batches."""
        self._judge(policy, min(limit_s, self.longest_graph_s))

    @property
    def longest_graph_s(self) -> float:
        """The seconds that judging a graph may take."""
        return max(0.0, JUDGING_SHARE * self.budget.seconds - self.spent_s)

    def judged_unsound(self, policy: Policy) -> bool:
        """Judges the policy if needed; returns whether it must not win."""
        judgement = self.judgement_of(policy)
        return judgement is not None and not judgement.passes

    def traces_of(self, policy: Policy) -> tuple[ModuleTrace, ...]:
        """Returns where the numbers of a step go wrong, module by module; () if that cannot be seen."""
        with self._counted():
            traces = self.evaluator.trace(policy, fp32_of(self.baseline), self._limit_s)
        return () if isinstance(traces, Failure) else traces

    def require_time(self) -> None:
        """Raises `OutOfTimeError` if the time to look for a cure is used up."""
        if self.budget.spent_s > self.cures_until_s or self.budget.left_s <= 0:
            raise OutOfTimeError

    @property
    def _limit_s(self) -> float:
        return max(SHORTEST_LIMIT_S, self.budget.left_s)

    def _judge(self, policy: Policy, limit_s: float) -> None:
        if self.judgements.is_open_as_it_is(policy):
            parity = self._parity_of(numerics_of(policy), limit_s)
            if isinstance(parity, Failure):
                self.judgements = replace(self.judgements, failure=parity)
            else:
                self._note(numerics_of(policy), parity)

    def _parity_of(self, policy: Policy, limit_s: float) -> Parity | Failure:
        seconds = max(SHORTEST_REFERENCE_S, self.reference_share * self.budget.left_s)
        try:
            with self._counted():
                parity = self.evaluator.judge(policy, fp32_of(self.baseline), seconds, limit_s)
        except StudyError as error:  # no worker can be started any more
            return Failure(kind="crash", message=str(error))
        if isinstance(parity, Parity) and parity.seconds > 0:
            self.last_s = parity.seconds  # the reference, which the first judgement waited for, is there now
        return parity

    def _note(self, policy: Policy, parity: Parity) -> None:
        """Keeps a judgement; a policy stays unjudged if the machine failed it. What only it raises is its own fault."""
        if parity.failure is not None and not raised_by(policy, parity.failure):
            self.judgements = self.judgements.without(policy, parity.failure)
            return
        judgement = judged(policy, parity, self.tolerance)
        self.judgements = self.judgements.also(judgement)
        self.observer(PolicyJudged(judgement=judgement, left_s=self.budget.left_s))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        before_s = self.budget.spent_s
        try:
            yield
        finally:
            self.last_s = self.budget.spent_s - before_s
            self.spent_s += self.last_s


def raised_by(policy: Policy, failure: Failure) -> bool:
    """Returns True if a policy is to blame for a failure, not the machine, the compiler or the gate.

    An exception of a graph alone is not the policy's: its steps ran when it was timed, and its precision is judged
    without a graph.
    """
    return failure.kind == "nonfinite" or (failure.kind in ("error", "unsupported") and policy.compile == "off")
