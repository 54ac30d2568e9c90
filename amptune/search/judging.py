"""Judges policies by the numerics gate, each once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

from amptune.errors import StudyError
from amptune.measure.evaluator import Evaluator
from amptune.measure.numerics import Parity
from amptune.measure.outcome import Failure
from amptune.measure.trace import ModuleTrace
from amptune.policy.settings import Fp32Math, Policy
from amptune.search.budget import Budget
from amptune.search.events import Observer, PolicyJudged
from amptune.search.gate import Judgement, judged

__all__ = ["Judge", "OutOfTimeError", "fp32_of", "graphs_like", "is_exempt", "numerics_of_policy", "without_graph"]

# Of the budget: for the FP32 reference, made once; and for it and all judgements until a cure is found.
REFERENCE_SHARE, SHARE = 0.08, 0.25
# A reference made in less says too little: it is made even where the budget is short.
SHORTEST_REFERENCE_S = 2.0
# The least that a judgement may take, however little is left: it may be about the winner.
SHORTEST_S = 15.0
# What FP32 operations use, the more precise first.
_BY_PRECISION: tuple[Fp32Math, ...] = ("ieee", "stock", "tf32")


class OutOfTimeError(Exception):
    """The gate's share of the budget is used up."""


def fp32_of(baseline: Policy) -> Policy:
    """The user's own FP32, which everything is held against; stock PyTorch's where the baseline trains in half."""
    return Policy(fp32_math=baseline.fp32_math if baseline.precision == "off" else "stock")


def is_exempt(policy: Policy, baseline: Policy) -> bool:
    """Whether a policy is as good as FP32 by itself: as precise as the user's own, or what training uses today."""
    precision = _BY_PRECISION.index
    as_precise = precision(policy.fp32_math) <= precision(fp32_of(baseline).fp32_math)
    plain = policy.precision == "off" and policy.compile == "off" and as_precise
    return plain or numerics_of_policy(policy) == numerics_of_policy(baseline)


