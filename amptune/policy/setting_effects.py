"""The effects of a policy's settings besides speed: on numerics, memory, torch.compile's graph and the process."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Literal

from amptune.policy.settings import STOCK, Policy

__all__ = [
    "EFFECTS",
    "SettingEffect",
    "changes_graph",
    "graph_of",
    "memory_of",
    "numerics_of",
    "process_of",
    "rounding_of",
    "tensors_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingEffect:
    """The effects of one setting; the defaults are for a setting nobody has thought about, which changes everything.

    `numerics`: "rounding" if values are rounded otherwise, "order" if only sums are taken in another order, which is
    FP32 still. `memory`: "sample" if a sample keeps other tensors for the backward pass, "rest" if anything else takes
    other memory. `graph`: torch.compile makes another graph. `process`: what it does lasts for the life of a process.
    """

    numerics: Literal["none", "order", "rounding"] = "rounding"
    memory: Literal["none", "rest", "sample"] = "sample"
    graph: bool = True
    process: bool = False


# The batch's size decides memory and graph too; both are known for each size by itself. A graph of torch.compile has
# other kernels and other sums, and a mistake in it may be of any size. PyTorch caches cuDNN's execution plans by shape,
# dtype and layout but not by `cudnn.benchmark` (aten/src/ATen/native/cudnn/Conv_v8.cpp), and torch.compile ignores it.
EFFECTS: dict[str, SettingEffect] = {
    "autocast": SettingEffect(),
    "weights": SettingEffect(),
    "master_weights": SettingEffect(memory="rest"),
    "keep_batchnorm_fp32": SettingEffect(memory="none"),
    "fp32_math": SettingEffect(memory="rest"),
    "fp32_modules": SettingEffect(memory="none"),
    "half_modules": SettingEffect(memory="none"),
    "memory_format": SettingEffect(numerics="order", memory="rest"),
    "cudnn_benchmark": SettingEffect(numerics="order", memory="rest", graph=False, process=True),
    "batch_size": SettingEffect(numerics="none", memory="none"),
    "accumulate": SettingEffect(numerics="none", memory="none", graph=False),
    "compile": SettingEffect(process=True),
    "cuda_graphs": SettingEffect(numerics="none"),
    "fused_optimizer": SettingEffect(numerics="none", memory="none", graph=False),
    "loss_scale": SettingEffect(memory="none", graph=False),
}


@cache
def numerics_of(policy: Policy) -> Policy:
    """Returns the policy with only the settings that its numerics depend on."""
    return _with(policy, {name for name, effect in _effects() if effect.numerics != "none"})


@cache
def rounding_of(policy: Policy) -> Policy:
    """Returns the policy with only the settings that round values otherwise: stock PyTorch's are FP32."""
    return _with(policy, {name for name, effect in _effects() if effect.numerics == "rounding"})


@cache
def memory_of(policy: Policy) -> Policy:
    """Returns the policy with only the settings that its memory depends on, but for the batch's size.

    bf16 and fp16 take the same. FP32 math matters where products run in FP32, and IEEE's has workspaces of its own.
    """
    kept = _with(policy, {name for name, effect in _effects() if effect.memory != "none"})
    ieee = policy.precision == "off" and policy.fp32_math == "ieee"
    return replace(
        kept, autocast="off" if policy.autocast == "off" else "bf16", fp32_math="ieee" if ieee else STOCK.fp32_math
    )


@cache
def tensors_of(policy: Policy) -> Policy:
    """Returns the policy with only the settings that decide which tensors a sample keeps for the backward pass."""
    return _with(memory_of(policy), {name for name, effect in _effects() if effect.memory == "sample"})


@cache
def graph_of(policy: Policy) -> Policy:
    """Returns the policy with only the settings that torch.compile's graph depends on: equal ones share the cache."""
    return _with(policy, {name for name, effect in _effects() if effect.graph})


def changes_graph(name: str) -> bool:
    """Returns whether torch.compile makes another graph if this setting, or what a search calls it, is changed."""
    return EFFECTS.get(name, SettingEffect()).graph


@cache
def process_of(policy: Policy) -> tuple[bool, ...]:
    """Returns the kind of process that a policy needs; policies of one kind can be measured in one."""
    return tuple(getattr(policy, name) != getattr(STOCK, name) for name, effect in _effects() if effect.process)


def _effects() -> list[tuple[str, SettingEffect]]:
    return [(one.name, EFFECTS.get(one.name, SettingEffect())) for one in fields(Policy)]


def _with(policy: Policy, names: set[str]) -> Policy:
    """Returns the policy with all settings but these at stock PyTorch's."""
    stock: dict[str, Any] = {one.name: getattr(STOCK, one.name) for one in fields(Policy) if one.name not in names}
    return replace(policy, **stock)
