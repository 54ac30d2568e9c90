"""The candidates for one workload on one machine: the search space narrowed to both, and its points as policies."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from amptune.errors import SpaceError
from amptune.measure.results.subject import Prepared, Subject
from amptune.policy.knobs.knob import TRUTH, is_in
from amptune.policy.settings import STOCK, Fp32Rule, Policy, amp_recipe, settled
from amptune.search.space.chosen_modules import IN_WORDS
from amptune.search.space.exclusions import Ladder
from amptune.search.space.global_batch import GlobalBatch, accumulated
from amptune.search.space.knobs import (
    BATCH_SIZE,
    BATCHNORM,
    EXCLUSIONS,
    IN_HALF,
    MASTERS,
    WEIGHTS,
    Point,
    Space,
    digest,
    reason_against,
    with_choices,
)
from amptune.search.space.narrowed_space import narrowed
from amptune.search.space.space_file import load_space, space_for

__all__ = ["Candidates", "Wanted", "candidates_for"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The user's wishes for the search.

    Without a `baseline` it is what the workload sets today, by default stock PyTorch.
    `batch_size` is None (the workload's own), a number to run the workload with instead, or "auto" to search it.
    `compile` says whether to try torch.compile; None leaves that to the space and the budget. No policy may take more
    than `memory_mib` of the device's memory. A search that `saves_memory` may compute activations again. So many
    `devices` will train together.
    """

    baseline: Policy | None = None
    space: str | Path | None = None
    pins: Mapping[str, str]
    batch_size: int | Literal["auto"] | None = None
    global_batch: GlobalBatch | None = None
    compile: bool | None = None
    memory_mib: float | None = None
    saves_memory: bool = False
    devices: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The policies that a search may try.

    The `starts` come before anything that the sampler proposes; the better of the `amp_recipes` is compared as well.
    Values that fail the numerics gate are removed from the `space`, and stay in the one that is `stored`.
    If `batch_size` is None, the workload's own is used. `in_words` has the modules that a search calls by words.
    """

    space: Space
    ladder: Ladder
    batch_size: int | None
    global_batch: GlobalBatch | None
    study_name: str
    baseline: Policy
    amp_recipes: tuple[Policy, ...]
    known_good: tuple[Policy, ...]
    stored: Space
    safeguards: Mapping[str, tuple[Fp32Rule, ...]] = field(default_factory=dict)
    in_words: Mapping[str, Mapping[Any, tuple[Any, ...]]] = field(default_factory=dict)

    def policy_of(self, point: Point) -> Policy:
        """Returns the policy for a point of the space; settings without effect there keep stock PyTorch's value."""
        settings: dict[str, Any] = {BATCH_SIZE: self.batch_size, **point}
        settings |= {name: of.get(point.get(name, "none"), ()) for name, of in self.in_words.items()}
        settings["accumulate"] = accumulated(settings[BATCH_SIZE], self.global_batch)
        half, depth = settings.pop(IN_HALF, False), settings.pop(EXCLUSIONS, 0)
        policy = settled(settings)
        in_half = policy.autocast != "off"
        faster = self.ladder.rules(depth, policy.autocast, policy.memory_format) if in_half else ()
        needed = self.safeguards.get(policy.precision, ())
        rules = tuple(dict.fromkeys([*needed, *faster]))
        in_half_too = self.ladder.half_beside(rules) if half and in_half else ()
        policy = replace(policy, fp32_modules=rules, half_modules=in_half_too)
        return policy if policy.uses_fp32_math else replace(policy, fp32_math=STOCK.fp32_math)

    def guarded(self, safeguards: Mapping[str, tuple[Fp32Rule, ...] | None]) -> Candidates:
        """Returns these candidates with the rules that each precision's numerics need; one with None is not tried."""
        kept = {precision: rules for precision, rules in safeguards.items() if rules is not None}
        space = self.space
        for name in ("autocast", WEIGHTS):
            sound = tuple(one for one in space.choices(name) if safeguards.get(str(one), ()) is not None)
            space = with_choices(space, name, sound) if sound else space
        return replace(self, space=space, safeguards=kept)

    def allows(self, policy: Policy) -> bool:
        """Returns whether the space, with the user's pins, allows each setting of a policy, tried or not."""
        idle = {EXCLUSIONS, IN_HALF} | ({MASTERS, BATCHNORM} if policy.weights == "fp32" else set())  # no meaning then
        idle |= set() if policy.uses_fp32_math or policy.fp32_math != STOCK.fp32_math else {"fp32_math"}
        settings = {knob.name: knob.choices for knob in self.space.knobs if knob.name not in idle}
        faster = [rule for rule in policy.fp32_modules if not rule.is_needed]
        point: dict[str, Any] = {name: getattr(policy, name) for name in settings}
        # FP32 products of the model's own (islands.py) want TF32 as those of an excluded module do.
        is_for_islands = policy.autocast != "off" and policy.fp32_math == "tf32"
        point |= {EXCLUSIONS: len(faster) or int(is_for_islands), IN_HALF: bool(policy.half_modules)}
        for name in settings.keys() & self.in_words.keys():
            point[name] = next((word for word, its in self.in_words[name].items() if its == getattr(policy, name)), "")
        if reason_against(point, self.space.forbid) is not None:
            return False
        few_enough = bool(faster) or is_in(0, self.space.choices(EXCLUSIONS) or (0,))
        as_wished = is_in(point[IN_HALF], self.space.choices(IN_HALF) or TRUTH)
        return few_enough and as_wished and all(is_in(point[name], choices) for name, choices in settings.items())

    @property
    def halves_alone(self) -> tuple[Policy, ...]:
        """One plain policy for each precision below FP32 in the space: autocast in each dtype, then half weights."""
        recipes = [amp_recipe(dtype) for dtype in self.space.half_dtypes]
        if "half" in self.space.choices(WEIGHTS):
            safest: Any = {name: is_in(True, self.space.choices(name)) for name in (MASTERS, BATCHNORM)}
            recipes.append(Policy(weights="half", **safest))
        return tuple(recipes)

    @property
    def starts(self) -> tuple[Policy, ...]:
        """The policies to compile or measure before any other, the likeliest winner first, without the baseline.

        The space's own list; if batch sizes are searched, its leading eager ones and stock PyTorch in larger batches
        stand behind these. Then stock PyTorch and the AMP recipes, whatever is pinned, for people compare with these.
        """
        listed = dict.fromkeys(filter(self.allows, map(self.policy_of, self.space.try_first)))  # a pin may be settled
        leading = [policy for policy in listed if policy.compile == "off"][:2]
        larger = [
            _sized(policy, size, self.global_batch) for size in self._larger_sizes() for policy in (*leading, STOCK)
        ]
        place = list(listed).index(leading[-1]) + 1 if leading else len(listed)
        tried = [*list(listed)[:place], *larger, *list(listed)[place:], *self.known_good]
        return tuple(policy for policy in dict.fromkeys(tried) if policy != self.baseline)

    def _larger_sizes(self) -> list[int]:
        """Returns two sizes above the workload's own, the first about half of the largest.

        The fastest dtype or layout there may differ from that at the workload's own size.
        """
        sizes = [int(size) for size in self.space.choices(BATCH_SIZE)]
        return [size for size in sizes if (self.batch_size or size) < size <= max(sizes) / 2][::-2][:2]


