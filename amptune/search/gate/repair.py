"""Finds the few modules that must stay in FP32 for a policy to pass the numerics gate, by group testing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from amptune.measure.results.half_effects import ModuleTrace, suspects
from amptune.measure.results.subject import Subject
from amptune.policy.settings import Fp32Rule, Policy, Reason
from amptune.search.gate.judge import Judge, OutOfTimeError
from amptune.search.space.module_rules import general_rules, upward

__all__ = ["Cure", "cure_of", "smallest_cure"]

# A trace shows only the first module that breaks; the next one shows once that is in FP32. This many are followed.
MOST_SUSPECTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """The modules that a policy needs in FP32, and the rules that name them.

    If `minimal`, no module can be dropped; otherwise there was no time to find out. `judgements`
    is the number of judgements made.
    """

    modules: tuple[str, ...]
    rules: tuple[Fp32Rule, ...]
    judgements: int
    minimal: bool = True


def cure_of(judge: Judge, policy: Policy, subject: Subject, traces: Sequence[ModuleTrace]) -> Cure | None:
    """Returns the modules that cure a policy; None if all modules in FP32 do not, as the fault is outside of them.

    `traces` are the policy's. Raises `OutOfTimeError` if time runs out before any modules were seen to cure it.
    """
    before = len(judge.judgements.by_numerics)

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
        guess = _followed(judge, with_rules, passes, _suspects(judge, policy, traces), known)
        units = _units(subject, traces)
        if not traces:  # a module that raises an error may hold the one that gives it half
            guess = tuple(path for path in units if any(f"{path}.".startswith(f"{one}.") for one in guess))
        found, minimal = smallest_cure(units, passes, suspects=guess), True
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
        judgements=len(judge.judgements.by_numerics) - before,
        minimal=minimal,
    )


def _followed(
    judge: Judge,
    with_rules: Callable[[Sequence[str]], Policy],
    passes: Callable[[Sequence[str]], bool],
    suspected: Sequence[str],
    known: Iterable[str],
) -> tuple[str, ...]:
    """Returns the first suspects, each found with those before it in FP32, until the policy passes; () if it fails."""
    guess: list[str] = []
    while len(guess) < MOST_SUSPECTS:
        following = next((path for path in suspected if path in known and path not in guess), None)
        if following is None:
            return ()
        guess.append(following)
        if passes(guess):
            return tuple(guess)
        candidate = with_rules(guess)
        suspected = _suspects(judge, candidate, judge.traces_of(candidate))
    return ()


def _suspects(judge: Judge, policy: Policy, traces: Sequence[ModuleTrace]) -> Sequence[str]:
    """Returns the modules to suspect, the most suspicious first: by the traces, else where training raised an error."""
    judgement = judge.judgements.known(policy)
    return suspects(traces) or (() if judgement is None else judgement.parity.broken)


def _units(subject: Subject, traces: Sequence[ModuleTrace]) -> list[str]:
    """Returns the modules that FP32 can be tried on: those without children, most suspicious first; then parents."""
    ranked = [path for path in suspects(traces) if path]
    place = {path: i for i, path in enumerate(ranked)}
    holds = Counter(above for module in subject.modules for above in upward(module.path))
    running = [module.path for module in subject.modules if module.runs and (not ranked or module.path in place)]
    return sorted(running, key=lambda path: (holds[path], place.get(path, math.inf)))


def _with_reason(rule: Fp32Rule, found: Sequence[str], traces: Sequence[ModuleTrace]) -> Fp32Rule:
    """Returns the rule with the risk of the module it names; for a rule of several modules, the highest risk."""
    named = [rule.path] if rule.path in found else found
    risk = max((trace.adds for trace in traces if trace.path in named), default=0.0)
    return replace(rule, reason=Reason(risk=float(f"{risk:.3g}")))


# The probability of one more culprit, whatever was found so far: the number of culprits is taken to be geometric.
# 0.6 is the value at which the bound of tests/search/test_group_testing.py holds wherever the culprits stand; a larger
# one asks less when there are many, and more when there is one (reports/group_testing.json).
ONE_MORE = 0.6


def smallest_cure(
    units: Sequence[str], cures: Callable[[Sequence[str]], bool], *, suspects: Collection[str] = ()
) -> tuple[str, ...] | None:
    """Returns units, in their order, that cure together and are all needed; None if all units together do not cure.

    `cures` says whether training is sound with these units in FP32. It is never asked about a set twice, nor about
    the empty set, which is known not to cure; its exceptions pass through. If a larger set cures less than a smaller
    one, the result is still a set that `cures` accepted, but perhaps not minimal. `suspects` is a guess: it is tested
    first, and if it cures, the search stays within it. If several sets would do, the result is the one whose last
    unit comes first, with the suspects ordered before all others; it need not be the one with the fewest units.

    The method is generalized binary splitting (Hwang, "A method for detecting all defective members in a population
    by group testing", JASA 1972): bisection finds one culprit after another, in about log2(N / d) questions each.
    Unlike there, the number of culprits is unknown. Units may cure only together, so every set asked contains the
    culprits found before. The shortest prefix that cures ends in a culprit, so the search goes on in front of it.
    The result is therefore minimal in the sense of delta debugging (Zeller and Hildebrandt, TSE 2002) and QuickXplain
    (Junker, AAAI 2004), which divide sets instead.
    """
    units = tuple(dict.fromkeys(units))

    @cache
    def cured_by(chosen: frozenset[str]) -> bool:
        return cures(tuple(unit for unit in units if unit in chosen))

    def ask(chosen: Collection[str]) -> bool:
        return cured_by(frozenset(chosen))

    guess = [unit for unit in units if unit in suspects]
    everything = [*guess, *(unit for unit in units if unit not in suspects)]
    for order, rejected in ((guess, 0), (everything, len(guess))):
        if order and ask(order):
            found = _culprits(order, ask, rejected)
            return tuple(unit for unit in units if unit in found)
    return None


def _culprits(order: Sequence[str], ask: Callable[[Collection[str]], bool], rejected: int) -> list[str]:
    """Returns the culprits in `order`; `order` is known to cure, its first `rejected` units are known not to."""
    found: list[str] = []
    length = _shortest_prefix(len(order), rejected, lambda n: ask(order[:n]))
    while length:
        # The shorter prefix and `found` are the same set as the one that cured, so `length` is known to cure.
        length -= 1
        found.append(order[length])
        length = _shortest_prefix(length, -1, lambda n: ask([*order[:n], *found]))
    return found


def _shortest_prefix(length: int, rejected: int, cures: Callable[[int], bool]) -> int:
    """Returns the shortest length above `rejected` that cures, by bisection; `length` is known to cure."""
    shortest = length
    while shortest - rejected > 1:
        middle = _even_chance(rejected, shortest, length)
        if cures(middle):
            shortest = middle
        else:
            rejected = middle
    return shortest


def _even_chance(rejected: int, accepted: int, length: int) -> int:
    """Returns the length between the two that is as likely to cure as not: an answer is then worth one bit.

    With a geometric number of culprits, each anywhere in `length` units, the last one is within the first k
    with probability (1 - q) / (1 - q k / length) for q = `ONE_MORE`; k = 0 means that there is none.
    """

    def probability(k: int) -> float:
        return (1 - ONE_MORE) / (1 - ONE_MORE * k / length) if k >= 0 else 0.0

    even = (probability(rejected) + probability(accepted)) / 2
    k = round(length * (1 - (1 - ONE_MORE) / even) / ONE_MORE)
    return min(max(k, rejected + 1), accepted - 1)
