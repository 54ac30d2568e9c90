"""Ablation: what each setting of a policy buys, found by putting one at a time back to stock PyTorch. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from amptune.policy.knobs.precision_rules import FP32_MODULES
from amptune.policy.settings import KNOBS, STOCK, Policy
from amptune.search.table.ratio import Ratio
from amptune.search.table.verdict import Verdict

__all__ = ["Ablated", "Variant", "ablated", "variants_of"]

_IN_FP32: Any = {knob.name: knob.stock for knob in KNOBS if knob.precision != "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy with one setting reverted, all FP32 rules at once: each variant costs a process in every launch."""

    setting: str
    value: Any
    reverted_to: Any
    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablated:
    """The gain from the setting that a variant lacks, as ratios of the policy with it to the variant without it.

    `buys` compares them by the objective, `speed` by samples per second.
    """

    variant: Variant
    buys: Ratio
    speed: Ratio


def variants_of(policy: Policy) -> tuple[Variant, ...]:
    """Returns one variant for each departure from stock PyTorch, except batch size and accumulation.

    Those two change the training itself. Reverting autocast or half weights also reverts the settings that need it:
    FP32 rules and the loss scale. Rules that the numerics need, and master weights, are not reverted by themselves.
    """
    return tuple(variant for variant in _variants(policy) if variant.policy != policy)


def ablated(verdict: Verdict, policy: Policy) -> tuple[Ablated, ...]:
    """Returns what each setting of `policy` buys, for the settings whose variant was measured too."""
    found = []
    for variant in variants_of(policy):
        buys, speed = (fit.between(policy, variant.policy) for fit in (verdict.scores, verdict.speeds))
        if buys is not None and speed is not None:
            found.append(Ablated(variant=variant, buys=buys, speed=speed))
    return tuple(found)


def _variants(policy: Policy) -> Iterator[Variant]:
    for knob in KNOBS:
        name, value, stock = knob.name, knob.of(policy), knob.stock
        if not knob.is_own_choice or not knob.departs(policy):
            continue
        if knob is FP32_MODULES:
            value = tuple(rule for rule in policy.fp32_modules if not rule.is_needed)
            stock = tuple(rule for rule in policy.fp32_modules if rule.is_needed)
        reverted = replace(policy, **(_IN_FP32 if knob.precision == "whole" else {name: stock}))
        if not reverted.uses_fp32_math and policy.uses_fp32_math:
            reverted = replace(reverted, fp32_math=STOCK.fp32_math)
        if isinstance(value, tuple):
            named = [str(rule) for rule in value]
            yield Variant(setting=f"{name}: {' + '.join(named)}", value=named, reverted_to=[], policy=reverted)
        else:
            yield Variant(setting=name, value=value, reverted_to=stock, policy=reverted)