@dataclass
class Judge:
    """Remembers what it judged; `failure` says why nothing can be judged (any more), if that is so.

    `share` of the budget is for the FP32 reference, which has a `reference_share` of it, and for what is judged while
    a cure is looked for. A policy that could not be judged, for want of memory or time, is neither sound nor unsound.
    """

    evaluator: Evaluator
    baseline: Policy
    budget: Budget
    observer: Observer
    tolerance: float | None = None
    share: float = SHARE
    reference_share: float = REFERENCE_SHARE
    failure: Failure | None = None
    spent_s: float = 0.0
    _judgements: dict[Policy, Judgement] = field(default_factory=dict)
    _unjudged: dict[Policy, Failure] = field(default_factory=dict)

    @property
    def judgements(self) -> Mapping[Policy, Judgement]:
        return self._judgements

    def is_exempt(self, policy: Policy) -> bool:
        """Whether there is nothing to judge."""
        return is_exempt(policy, self.baseline)

    def judgement_of(self, policy: Policy) -> Judgement | None:
        """None where it is exempt, or where it cannot be judged. One that is compiled is judged without its graph."""
        self._judge(without_graph(policy))
        return None if self.is_exempt(policy) else self.known(policy)

    def judge_graph(self, policy: Policy) -> None:
        """Judges a compiled policy as it is: its graph is compiled anew for the gate's batches, which takes time."""
        self._judge(policy)

    def known(self, policy: Policy) -> Judgement | None:
        """What was judged of it, or of it without its graph."""
        whole, plain = numerics_of_policy(policy), numerics_of_policy(without_graph(policy))
        return self._judgements.get(whole, self._judgements.get(plain))

    def unjudged_because(self, policy: Policy) -> Failure | None:
        """Why it could not be judged, if that is so."""
        return self._unjudged.get(numerics_of_policy(policy), self.failure)

    def rejection_of(self, policy: Policy) -> Judgement | None:
        """What speaks against it: its judgement without its graph, or that of its graph."""
        plain = without_graph(policy)
        found = [] if self.is_exempt(plain) else [self._judgements.get(numerics_of_policy(plain))]
        found += [] if self.is_exempt(policy) else [self._of_graph(policy)]
        return next((judgement for judgement in found if judgement is not None and not judgement.passes), None)

    def has_rejected(self, policy: Policy) -> bool:
        return self.rejection_of(policy) is not None

    def has_passed(self, policy: Policy) -> bool:
        """Whether it is exempt, or was judged and is as good as FP32; of one that is compiled, without its graph."""
        judgement = self.known(policy)
        return self.is_exempt(without_graph(policy)) if judgement is None else judgement.passes

    def is_open(self, policy: Policy) -> bool:
        """Whether a policy is still to be judged, its graph aside, and can be."""
        return self._is_open(without_graph(policy))

    def is_graph_open(self, policy: Policy) -> bool:
        """Whether a policy is compiled, and neither its graph nor another one in its dtype was judged, but can be."""
        return policy.compile != "off" and self._of_graph(policy) is None and self._is_open(policy)

    def rejects(self, policy: Policy) -> bool:
        """Whether a policy must not win."""
        judgement = self.judgement_of(policy)
        return judgement is not None and not judgement.passes

    def trace(self, policy: Policy) -> tuple[ModuleTrace, ...] | Failure:
        """Where the numbers of a step go wrong, module by module."""
        with self._counted():
            return self.evaluator.trace(policy, fp32_of(self.baseline), self._limit_s)

    @property
    def has_time(self) -> bool:
        """Whether the share of the budget is not used up."""
        return self.spent_s <= self.share * self.budget.seconds and self.budget.left_s > 0

    def require_time(self) -> None:
        """Raises `OutOfTimeError` where the share of the budget is used up."""
        if not self.has_time:
            raise OutOfTimeError

    @property
    def _limit_s(self) -> float:
        return max(SHORTEST_S, self.budget.left_s)

    def _of_graph(self, policy: Policy) -> Judgement | None:
        return next(graphs_like(policy, self._judgements.values()), None)

    def _judge(self, policy: Policy) -> None:
        if self._is_open(policy):
            parity = self._parity_of(numerics_of_policy(policy))
            if isinstance(parity, Failure):
                self.failure = parity
            else:
                self._note(numerics_of_policy(policy), parity)

    def _is_open(self, policy: Policy) -> bool:
        own = numerics_of_policy(policy)
        seen = own in self._judgements or own in self._unjudged
        return self.failure is None and not seen and not self.is_exempt(policy)

    def _parity_of(self, policy: Policy) -> Parity | Failure:
        seconds = max(SHORTEST_REFERENCE_S, self.reference_share * self.budget.seconds)
        try:
            with self._counted():
                return self.evaluator.judge(policy, fp32_of(self.baseline), seconds, self._limit_s)
        except StudyError as error:  # no worker can be started any more
            return Failure(kind="crash", message=str(error))

    def _note(self, policy: Policy, parity: Parity) -> None:
        """What does not run says nothing of the numerics: its trials fail too, where it matters."""
        if parity.failure is not None and parity.failure.kind != "nonfinite":
            self._unjudged[policy] = parity.failure
            return
        self._judgements[policy] = judged(policy, parity, self.tolerance)
        self.observer(PolicyJudged(judgement=self._judgements[policy], left_s=self.budget.left_s))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        before_s = self.budget.spent_s
        try:
            yield
        finally:
            self.spent_s += self.budget.spent_s - before_s


def without_graph(policy: Policy) -> Policy:
    """What it computes, by PyTorch's own kernels."""
    return replace(policy, compile="off")


class _OfPolicy(Protocol):
    @property
    def policy(self) -> Policy: ...


J = TypeVar("J", bound=_OfPolicy)


def graphs_like(policy: Policy, judged: Iterable[J]) -> Iterator[J]:
    """What was judged of a compiled policy's graph; then of others in its dtype, as a compiler breaks both alike."""
    graphs = [one for one in judged if "off" not in (policy.compile, one.policy.compile)]
    own = numerics_of_policy(policy)
    yield from (one for one in graphs if numerics_of_policy(one.policy) == own)
    yield from (one for one in graphs if one.policy.precision == policy.precision)


def numerics_of_policy(policy: Policy) -> Policy:
    """What of a policy its numerics depend on."""
    return replace(policy, batch_size=None, accumulate=1, cuda_graphs=False, fused_optimizer=False)
