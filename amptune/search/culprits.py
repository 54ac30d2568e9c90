"""Group testing: finds the few of many modules that must stay in FP32, in few measurements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

__all__ = ["smallest_cure"]

Ask = Callable[[Collection[str]], bool]

# The probability of one more culprit, whatever was found so far: the number of culprits is taken to be geometric.
# 0.6 is the value at which the bound of tests/search/test_culprits.py holds wherever the culprits stand; a larger
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
    ask = _asking_once(units, cures)
    guess = [unit for unit in units if unit in suspects]
    everything = [*guess, *(unit for unit in units if unit not in suspects)]
    for order, rejected in ((guess, 0), (everything, len(guess))):
        if order and ask(order):
            found = _culprits(order, ask, rejected)
            return tuple(unit for unit in units if unit in found)
    return None


def _asking_once(units: Sequence[str], cures: Callable[[Sequence[str]], bool]) -> Ask:
    answers: dict[frozenset[str], bool] = {}

    def ask(chosen: Collection[str]) -> bool:
        members = frozenset(chosen)
        if members not in answers:
            answers[members] = cures(tuple(unit for unit in units if unit in members))
        return answers[members]

    return ask


def _culprits(order: Sequence[str], ask: Ask, rejected: int) -> list[str]:
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
