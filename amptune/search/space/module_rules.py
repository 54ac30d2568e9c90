"""Turns chosen modules into the rules that a person would write: few, general, and matching nothing else."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum, auto
from functools import cache
from typing import NamedTuple

from amptune.measure.results.subject import Module
from amptune.policy.patterns import matcher_of
from amptune.policy.settings import Fp32Rule

__all__ = ["covered_by", "general_rules", "upward"]

# `modules` lacks the root, and a type rule that names the root's class keeps the whole model in FP32. These are the
# usual classes of a root; every module is a "Module" and an "object".
GENERIC_TYPES = frozenset({"Module", "object", "Sequential", "ModuleList", "ModuleDict"})

# Limits on the patterns of one path: so many stars, and names behind a `**`; with a `**`, so many stars and names
# before it.
MOST_PARTS = 3
MOST_PARTS_BESIDE = 2

# Modules to cover, one bit each: there are many candidates, and most of the work is to compare what they cover.
Bits = int


class _Kind(IntEnum):
    """The ways in which a rule names modules, the nicest first; an open pattern is one with `**`."""

    MODULE = auto()
    CONTAINER = auto()
    TYPE = auto()
    PATTERN = auto()
    OPEN_PATTERN = auto()


class _Candidate(NamedTuple):
    """A rule that covers these modules and no forbidden one; the nicest sorts first."""

    kind: _Kind
    stars: int
    length: int
    text: str
    covers: Bits

    @property
    def rule(self) -> Fp32Rule:
        return Fp32Rule(type=self.text) if self.kind is _Kind.TYPE else Fp32Rule(path=self.text)


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
    best: dict[Bits, _Candidate] = {}
    for candidate in _candidates(tops, modules, frozenset(root_types)):
        best[candidate.covers] = min(candidate, best.get(candidate.covers, candidate))
    taken = _without_idle(_greedy(best.values(), everything=(1 << len(tops)) - 1))
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
    for module in right:
        kind, path = _Kind.MODULE if module.runs else _Kind.CONTAINER, module.path
        yield _Candidate(kind=kind, stars=0, length=len(path), text=path, covers=covers[path])
    yield from _types(right, covers, GENERIC_TYPES.union(root_types, *(module.types for module in spoilers)))
    yield from _patterns(right, covers, [module.path for module in spoilers])


def _wrong(tops: frozenset[str], modules: Iterable[Module]) -> frozenset[str]:
    """Returns the modules that no rule may match: those that must not be covered, and those that contain one."""
    uncovered = [module.path for module in modules if module.runs and tops.isdisjoint(upward(module.path))]
    return frozenset(path for outside in uncovered for path in upward(outside))


def _types(right: Sequence[Module], covers: Mapping[str, Bits], forbidden: frozenset[str]) -> Iterator[_Candidate]:
    of_type: dict[str, Bits] = defaultdict(int)
    for module in right:
        for name in module.types:
            of_type[name] |= covers[module.path]
    for name in {module.types[0] for module in right} - forbidden:
        yield _Candidate(kind=_Kind.TYPE, stars=0, length=len(name), text=name, covers=of_type[name])


def _patterns(right: Iterable[Module], covers: Mapping[str, Bits], wrong: Sequence[str]) -> Iterator[_Candidate]:
    """Yields the patterns of a family that match a right module and no wrong one.

    The patterns made from a path are all patterns of the family that match it. So no pattern need be matched with every
    path.
    """
    paths = [module.path for module in right]
    patterns_of = _family([*paths, *wrong])
    found: dict[str, Bits] = defaultdict(int)
    for path in paths:
        for pattern in patterns_of(path):
            found[pattern] |= covers[path]
    for path in wrong:
        for pattern in patterns_of(path):
            found.pop(pattern, None)
    for pattern, bits in found.items():
        yield _pattern(pattern, bits)


def _pattern(text: str, covers: Bits) -> _Candidate:
    """Ranks patterns of equally many stars: the longest first if the depth is fixed, the shortest if it is open."""
    stars = text.replace("**", "").count("*")
    if "**" in text:
        return _Candidate(kind=_Kind.OPEN_PATTERN, stars=stars, length=len(text), text=text, covers=covers)
    return _Candidate(kind=_Kind.PATTERN, stars=stars, length=-len(text), text=text, covers=covers)


def _family(paths: Iterable[str]) -> Callable[[str], Iterator[str]]:
    """Returns a function that makes the patterns of one of these paths: `a.*.norm`, `a.layer*.norm`, `a.**.norm`, …"""
    stems = frozenset(stem for path in paths for name in path.split(".") if (stem := name.rstrip("0123456789")) != name)

    @cache
    def options(name: str) -> list[tuple[str, int]]:
        """Returns the name, `stem*` for each known stem of numbered names, and `*`, each with its number of stars."""
        lengths = range(1, len(name) + 1)
        return [(name, 0), *((f"{name[:n]}*", 1) for n in lengths if name[:n] in stems), ("*", 1)]

    @cache
    def written(path: str) -> list[tuple[str, int]]:
        above, _, name = path.rpartition(".")
        starts = [(f"{text}.", stars) for text, stars in written(above)] if above else [("", 0)]
        return [
            (start + end, stars + more)
            for start, stars in starts
            for end, more in options(name)
            if stars + more <= MOST_PARTS
        ]

    def patterns(path: str) -> Iterator[str]:
        yield from (text for text, stars in written(path) if stars)
        names = path.split(".")
        for before in range(min(MOST_PARTS_BESIDE, len(names) - 1) + 1):
            start = ".".join([*names[:before], "**."])
            for behind in range(1, min(MOST_PARTS, len(names) - before) + 1):
                ends = written(".".join(names[-behind:]))
                yield from (start + text for text, stars in ends if stars <= MOST_PARTS_BESIDE)

    return patterns


# --- choice ------------------------------------------------------------------------------------------------------


def _greedy(candidates: Iterable[_Candidate], everything: Bits) -> list[_Candidate]:
    """Takes the candidate that covers most of the modules left, the nicest of equals.

    A candidate's share of them only shrinks, so one that is still as good as its entry in the heap is the best.
    """
    heap = [(-candidate.covers.bit_count(), candidate) for candidate in candidates]
    heapq.heapify(heap)
    taken: list[_Candidate] = []
    left = everything
    while left:
        gain, candidate = heapq.heappop(heap)
        now = -(candidate.covers & left).bit_count()
        if now == gain:
            taken.append(candidate)
            left &= ~candidate.covers
        elif now:
            heapq.heappush(heap, (now, candidate))
    return taken


def _without_idle(taken: Sequence[_Candidate]) -> list[_Candidate]:
    """Drops candidates whose modules the others cover together, the least nice first."""
    kept = list(taken)
    for candidate in sorted(taken, reverse=True):
        others = 0
        for other in kept:
            others |= 0 if other is candidate else other.covers
        if not candidate.covers & ~others:
            kept.remove(candidate)
    return kept
