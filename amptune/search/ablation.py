"""What each setting of a policy buys: the policy with one setting at a time put back to stock PyTorch. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from amptune.policy.findings import Finding
from amptune.policy.settings import STOCK, Policy
from amptune.search.objective import THROUGHPUT, Objective
from amptune.search.ratios import Ratio, Round, ratio_between

__all__ = ["Ablated", "Variant", "ablated", "dropped", "variants_of"]

# More FP32 rules than these are reverted all at once: each variant costs a process in every launch.
MOST_RULES = 3
# Settings that say something under autocast alone begin so.
OF_AUTOCAST = ("fp32_modules", "half_modules", "loss_scale")
# Reverted with half weights alone: the numerics need them, and no measurement of a moment says whether they do.
OF_WEIGHTS = ("master_weights", "keep_batchnorm_fp32")
_IN_FP32: Any = {name: getattr(STOCK, name) for name in ("autocast", "weights", *OF_WEIGHTS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy with one setting reverted; a few FP32 rules are a setting each, named `fp32_modules: RULE`."""

    setting: str
    value: Any
    reverted_to: Any
    policy: Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablated:
    """What the setting that a variant lacks buys: what the objective is about with it, over that without.

    `speed` is its samples per second over those without.
    """

    variant: Variant
    buys: Ratio
    speed: Ratio


def variants_of(policy: Policy) -> tuple[Variant, ...]:
    """One variant for each departure from stock PyTorch; batch size and accumulation are the optimisation's.

    Reverting autocast, or half weights, takes along what has no meaning without it: FP32 rules and the loss scale.
    Rules that the numerics need are no setting to revert, nor are master weights.
    """
    return tuple(variant for variant in _variants(policy) if variant.policy != policy)


def ablated(rounds: Sequence[Round], policy: Policy) -> tuple[Ablated, ...]:
    """What each setting of `policy` buys, for those whose variant was measured beside it."""
    return tuple(
        Ablated(variant=variant, buys=ratio, speed=ratio_between(rounds, policy, variant.policy, by=THROUGHPUT))
        for variant in variants_of(policy)
        if (ratio := ratio_between(rounds, policy, variant.policy)).launches
    )


def dropped(found: Sequence[Ablated], chosen: Policy, objective: Objective = THROUGHPUT) -> tuple[Finding, ...]:
    """The settings that `chosen`, a variant of the policy they were found for, has no more; and why.

    What has nothing left to act on goes without saying: a FP32 math mode, or what was kept out of an autocast now off.
    """
    kept = {variant.setting for variant in variants_of(chosen)}
    kept |= set() if chosen.uses_fp32_math else {"fp32_math"}
    if chosen.precision == "off":
        kept |= {one.variant.setting for one in found if one.variant.setting.startswith(OF_AUTOCAST)}
    return tuple(
        Finding(
            code="setting-dropped",
            message=f"{_words(one)} {_bought(one, objective)} ({one.buys}), so it was dropped",
            figures={"setting": one.variant.setting, "buys": one.buys.value},
        )
        for one in found
        if one.variant.setting not in kept
    )


def _words(one: Ablated) -> str:
    setting, value = one.variant.setting, one.variant.value
    return setting if isinstance(value, list) else f"{setting}: {value}"


def _bought(one: Ablated, objective: Objective) -> str:
    costs = {"throughput": "speed", "memory": "memory", "energy": "energy"}
    return f"cost {costs[objective.name]}" if one.buys.high < 1 - objective.least_gain else "bought nothing"


def _variants(policy: Policy) -> Iterator[Variant]:
    for name, value in policy.departures():
        stock = getattr(STOCK, name)
        if name in ("autocast", "weights"):
            reverted = replace(policy, fp32_modules=(), half_modules=(), loss_scale=None, **_IN_FP32)
            yield Variant(setting=name, value=value, reverted_to=stock, policy=reverted)
        elif name == "fp32_modules":
            yield from _without_rules(policy)
        elif name == "half_modules":
            named = [str(rule) for rule in value]
            yield Variant(
                setting=f"{name}: {' + '.join(named)}",
                value=named,
                reverted_to=[],
                policy=replace(policy, half_modules=()),
            )
        elif name not in ("batch_size", "accumulate", *OF_WEIGHTS):
            yield Variant(setting=name, value=value, reverted_to=stock, policy=replace(policy, **{name: stock}))


def _without_rules(policy: Policy) -> Iterator[Variant]:
    rules = tuple(rule for rule in policy.fp32_modules if not rule.is_needed)
    groups = [(rule,) for rule in rules] if len(rules) <= MOST_RULES else [rules]
    for group in groups:
        kept = tuple(rule for rule in policy.fp32_modules if rule not in group)
        reverted = replace(policy, fp32_modules=kept)
        yield Variant(
            setting=f"fp32_modules: {' + '.join(map(str, group))}",
            value=[str(rule) for rule in group],
            reverted_to=[],
            policy=reverted if reverted.uses_fp32_math else replace(reverted, fp32_math=STOCK.fp32_math),
        )
