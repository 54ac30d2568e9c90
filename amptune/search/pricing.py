"""Estimates the time saved by keeping modules in FP32, from each module's own time and the casts between them. Pure.

A module passes on the dtype of its input or has one of its own. Under autocast a matrix product returns half for any
input, a ReLU returns its input's dtype, and a module kept in FP32 returns FP32. The dtype that reaches a module, and
the casts for it, therefore follow from the modules before it. Neighbours both kept in FP32 need no cast between them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from amptune.measure.results.module_numerics import Half, ModuleSensitivity, Sensitivity

__all__ = ["Price", "Saving", "savings_in_order"]

# A step that is expected to save less than this share of the time in all modules is not worth a policy.
WORTHWHILE = 0.003
# Among choices that save at least this share of the best saving, the one with the fewest modules is taken.
NEARLY = 0.9
# A cast reads two bytes and writes four per element, or the reverse: 1.5 times the element's size in FP32.
CAST_SHARE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Modules to keep in FP32 in addition to earlier ones, and the ms per step that they save together."""

    modules: tuple[str, ...]
    saves_ms: float


@dataclass(frozen=True)
class Price:
    """The cost of a step in ms over the timed modules, with some of them kept in FP32."""

    sensitivity: Sensitivity
    dtype: Half
    _sources: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        place = {module.path: i for i, module in enumerate(self.sensitivity.modules)}
        known = [[place[path] for path in m.producers if path in place] for m in self.sensitivity.modules]
        # A tensor made outside of modules (an addition, a view) counts as made by the module before.
        sources = [[j for j in own if j < i] or ([i - 1] if i else []) for i, own in enumerate(known)]
        object.__setattr__(self, "_sources", sources)

    def of(self, kept: Collection[str]) -> float:
        total = 0.0
        wide: list[bool] = []  # whether a module's output is FP32
        for module, sources in zip(self.sensitivity.modules, self._sources, strict=True):
            comes_wide = not sources or any(wide[j] for j in sources)
            total += self._ms(module, module.path in kept, comes_wide, first=not sources)
            follows = comes_wide if module.stream == "follows" else module.stream == "fp32"
            wide.append(module.path in kept or follows)
        return total

    def saved(self, kept: Collection[str]) -> float:
        """Returns the ms that keeping these modules in FP32 saves over keeping none."""
        return self.of(()) - self.of(kept)

    def own_gain_ms(self, modules: Collection[str]) -> float:
        """Returns the ms that FP32 saves inside these modules, without the casts around them."""
        own = [module for module in self.sensitivity.modules if module.path in modules]
        return sum((module.half[self.dtype].ms or 0.0) - (module.fp32_ms or 0.0) for module in own)

    def _ms(self, module: ModuleSensitivity, kept: bool, comes_wide: bool, *, first: bool) -> float:
        fp32_ms, half_ms = module.fp32_ms or 0.0, module.half[self.dtype].ms or 0.0
        passes = 1 if first else 2  # the gradient is cast back, unless there is none
        cast_ms = passes * CAST_SHARE * module.input_bytes * self.sensitivity.cast_ms_per_byte
        if kept:
            return fp32_ms + (0.0 if comes_wide else cast_ms)
        if module.stream == "half":
            return half_ms + (cast_ms if comes_wide else 0.0)
        return fp32_ms if comes_wide else half_ms


def savings_in_order(sensitivity: Sensitivity, dtype: Half) -> tuple[Saving, ...]:
    """Chooses greedily which modules to keep in FP32, the largest saving first, while more of them save time.

    Modules of one type and shape take the same time and are kept or not together. Two neighbouring kinds may pay only
    together.
    """
    price = Price(sensitivity, dtype)
    least_ms = WORTHWHILE * price.of(())
    choices = list(_choices(sensitivity.modules))
    kept: frozenset[str] = frozenset()
    now_ms = price.of(kept)
    found: list[Saving] = []
    while choices:
        cost = {choice: price.of(kept | choice) for choice in choices}
        most_ms = now_ms - min(cost.values())
        if most_ms <= least_ms:
            break
        best = min(
            (choice for choice in choices if now_ms - cost[choice] >= NEARLY * most_ms),
            key=lambda choice: (len(choice), -price.own_gain_ms(choice)),
        )
        saves_ms = now_ms - cost[best]
        found.append(Saving(modules=tuple(sorted(best - kept)), saves_ms=saves_ms))
        kept, now_ms = kept | best, cost[best]
        choices = [choice for choice in choices if not choice <= kept]
    return tuple(found)


def _choices(modules: Sequence[ModuleSensitivity]) -> Iterator[frozenset[str]]:
    kinds: dict[tuple[object, ...], list[str]] = defaultdict(list)
    kind_of = {module.path: _kind_of(module) for module in modules}
    for module in modules:
        if module.fp32_ms is not None:
            kinds[kind_of[module.path]].append(module.path)
    yield from map(frozenset, kinds.values())
    near = {(kind_of[path], kind_of[module.path]) for module in modules for path in module.producers if path in kind_of}
    yield from (frozenset(kinds[a]) | frozenset(kinds[b]) for a, b in near if a != b)


def _kind_of(module: ModuleSensitivity) -> tuple[object, ...]:
    """Returns a key that modules of one type and shape share, as they share their measured times."""
    times = tuple(half.ms for half in module.half.values())
    return (module.fp32_ms, times, module.input_bytes, module.output_bytes, module.stream)
