"""Turns chosen modules into the rules that a person would write: few, general, and matching nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import NamedTuple

from amptune.measure.results.subject import Module
from amptune.policy.patterns import matcher_of
from amptune.policy.settings import Fp32Rule

__all__ = ["covered_by", "general_rules", "upward"]

# `modules` lacks the root, and a type rule that names the root's class keeps the whole model in FP32. These are the
# usual classes of a root; every module is a "Module" and an "object".
GENERIC_TYPES = frozenset({"Module", "object", "Sequential", "ModuleList", "ModuleDict"})

# A pattern has so many stars at most.
MOST_STARS = 3

# Modules to cover, one bit each: there are many candidates, and most of the work is to compare what they cover.
Bits = int

# A path by itself is nicer than a type, and this than a pattern, which ranks by its stars behind both.
PATH, TYPE = 0, 1


class _Candidate(NamedTuple):
    """A rule that covers these modules and no forbidden one; the nicest sorts first, by its rank and its size."""

    rank: int
    size: int
    text: str
    covers: Bits

    @property
    def rule(self) -> Fp32Rule:
        return Fp32Rule(type=self.text) if self.rank == TYPE else Fp32Rule(path=self.text)


def general_rules(
    chosen: Collection[str], modules: Sequence[Module], *, root_types: Collection[str] = ()
) -> tuple[Fp32Rule, ...]:
    """Returns rules that keep the chosen modules and all inside them in FP32, and no others, in the model's order.

    A type is named only if every module of it is covered. It is a class that the model uses, not merely a base, and not
    one of `root_types`, the names of the root's class and its bases. No name may contain `*`. Raises `ValueError` for a
    path that `modules` lacks.

    The fewest rules are a minimum set cover; the greedy choice among the candidates has at most 1 + ln(modules)
    times as many (Chvátal, Mathematics of Operations Research 4, 1979).
    """
    if unknown := sorted(set(chosen) - {module.path for module in modules}):
        raise ValueError(f"no modules of the model: {', '.join(unknown)}")
    tops = _tops(frozenset(chosen), modules)
    candidates = sorted(_candidates(tops, modules, frozenset(root_types)), reverse=True)
    nicest = {candidate.covers: candidate for candidate in candidates}
    taken = _without_idle(_greedy(list(nicest.values()), everything=(1 << len(tops)) - 1))
    return tuple(candidate.rule for candidate in sorted(taken, key=lambda candidate: _first(candidate.covers)))


def covered_by(rule: Fp32Rule, paths: Collection[str], modules: Sequence[Module]) -> frozenset[str]:
    """Returns the paths that the rule keeps in FP32: it names them or a module around them."""
    matches = matcher_of(rule)
    named = {module.path for module in modules if matches(module.path, module.types)}
    return frozenset(path for path in paths if not named.isdisjoint(upward(path)))


def _tops(chosen: frozenset[str], modules: Iterable[Module]) -> list[str]:
    """Returns the outermost modules to cover, of those that run; all modules inside them are covered too."""
    covered = {module.path for module in modules if module.runs and not chosen.isdisjoint(upward(module.path))}
    return [module.path for module in modules if covered.intersection(upward(module.path)) == {module.path}]


def upward(path: str) -> Iterator[str]:
    """Yields `a.b.c`, `a.b` and `a` for `a.b.c`."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _first(bits: Bits) -> int:
    return (bits & -bits).bit_length()


# --- candidates --------------------------------------------------------------------------------------------------


def _candidates(tops: Sequence[str], modules: Sequence[Module], root_types: frozenset[str]) -> Iterator[_Candidate]:
    wrong = _wrong(frozenset(tops), modules)
    covers: dict[str, Bits] = defaultdict(int)
    for number, top in enumerate(tops):
        for path in upward(top):
            covers[path] |= 1 << number
    right = [module for module in modules if module.path in covers and module.path not in wrong]
    spoilers = [module for module in modules if module.path in wrong]
    forbidden = GENERIC_TYPES.union(root_types, *(module.types for module in spoilers))
    for name in {module.types[0] for module in right} - forbidden:
        of_type = reduce(or_, (covers[module.path] for module in right if name in module.types))
        yield _Candidate(rank=TYPE, size=len(name), text=name, covers=of_type)
    yield from _patterns([module.path for module in right], covers, [module.path for module in spoilers])


def _wrong(tops: frozenset[str], modules: Iterable[Module]) -> frozenset[str]:
    """Returns the modules that no rule may match: those that must not be covered, and those that contain one."""
    uncovered = [module.path for module in modules if module.runs and tops.isdisjoint(upward(module.path))]
    return frozenset(path for outside in uncovered for path in upward(outside))


def _patterns(right: Sequence[str], covers: Mapping[str, Bits], wrong: Sequence[str]) -> Iterator[_Candidate]:
    """Yields the right paths, and the patterns that match one and no wrong one: `a.*.norm`, `a.layer*.norm`, …

    The patterns written for a path are all that match it, so none need be matched with every path. The longest of
    equally many stars is the nicest: of paths the module itself, not a container that holds nothing else.
    """
    names = (name for path in (*right, *wrong) for name in path.split("."))
    stems = frozenset(stem for name in names if (stem := name.rstrip("0123456789")) != name)
    found: dict[tuple[str, int], Bits] = defaultdict(int)
    for path in right:
        for pattern in _written(path, stems):
            found[pattern] |= covers[path]
    for path in wrong:
        for pattern in _written(path, stems):
            found.pop(pattern, None)
    for (text, stars), bits in found.items():
        yield _Candidate(rank=TYPE + stars if stars else PATH, size=-len(text), text=text, covers=bits)


def _written(path: str, stems: frozenset[str]) -> list[tuple[str, int]]:
    """Returns a path's patterns with their stars: each name as it is, as `*`, or as `stem*` of numbered names."""
    above, _, name = path.rpartition(".")
    starts = [(f"{text}.", stars) for text, stars in _written(above, stems)] if above else [("", 0)]
    lengths = range(1, len(name) + 1)
    ends = [(name, 0), ("*", 1), *((f"{name[:n]}*", 1) for n in lengths if name[:n] in stems)]
    return [(start + end, s + more) for start, s in starts for end, more in ends if s + more <= MOST_STARS]


# --- choice ------------------------------------------------------------------------------------------------------


def _greedy(candidates: Sequence[_Candidate], everything: Bits) -> list[_Candidate]:
    """Takes the candidate that covers most of the modules left, the nicest of equals, until none is left."""
    taken: list[_Candidate] = []
    left = everything
    while left:
        taken.append(min(candidates, key=lambda one: (-(one.covers & left).bit_count(), one)))
        left &= ~taken[-1].covers
        candidates = [one for one in candidates if one.covers & left]
    return taken


def _without_idle(taken: Sequence[_Candidate]) -> list[_Candidate]:
    """Drops candidates whose modules the others cover together, the least nice first."""
    kept = list(taken)
    for candidate in sorted(taken, reverse=True):
        others = reduce(or_, (other.covers for other in kept if other is not candidate), 0)
        if not candidate.covers & ~others:
            kept.remove(candidate)
    return kept