def candidates_for(
    prepared: Prepared, wanted: Wanted, ladder: Ladder | None = None, sizes: Collection[int] = ()
) -> Candidates:
    """Narrows the machine's space to what can matter for this model, then to what the user pinned.

    Without a `ladder` no module is kept in FP32 for speed. The space is the same with any: a depth beyond a ladder
    gives the policy of its last rung. `sizes` are the batch sizes to search besides the workload's own, if the user
    asked for that.

    Raises an `AmptuneError` for a space that does not exist or a pin that means nothing.
    """
    subject = prepared.subject
    space = load_space(wanted.space) if wanted.space else space_for(prepared.hardware)
    # each measurement of a model that the workload shares compiles anew: it trains a copy
    may_compile = not prepared.own_parallel or wanted.compile or "compile" in wanted.pins
    space, recipes = narrowed(
        space,
        subject,
        wanted.pins,
        compiling=wanted.compile if may_compile else False,
        saves_memory=wanted.saves_memory,
        devices=prepared.devices,
    )
    own_size = subject.batch_size
    batch_size = own_size if wanted.batch_size == "auto" or wanted.global_batch is not None else None
    if wanted.batch_size == "auto":
        space = with_choices(space, BATCH_SIZE, tuple(sorted({*sizes, own_size})), otherwise=own_size)
    baseline = wanted.baseline or subject.as_is or STOCK
    own = baseline.batch_size if baseline.batch_size != own_size else None
    if wanted.global_batch is not None:
        for size in (own_size, own or own_size):
            _require_shares(wanted.global_batch, size, subject)
    known_good = tuple(_sized(policy, batch_size, wanted.global_batch) for policy in (STOCK, *recipes))
    return Candidates(
        space=space,
        stored=space,
        ladder=ladder or Ladder(),
        batch_size=batch_size,
        global_batch=wanted.global_batch,
        study_name=_study_name(prepared, space, own_size, wanted.memory_mib),
        baseline=_sized(baseline, own or batch_size, wanted.global_batch),
        amp_recipes=tuple(policy for policy in known_good[1:] if policy.memory_format == "contiguous"),
        known_good=known_good,
        in_words={name: of(subject) for name, of in IN_WORDS.items() if space.choices(name)},
    )


def _sized(policy: Policy, batch_size: int | None, whole: GlobalBatch | None) -> Policy:
    accumulate = policy.accumulate if whole is None else accumulated(batch_size, whole)
    return replace(policy, batch_size=batch_size, accumulate=accumulate)


def _require_shares(whole: GlobalBatch, batch_size: int, subject: Subject) -> None:
    if subject.own_step:
        raise SpaceError(
            "a global batch needs a workload with a loss: how a step of your own accumulates is its affair"
        )
    whole.require(batch_size)


def _study_name(prepared: Prepared, space: Space, batch_size: int, memory_mib: float | None) -> str:
    """Returns a readable name and a hash of everything whose change makes earlier measurements invalid."""
    subject, software = prepared.subject, prepared.hardware.software
    parts = [
        subject.source_digest,
        subject.model_digest,
        str(batch_size),
        prepared.hardware.name,
        str(prepared.hardware.gpu and (prepared.hardware.gpu.memory_mib, prepared.hardware.gpu.power_limit_w)),
        software.torch,
        str(software.cudnn),
        digest(space),
        *([] if memory_mib is None else [f"{memory_mib:g} MiB"]),
        *([] if prepared.devices == 1 else [f"{prepared.devices} devices"]),
    ]
    return f"{subject.name}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:12]}"
