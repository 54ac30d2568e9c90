"""Finds the few modules that must stay in FP32 for a policy to pass the numerics gate, by group testing. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache

from amptune.measure.results.half_effects import ModuleTrace, suspects
from amptune.measure.results.subject import Subject
from amptune.policy.settings import Fp32Rule, Reason
from amptune.search.space.module_rules import general_rules, upward

__all__ = ["Cure", "cure_in", "smallest_cure", "units_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cure:
    """The modules that a policy needs in FP32, and the rules that name them.

    If `minimal`, no module can be dropped; otherwise there was no time to find out. `judgements` is the number of
    judgements made.
    """

    modules: tuple[str, ...]
    rules: tuple[Fp32Rule, ...]
    judgements: int
    minimal: bool = True


def cure_in(
    modules: tuple[str, ...], subject: Subject, traces: Sequence[ModuleTrace], *, judgements: int, minimal: bool
) -> Cure:
    """Returns the cure that these modules are; each rule has the risk of the modules it names, as traced."""
    rules = general_rules(modules, subject.modules, root_types=subject.root_types)
    with_reasons = tuple(_with_reason(rule, modules, traces) for rule in rules)
    return Cure(modules=modules, rules=with_reasons, judgements=judgements, minimal=minimal)


def _with_reason(rule: Fp32Rule, found: Sequence[str], traces: Sequence[ModuleTrace]) -> Fp32Rule:
    """Returns the rule with the risk of the module it names; for a rule of several modules, the highest risk."""
    named = [rule.path] if rule.path in found else found
    risk = max((trace.adds for trace in traces if trace.path in named), default=0.0)
    return replace(rule, reason=Reason(risk=float(f"{risk:.3g}")))


def units_of(subject: Subject, traces: Sequence[ModuleTrace]) -> list[str]:
    """Returns the modules that FP32 can be tried on: those without children, most suspicious first; then parents."""
    ranked = [path for path in suspects(traces) if path]
    place = {path: i for i, path in enumerate(ranked)}
    holds = Counter(above for module in subject.modules for above in upward(module.path))
    running = [module.path for module in subject.modules if module.runs and (not ranked or module.path in place)]
    return sorted(running, key=lambda path: (holds[path], place.get(path, math.inf)))


def smallest_cure(
    units: Sequence[str], cures: Callable[[Sequence[str]], bool], *, suspects: Collection[str] = ()
) -> tuple[str, ...] | None:
    """Returns units, in their order, that cure together and are all needed; None if all units together do not cure.

    `cures` says whether training is sound with these units in FP32. It is never asked about a set twice, nor about
    the empty set, which is known not to cure; its exceptions pass through. If a larger set cures less than a smaller
    one, the result is still a set that `cures` accepted, but perhaps not minimal. `suspects` is a guess: it is tested
    first, and if it cures, the search stays within it. If several sets would do, the result is the one whose last
    unit comes first, with the suspects ordered before all others; it need not be the one with the fewest units.

    The method is binary splitting (Hwang, "A method for detecting all defective members in a population by group
    testing", JASA 1972), in about log2(N) questions a culprit. Units may cure only together, so every set asked
    contains the culprits found before. The shortest prefix that cures ends in a culprit, so the search goes on in front
    of it. The result is therefore minimal in the sense of delta debugging (Zeller and Hildebrandt, TSE 2002) and
    QuickXplain (Junker, AAAI 2004), which divide sets instead.
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
    length = len(order)
    while True:
        while length - rejected > 1:
            middle = (length + rejected) // 2
            if ask([*order[:middle], *found]):
                length = middle
            else:
                rejected = middle
        length, rejected = length - 1, 0  # the shortest prefix that cures ends in a culprit
        found.append(order[length])
        if ask(found):
            return found
