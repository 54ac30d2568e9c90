"""Finds the few modules that must stay in FP32 for a policy to pass the numerics gate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from amptune.measure.results.module_numerics import ModuleTrace, suspects
from amptune.measure.results.outcome import Failure
from amptune.measure.results.subject import Subject
from amptune.policy.settings import Fp32Rule, Policy, Reason
from amptune.search.culprits import smallest_cure
from amptune.search.judging import Judge, OutOfTimeError
from amptune.search.rules import general_rules

__all__ = ["Cure", "cure_of", "traces_of"]

# A trace shows only the first module that breaks; the next one shows once that is in FP32. This many are followed.
MOST_SUSPECTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """The modules that a policy needs in FP32, and the rules that name them.

    If `minimal`, no module can be dropped; otherwise there was no time to find out. `traces` are of the policy that
    failed, in the order in which modules ended; `judgements` is the number of judgements made.
    """

    modules: tuple[str, ...]
    rules: tuple[Fp32Rule, ...]
    traces: tuple[ModuleTrace, ...]
    judgements: int
    minimal: bool = True


def traces_of(judge: Judge, policy: Policy) -> tuple[ModuleTrace, ...]:
    """Returns the traces that show where a step's numbers go wrong; () if that cannot be seen."""
    traces = judge.trace(policy)
    return () if isinstance(traces, Failure) else traces


def cure_of(judge: Judge, policy: Policy, subject: Subject, traces: Sequence[ModuleTrace]) -> Cure | None:
    """Returns the modules that cure a policy; None if all modules in FP32 do not, as the fault is outside of them.

    `traces` are the policy's. Raises `OutOfTimeError` if time runs out before any modules were seen to cure it.
    """
    before = len(judge.judgements)

    def with_rules(modules: Sequence[str]) -> Policy:
        return replace(policy, fp32_modules=(*policy.fp32_modules, *(Fp32Rule(path=path) for path in modules)))

    accepted: list[tuple[str, ...]] = []

    def passes(modules: Sequence[str]) -> bool:
        judge.require_time()
        judgement = judge.judgement_of(with_rules(modules))
        if judgement is not None and judgement.passes:
            accepted.append(tuple(modules))
        return judgement is not None and judgement.passes

    known = {module.path for module in subject.modules if module.runs}
    try:
        guess = _followed(judge, with_rules, passes, traces, known)
        found, minimal = smallest_cure(_units(subject, traces), passes, suspects=guess), True
    except OutOfTimeError:
        if not accepted:
            raise
        found, minimal = min(accepted, key=len), False
    if found is None:
        return None
    rules = general_rules(found, subject.modules, root_types=subject.root_types)
    return Cure(
        modules=found,
        rules=tuple(_with_reason(rule, found, traces) for rule in rules),
        traces=tuple(traces),
        judgements=len(judge.judgements) - before,
        minimal=minimal,
    )


def _followed(
    judge: Judge,
    with_rules: Callable[[Sequence[str]], Policy],
    passes: Callable[[Sequence[str]], bool],
    traces: Sequence[ModuleTrace],
    known: Iterable[str],
) -> tuple[str, ...]:
    """Returns the first suspects, each found with those before it in FP32, until the policy passes; () if it fails."""
    guess: list[str] = []
    while len(guess) < MOST_SUSPECTS:
        following = next((path for path in suspects(traces) if path in known and path not in guess), None)
        if following is None:
            return ()
        guess.append(following)
        if passes(guess):
            return tuple(guess)
        traces = traces_of(judge, with_rules(guess))
    return ()


def _units(subject: Subject, traces: Sequence[ModuleTrace]) -> list[str]:
    """Returns the modules that FP32 can be tried on: those without children, most suspicious first; then parents."""
    ranked = [path for path in suspects(traces) if path]
    place = {path: i for i, path in enumerate(ranked)}
    holds = {module.path: 0 for module in subject.modules}
    for module in subject.modules:
        parent = module.path.rpartition(".")[0]
        while parent:
            holds[parent] += 1
            parent = parent.rpartition(".")[0]
    running = [module.path for module in subject.modules if module.runs and (not ranked or module.path in place)]
    return sorted(running, key=lambda path: (holds[path], place.get(path, math.inf)))


def _with_reason(rule: Fp32Rule, found: Sequence[str], traces: Sequence[ModuleTrace]) -> Fp32Rule:
    """Returns the rule with the risk of the module it names; for a rule of several modules, the highest risk."""
    named = [rule.path] if rule.path in found else found
    risk = max((trace.adds for trace in traces if trace.path in named), default=0.0)
    return replace(rule, reason=Reason(risk=float(f"{risk:.3g}")))
