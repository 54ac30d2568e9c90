"""Ablation: what each setting of a policy buys, found by putting one at a time back to stock PyTorch. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from amptune.policy.findings import Finding
from amptune.policy.settings import STOCK, Policy
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.ratio import Ratio, Round, ratio_between

__all__ = ["Ablated", "Variant", "ablated", "dropped", "variants_of"]

# If a policy has more FP32 rules than this, they are reverted together: each variant costs a process in every launch.
MOST_RULES = 3
# Prefixes of the settings that have a meaning under autocast only.
OF_AUTOCAST = ("fp32_modules", "half_modules", "loss_scale")
# Reverted only together with half weights: the numerics may need them, and a short measurement cannot tell.
OF_WEIGHTS = ("master_weights", "keep_batchnorm_fp32")
_IN_FP32: Any = {name: getattr(STOCK, name) for name in ("autocast", "weights", *OF_WEIGHTS)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A policy with one setting reverted. Up to `MOST_RULES` FP32 rules are a setting each, `fp32_modules: RULE`."""

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


def ablated(rounds: Sequence[Round], policy: Policy) -> tuple[Ablated, ...]:
    """Returns what each setting of `policy` buys, for the settings whose variant was measured beside it."""
    return tuple(
        Ablated(variant=variant, buys=ratio, speed=ratio_between(rounds, policy, variant.policy, by=THROUGHPUT))
        for variant in variants_of(policy)
        if (ratio := ratio_between(rounds, policy, variant.policy)).launches
    )


def dropped(found: Sequence[Ablated], chosen: Policy, objective: Objective = THROUGHPUT) -> tuple[Finding, ...]:
    """Returns a finding, with the reason, for each setting that `chosen`, a variant of the ablated policy, lacks.

    A setting that has nothing left to act on is not reported: an FP32 math mode, or autocast's settings once it is off.
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
