"""The modules to try keeping in FP32, most promising first: a ladder of rules whose depth is one integer knob.

Modules are ordered by the ms that keeping them in FP32 saves, as they were timed.

A module passes on the dtype of its input or has one of its own. Under autocast a matrix product returns half for any
input, a ReLU returns its input's dtype, and a module kept in FP32 returns FP32. The dtype that reaches a module, and
the casts for it, therefore follow from the modules before it. Neighbours both kept in FP32 need no cast between them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from amptune.measure.results.half_effects import Half, ModuleSensitivity, Sensitivity
from amptune.measure.results.subject import Subject
from amptune.policy.settings import Fp32Rule, HalfRule, Reason
from amptune.search.space.module_rules import covered_by, general_rules

__all__ = ["Ladder", "Price", "Rung", "ladder_by_time", "savings_in_order"]

# Savings become small after a few rungs, and each rung costs trials.
MOST_RUNGS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One depth of a ladder: the rules that keep modules in FP32, and the ms that all of them save in an eager step."""

    rules: tuple[Fp32Rule, ...] = ()
    saves_ms: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """The FP32 rules of each depth, in each dtype and memory format in which the modules were timed.

    A depth covers all that the depths before it cover.
    """

    timed: Mapping[tuple[str, str], tuple[Rung, ...]] = field(default_factory=dict)
    half: tuple[HalfRule, ...] = ()
    """Rules for modules whose output autocast makes FP32 although half came in: casts that may be saved."""
    half_saves: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """The ms that running these modules in half saves in an eager step."""

    def rules(self, depth: int, autocast: str, memory_format: str) -> tuple[Fp32Rule, ...]:
        """Returns the rules of this depth, or of the last rung if the ladder is shorter."""
        return self._rung(depth, autocast, memory_format).rules

    def saves_ms(self, depth: int, autocast: str, memory_format: str) -> float:
        """Returns the ms that the rules of this depth save in an eager step, by the modules' own times."""
        return self._rung(depth, autocast, memory_format).saves_ms

    def half_beside(self, rules: Sequence[Fp32Rule]) -> tuple[HalfRule, ...]:
        """Returns the rules of `half` for modules that these do not keep in FP32, which would win."""
        kept = {(one.path, one.type) for one in rules}
        return tuple(one for one in self.half if (one.path, one.type) not in kept)

    def _rung(self, depth: int, autocast: str, memory_format: str) -> Rung:
        rungs = self.timed.get((autocast, memory_format), ())
        return rungs[min(depth, len(rungs)) - 1] if depth and rungs else Rung()


def ladder_by_time(subject: Subject, sensed: Mapping[str, Sensitivity]) -> Ladder:
    """Returns ladders from the modules' times: a rung for every step in which keeping more modules saves more time.

    `sensed` holds the times by memory format.
    """
    wide = _wide(subject, sensed)
    prices = {
        (dtype, memory_format): Price(sensitivity, dtype)
        for memory_format, sensitivity in sensed.items()
        for dtype in {dtype: None for module in sensitivity.modules for dtype in module.half_ms}
    }
    rules = general_rules(wide, subject.modules, root_types=subject.root_types)
    return Ladder(
        timed={where: tuple(_rungs(subject, price)) for where, price in prices.items()},
        half=tuple(HalfRule(path=rule.path, type=rule.type) for rule in rules),
        half_saves={where: price.of(()) - price.with_half(wide).of(()) for where, price in prices.items() if wide},
    )


def _wide(subject: Subject, sensed: Mapping[str, Sensitivity]) -> list[str]:
    """Returns the modules that always output FP32, except the last module: a loss needs FP32 input."""
    modules = next(iter(sensed.values())).modules if sensed else ()
    paths = {module.path for module in subject.modules if module.in_half}
    return [module.path for module in modules[:-1] if module.stream == "fp32" and module.path in paths]


