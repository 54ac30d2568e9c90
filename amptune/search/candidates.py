"""What will be tried for one workload on one machine: the space narrowed to both, and how a point becomes a policy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from amptune.measure.subject import Prepared, Subject
from amptune.policy.settings import STOCK, Fp32Rule, Policy, amp_recipe
from amptune.search.exclusions import Ladder, ladder_by_intensity
from amptune.search.space import (
    EXCLUSIONS,
    HALF,
    Point,
    Space,
    digest,
    forbidden_because,
    is_in,
    pin,
    restrict,
    stock_value,
    with_knob,
)
from amptune.search.space_file import load_space, space_for

__all__ = ["Candidates", "Wanted", "candidates_for"]

# With --batch-size auto: these multiples of the workload's own batch size.
BATCH_FACTORS = (0.5, 1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user asked of the search. `batch_size` is None (the workload's own), a number, or "auto"."""

    baseline: Policy
    space: str | Path | None = None
    pins: Mapping[str, str]
    batch_size: int | str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """`first` are measured before the sampler proposes anything; `known_good` stand in the final comparison too.

    `stored` is the space that a study is kept under; what fails the numerics gate is cut from `space` alone.
    """

    space: Space
    ladder: Ladder
    batch_size: int | None
    study_name: str
    baseline: Policy
    amp_recipes: tuple[Policy, ...]
    known_good: tuple[Policy, ...]
    stored: Space
    safeguards: Mapping[str, tuple[Fp32Rule, ...]] = field(default_factory=dict)

    def policy_of(self, point: Point) -> Policy:
        """The settings a point of the space stands for. Without a batch size it is the workload's own."""
        settings: dict[str, Any] = {"batch_size": self.batch_size, **point}
        depth = settings.pop("fp32_exclusions", 0)
        autocast = settings.get("autocast", "off")
        half = self.ladder.half if settings.pop(HALF, False) and autocast != "off" else ()
        layout = settings.get("memory_format", "contiguous")
        faster = self.ladder.rules(depth, autocast, layout) if autocast != "off" else ()
        wide = dict.fromkeys([*self.safeguards.get(autocast, ()), *faster])
        return Policy(**settings, fp32_modules=tuple(wide), half_modules=half)

    def guarded(self, safeguards: Mapping[str, tuple[Fp32Rule, ...] | None]) -> Candidates:
        """The same, with rules that the numerics of an autocast dtype need; one that has None is not tried at all."""
        kept = {dtype: rules for dtype, rules in safeguards.items() if rules is not None}
        sound = tuple(
            choice for choice in self.space.choices("autocast") if safeguards.get(str(choice), ()) is not None
        )
        space = restrict(self.space, "autocast", sound) if sound else self.space
        return replace(self, space=space, safeguards=kept)

    def allows(self, policy: Policy) -> bool:
        """Whether each setting has a value that the space allows, the user's pins included, tried or not."""
        settings = {knob.name: knob.choices for knob in self.space.knobs if knob.name not in (EXCLUSIONS, HALF)}
        faster = [rule for rule in policy.fp32_modules if not rule.is_needed]
        point: dict[str, Any] = {name: getattr(policy, name) for name in settings}
        point |= {EXCLUSIONS: len(faster), HALF: bool(policy.half_modules)}
        if forbidden_because(self.space, point) is not None:
            return False
        depths = self.space.choices(EXCLUSIONS)
        few_enough = not depths or is_in(0, depths) or bool(faster)
        halves = self.space.choices(HALF)
        as_wished = not halves or is_in(point[HALF], halves)
        return few_enough and as_wished and all(is_in(point[name], choices) for name, choices in settings.items())

    @property
    def autocast_alone(self) -> tuple[Policy, ...]:
        """Autocast in every dtype that is tried, and nothing else."""
        dtypes: list[Any] = [dtype for dtype in self.space.choices("autocast") if dtype != "off"]
        return tuple(amp_recipe(dtype) for dtype in dtypes)

    @property
    def first(self) -> tuple[Policy, ...]:
        tried = (self.policy_of(point) for point in self.space.try_first)
        return tuple(dict.fromkeys([self.baseline, *self.known_good, *tried]))


def candidates_for(prepared: Prepared, wanted: Wanted, ladder: Ladder | None = None) -> Candidates:
    """Narrows the machine's space to what can matter for this model, then to what the user pinned.

    Without a `ladder`, modules to exclude are ordered by their arithmetic intensity.

    Raises an `AmptuneError` for a space that does not exist or a pin that means nothing.
    """
    subject = prepared.subject
    ladder = ladder or ladder_by_intensity(subject)
    space = load_space(wanted.space) if wanted.space else space_for(prepared.hardware)
    space = _narrowed(space, subject, ladder.height)
    recipes = _amp_recipes(space)
    if ladder.half:
        space = with_knob(space, HALF, (False, True), stock=False)
    for name, value in wanted.pins.items():
        space = pin(space, name, value)
    batch_size = wanted.batch_size if isinstance(wanted.batch_size, int) else None
    if wanted.batch_size == "auto":
        batch_size = subject.batch_size
        sizes = tuple(sorted({max(1, int(factor * batch_size)) for factor in BATCH_FACTORS}))
        space = with_knob(space, "batch_size", sizes, stock=batch_size)
    recipes = tuple(replace(policy, batch_size=batch_size) for policy in recipes)
    own = wanted.baseline.batch_size if wanted.baseline.batch_size != subject.batch_size else None
    baseline = replace(wanted.baseline, batch_size=own or batch_size)
    return Candidates(
        space=space,
        stored=space,
        ladder=ladder,
        batch_size=batch_size,
        study_name=_study_name(prepared, space, batch_size or subject.batch_size),
        baseline=baseline,
        amp_recipes=tuple(policy for policy in recipes if policy.memory_format == "contiguous"),
        known_good=(replace(STOCK, batch_size=batch_size), *recipes),
    )


def _narrowed(space: Space, subject: Subject, rungs: int) -> Space:
    """Drops what cannot matter: layouts and plans of convolutions a model does not have, rungs of no ladder."""
    formats = {"contiguous"}
    formats |= {"channels_last"} if 2 in subject.convolution_dims else set()
    formats |= {"channels_last_3d"} if 3 in subject.convolution_dims else set()
    allowed: dict[str, Any] = {
        "memory_format": lambda value: value in formats,
        "cudnn_benchmark": lambda value: bool(subject.convolution_dims) or not value,
        "fp32_exclusions": lambda value: value <= rungs,
    }
    for knob in space.knobs:
        if knob.name in allowed:
            choices = tuple(filter(allowed[knob.name], knob.choices))
            space = restrict(space, knob.name, choices or (stock_value(knob.name),))
    return space


def _amp_recipes(space: Space) -> tuple[Policy, ...]:
    """The AMP recipe in every dtype this machine has, and the same in the model's channels-last format."""
    dtypes: list[Any] = [dtype for dtype in space.choices("autocast") if dtype != "off"]
    formats = space.choices("memory_format") or ("contiguous",)
    return tuple(amp_recipe(dtype, memory_format=layout) for layout in formats for dtype in dtypes)


def _study_name(prepared: Prepared, space: Space, batch_size: int) -> str:
    """Everything whose change makes earlier measurements void, as a hash behind a readable name."""
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
    ]
    return f"{subject.name}-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:12]}"
