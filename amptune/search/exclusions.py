"""Which modules to try keeping in FP32, most promising first: the ladder that one ordered integer climbs.

Half precision pays where a module does much arithmetic per element that autocast has to cast for it; the
groups here are read off the model and ordered by that ratio (a roofline's arithmetic intensity), before
anything was timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from amptune.measure.subject import Leaf, Subject
from amptune.policy.settings import Fp32Rule

__all__ = ["Group", "Ladder", "groups_by_intensity", "rules_at_depth"]

# A module that holds this share of all parameters is looked at by itself: its cast is paid at every step.
HEAVY_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Modules that one rule keeps in FP32; `name` says what they are (`stem`, `classifier`, `Conv2d`, …)."""

    name: str
    rule: Fp32Rule
    leaves: tuple[Leaf, ...]

    @property
    def intensity(self) -> float:
        """FLOPs per element cast, over the whole group."""
        return sum(leaf.flops for leaf in self.leaves) / max(1, sum(leaf.cast_numel for leaf in self.leaves))


Ladder = Callable[[Subject], Sequence[Group]]


def rules_at_depth(ladder: Sequence[Group], depth: int) -> tuple[Fp32Rule, ...]:
    """The rules of the first `depth` groups."""
    return tuple(group.rule for group in ladder[:depth])


def groups_by_intensity(subject: Subject) -> tuple[Group, ...]:
    """The stem, the classifier, heavy modules and each type, least intense first, normalisations last.

    A group whose modules all stand in the groups before it is left out: it would change nothing.
    """
    products = sorted((leaf for leaf in subject.leaves if leaf.flops), key=lambda leaf: leaf.called or 0)
    matrix_groups = sorted(
        [*_ends(products), *_heavy(products, subject.parameters), *_types(products)], key=lambda group: group.intensity
    )
    normalisations = [leaf for leaf in subject.leaves if leaf.parameters and "Norm" in leaf.type]
    return tuple(_without_repeats([*matrix_groups, *_types(normalisations)]))


def _ends(products: Sequence[Leaf]) -> Iterator[Group]:
    """The first matrix product the model runs, and the last with its neighbours of the same type and parent."""
    if not products:
        return
    yield _single("stem", products[0])
    last = products[-1]
    parent = last.path.rpartition(".")[0]
    family = [leaf for leaf in products if leaf.path.rpartition(".")[0] == parent]
    if parent and all(leaf.type == last.type for leaf in family):
        yield Group(name="classifier", rule=Fp32Rule(path=parent), leaves=tuple(family))
    else:
        yield _single("classifier", last)


def _heavy(products: Iterable[Leaf], parameters: int) -> Iterator[Group]:
    for leaf in products:
        if leaf.parameters >= HEAVY_SHARE * parameters:
            yield _single(f"weights of {leaf.path}", leaf)


def _types(leaves: Sequence[Leaf]) -> Iterator[Group]:
    for kind in dict.fromkeys(leaf.type for leaf in leaves):
        yield Group(name=kind, rule=Fp32Rule(type=kind), leaves=tuple(leaf for leaf in leaves if leaf.type == kind))


def _single(name: str, leaf: Leaf) -> Group:
    rule = Fp32Rule(path=leaf.path) if leaf.path else Fp32Rule(type=leaf.type)
    return Group(name=name, rule=rule, leaves=(leaf,))


def _without_repeats(groups: Iterable[Group]) -> Iterator[Group]:
    covered: set[str] = set()
    for group in groups:
        paths = {leaf.path for leaf in group.leaves}
        if not paths <= covered:
            covered |= paths
            yield group