def _rungs(subject: Subject, price: Price) -> Iterator[Rung]:
    paths = {module.path for module in subject.modules}
    kept: list[str] = []
    for modules in savings_in_order(price)[:MOST_RUNGS]:
        kept += [path for path in modules if path in paths]  # the model itself has no path for a rule
        if kept:
            rules = general_rules(kept, subject.modules, root_types=subject.root_types)
            told = tuple(_with_saving(rule, price, subject, kept) for rule in rules)
            yield Rung(rules=told, saves_ms=price.saved(kept))


def _with_saving(rule: Fp32Rule, price: Price, subject: Subject, kept: Sequence[str]) -> Fp32Rule:
    """Returns the rule with the ms a step that the modules it covers save by themselves."""
    saves_ms = price.saved(covered_by(rule, kept, subject.modules))
    return replace(rule, reason=Reason(saves_ms=float(f"{saves_ms:.3g}")))


# A step that is expected to save less than this share of the time in all modules is not worth a policy.
LEAST_SAVED = 0.003
# Among choices that save at least this share of the best saving, the one with the fewest modules is taken.
NEARLY = 0.9
# A cast reads two bytes and writes four per element, or the reverse: 1.5 times the element's size in FP32.
CAST_TIMES = 1.5


@dataclass(frozen=True)
class Price:
    """The cost of a step in ms over the timed modules, with some of them kept in FP32."""

    sensitivity: Sensitivity
    dtype: Half

    @cached_property
    def _sources(self) -> list[list[int]]:
        """The modules that make each module's input, by their place; [] for the first."""
        place = {module.path: i for i, module in enumerate(self.sensitivity.modules)}
        known = [[place[path] for path in m.producers if path in place] for m in self.sensitivity.modules]
        # A tensor made outside of modules (an addition, a view) counts as made by the module before.
        return [[j for j in own if j < i] or ([i - 1] if i else []) for i, own in enumerate(known)]

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

    def with_half(self, paths: Collection[str]) -> Price:
        """Returns the price with these modules in half, whatever autocast would run them in."""
        own = self.sensitivity.modules
        modules = tuple(replace(one, stream="half") if one.path in paths else one for one in own)
        return replace(self, sensitivity=replace(self.sensitivity, modules=modules))

    def _ms(self, module: ModuleSensitivity, kept: bool, comes_wide: bool, *, first: bool) -> float:
        fp32_ms, half_ms = module.fp32_ms or 0.0, module.half_ms[self.dtype] or 0.0
        passes = 1 if first else 2  # the gradient is cast back, unless there is none
        cast_ms = passes * CAST_TIMES * module.input_bytes * self.sensitivity.cast_ms_per_byte
        if kept:
            return fp32_ms + (0.0 if comes_wide else cast_ms)
        if module.stream == "half":
            return half_ms + (cast_ms if comes_wide else 0.0)
        return fp32_ms if comes_wide else half_ms


def savings_in_order(price: Price) -> list[tuple[str, ...]]:
    """Chooses greedily which modules to keep in FP32 besides earlier ones, the largest saving first, while that pays.

    Modules of one type and shape take the same time and are kept or not together. Two neighbouring kinds may pay only
    together.
    """
    least_ms = LEAST_SAVED * price.of(())
    choices = list(_choices(price.sensitivity.modules))
    kept: frozenset[str] = frozenset()
    now_ms = price.of(kept)
    found: list[tuple[str, ...]] = []
    while choices:
        cost = {choice: price.of(kept | choice) for choice in choices}
        most_ms = now_ms - min(cost.values())
        if most_ms <= least_ms:
            break
        best = min(
            (choice for choice in choices if now_ms - cost[choice] >= NEARLY * most_ms),
            key=lambda choice: (len(choice), cost[choice]),
        )
        found.append(tuple(sorted(best - kept)))
        kept, now_ms = kept | best, cost[best]
        choices = [choice for choice in choices if not choice <= kept]
    return found


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
    times = tuple(module.half_ms.values())
    return (module.fp32_ms, times, module.input_bytes, module.output_bytes, module.stream)
