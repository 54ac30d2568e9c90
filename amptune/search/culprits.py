"""Group testing: which few of many modules must stay in FP32, in few measurements."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

__all__ = ["smallest_cure"]

Ask = Callable[[Collection[str]], bool]

# How likely there is one culprit more, whatever was found so far: the number of culprits is taken to be geometric.
# 0.6 is the value at which the bound of tests/search/test_culprits.py holds wherever the culprits stand; a larger
# one asks less when there are many, and more when there is one (reports/group_testing.json).
ONE_MORE = 0.6


def smallest_cure(
    units: Sequence[str], cures: Callable[[Sequence[str]], bool], *, suspects: Collection[str] = ()
) -> tuple[str, ...] | None:
    """A set of units, in their order, that cures and of which none can be dropped; None if all together do not.

    `cures` says whether training is sound with these units in FP32. It is asked no set twice and never the empty
    one, which is known not to cure; what it raises passes through. Where a larger set cures less than a smaller
    one, the answer is still one that `cures` accepted, though perhaps not minimal. `suspects` is a guess: tested
    first, and if it cures the answer is sought within it. Where several sets would do, the answer is the one
    whose last unit stands furthest in front, with the suspects before all others; it need not be the one with the
    fewest units.

    As in generalized binary splitting (Hwang, "A method for detecting all defective members in a population by
    group testing", JASA 1972), one culprit after another is found by bisection, for about log2(N / d) questions
    each; unlike there, nobody says how many there are. Units may cure only together, so every set asked holds
    what was found before, and the search goes on in front of the last culprit: the shortest prefix that cures
    ends in one. The answer is therefore minimal in the sense of delta debugging (Zeller and Hildebrandt, TSE
    2002) and QuickXplain (Junker, AAAI 2004), which get there by dividing sets.
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
    """`order` cures and its first `rejected` units do not."""
    found: list[str] = []
    length = _shortest_prefix(len(order), rejected, lambda n: ask(order[:n]))
    while length:
        # What the prefix and the culprits before it cured is the shorter prefix and all culprits: known to cure.
        length -= 1
        found.append(order[length])
        length = _shortest_prefix(length, -1, lambda n: ask([*order[:n], *found]))
    return found


def _shortest_prefix(length: int, rejected: int, cures: Callable[[int], bool]) -> int:
    """Bisects the lengths above `rejected`; `length` is known to cure."""
    shortest = length
    while shortest - rejected > 1:
        middle = _even_chance(rejected, shortest, length)
        if cures(middle):
            shortest = middle
        else:
            rejected = middle
    return shortest


def _even_chance(rejected: int, accepted: int, length: int) -> int:
    """The prefix between the two that is as likely to cure as not: an answer is then worth one bit.

    Among a geometric number of culprits, each of them anywhere in `length` units, the last stands within the
    first k with probability (1 - q) / (1 - q k / length) for q = `ONE_MORE`; k = 0 is that there is none.
    """

    def probability(k: int) -> float:
        return (1 - ONE_MORE) / (1 - ONE_MORE * k / length) if k >= 0 else 0.0

    even = (probability(rejected) + probability(accepted)) / 2
    k = round(length * (1 - (1 - ONE_MORE) / even) / ONE_MORE)
    return min(max(k, rejected + 1), accepted - 1)
