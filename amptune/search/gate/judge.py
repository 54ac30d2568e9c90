"""The judge: has policies trained beside FP32 for the numerics gate, and finds the modules that cure a rejected one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from amptune.errors import StudyError
from amptune.measure.evaluator import Evaluator
from amptune.measure.results.half_effects import ModuleTrace, suspects
from amptune.measure.results.outcome import Failure
from amptune.measure.results.subject import Subject
from amptune.policy.findings import Finding
from amptune.policy.setting_effects import numerics_of
from amptune.policy.settings import Fp32Rule, Policy
from amptune.search.gate.judgement import Judgement, Unjudged, is_own_fault, judged
from amptune.search.gate.judgements import Found, Judgements, fp32_of
from amptune.search.gate.numeric_findings import findings_of
from amptune.search.gate.repair import Cure, cure_in, smallest_cure, units_of

__all__ = ["SHORTEST_LIMIT_S", "Judge", "PolicyJudged", "cure_of"]

# The least time for the reference, even if the budget is short: one made in less time says too little.
SHORTEST_REFERENCE_S = 2.0
# The least time limit of what is asked of a worker, however little time is left: it may be about the winner.
SHORTEST_LIMIT_S = 15.0
# A trace shows only the first module that breaks; the next one shows once that is in FP32. This many are followed.
MOST_SUSPECTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyJudged:
    """The event that the numerics gate has judged a policy; `left_s` seconds of the budget are left."""

    judgement: Judgement
    left_s: float


@dataclass(frozen=True, slots=True)
class Judge:
    """Holds policies to the FP32 of a baseline, on an evaluator; `tolerance` is the workload's own for `evaluate`."""

    evaluator: Evaluator
    baseline: Policy
    tolerance: float | None = None

    def judge(self, policy: Policy, *, seconds_for_reference: float, limit_s: float) -> Found | None:
        """Judges just this policy, with its graph if it has one; returns None if it is exempt.

        The first call makes the reference, from as many steps as its seconds allow; later calls reuse it.
        """
        if Judgements(self.baseline).is_exempt(policy):
            return None
        own, seconds = numerics_of(policy), max(SHORTEST_REFERENCE_S, seconds_for_reference)
        try:
            parity = self.evaluator.judge(own, fp32_of(self.baseline), seconds, limit_s)
        except StudyError as error:  # no worker can be started any more
            return Failure(kind="crash", message=str(error))
        if isinstance(parity, Failure):
            return parity
        if parity.failure is not None and not is_own_fault(own, parity.failure):
            return Unjudged(own, parity.failure)
        return judged(own, parity, self.tolerance)

    def traces_of(self, policy: Policy, limit_s: float) -> tuple[ModuleTrace, ...]:
        """Returns where the numbers of a step go wrong, module by module; () if that cannot be seen."""
        traces = self.evaluator.trace(policy, fp32_of(self.baseline), limit_s)
        return () if isinstance(traces, Failure) else traces


def cure_of(
    judge: Judge, rejected: Judgement, subject: Subject, *, until: Callable[[], bool], limit_s: float
) -> tuple[Cure | None, tuple[Finding, ...], tuple[Found, ...]]:
    """Returns the modules that a rejected policy needs in FP32, the findings about it, and what was judged on the way.

    There is no cure if all modules in FP32 do not help, as the fault is outside of them, or if it is the time `until`
    which to look before any were seen to help. Each judgement may take `limit_s`.
    """
    failure = rejected.parity.failure
    if failure is not None and failure.in_update:
        return None, tuple(findings_of(rejected, None, ())), ()
    search = _Search(judge, rejected, subject, until, limit_s)
    modules, out_of_time = search.smallest()
    cure = None
    if modules is not None:
        count = sum(isinstance(one, Judgement) for one in search.judgements.found.values())
        cure = cure_in(modules, subject, search.traces, judgements=count, minimal=not out_of_time)
    findings = findings_of(rejected, cure, search.traces, out_of_time=out_of_time)
    return cure, tuple(findings), tuple(search.judgements.found.values())


class _OutOfTimeError(Exception):
    """The time to look for a cure is used up."""


@dataclass
class _Search:
    """The search for the fewest modules; `judgements` are those made on the way, `accepted` the modules that passed."""

    judge: Judge
    rejected: Judgement
    subject: Subject
    until: Callable[[], bool]
    limit_s: float
    accepted: list[tuple[str, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.traces = self.judge.traces_of(self.rejected.policy, self.limit_s)
        self.judgements = Judgements(self.judge.baseline)

    def smallest(self) -> tuple[tuple[str, ...] | None, bool]:
        """Returns the fewest modules that cure, None if none do, and whether time ran out before that was known."""
        units = units_of(self.subject, self.traces)
        try:
            guess = self._followed()
            if not self.traces:  # a module that raises an error may hold the one that gives it half
                guess = tuple(path for path in units if any(f"{path}.".startswith(f"{one}.") for one in guess))
            return smallest_cure(units, self._passes, suspects=guess), False
        except _OutOfTimeError:
            return min(self.accepted, key=len, default=None), True

    def _followed(self) -> tuple[str, ...]:
        """Returns the first suspects, each found with those before it in FP32, until the policy passes; else ()."""
        known = {module.path for module in self.subject.modules if module.runs}
        guess: list[str] = []
        suspected: Sequence[str] = suspects(self.traces) or self.rejected.parity.broken
        while len(guess) < MOST_SUSPECTS:
            following = next((path for path in suspected if path in known and path not in guess), None)
            if following is None:
                return ()
            guess.append(following)
            if self._passes(guess):
                return tuple(guess)
            suspected = self._suspects(self._with(guess))
        return ()

    def _suspects(self, policy: Policy) -> Sequence[str]:
        """Returns the modules to suspect, the most suspicious first: by the traces, else where training raised."""
        known = self.judgements.known(policy)
        return suspects(self.judge.traces_of(policy, self.limit_s)) or (() if known is None else known.parity.broken)

    def _with(self, modules: Sequence[str]) -> Policy:
        rules = (Fp32Rule(path=path) for path in modules)
        return replace(self.rejected.policy, fp32_modules=(*self.rejected.policy.fp32_modules, *rules))

    def _passes(self, modules: Sequence[str]) -> bool:
        """Returns whether training is sound with these modules in FP32. Raises `_OutOfTimeError`."""
        policy = self._with(modules)
        if self.judgements.is_open(policy):
            if self.until():
                raise _OutOfTimeError
            found = self.judge.judge(policy, seconds_for_reference=0.0, limit_s=self.limit_s)
            self.judgements = self.judgements if found is None else self.judgements.also(found)
        judgement = self.judgements.known(policy)
        if judgement is None or not judgement.passes:
            return False
        self.accepted.append(tuple(modules))
        return True
