"""A policy in words: what each setting does, and what was measured for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from amptune.policy.file import PolicyFile
from amptune.policy.settings import Fp32Rule, Policy

__all__ = ["explain"]

# A risk as large as this stands for numbers that are not finite (amptune.measure.trace).
OVERFLOWS = 1e5
_AUTOCAST = {
    "off": "autocast off: every operation runs in FP32.",
    "bf16": "autocast bf16: matrix products and convolutions run in bfloat16, which has FP32's range and 8 bits of "
    "precision; no loss scaling is needed.",
    "fp16": "autocast fp16: matrix products and convolutions run in float16, which has 11 bits of precision and a "
    "small range; the loss is scaled, and a step whose gradients overflow is skipped.",
}
_FP32_MATH = {
    "stock": "fp32_math stock: PyTorch's default, IEEE matrix products and TF32 convolutions.",
    "ieee": "fp32_math ieee: FP32 operations keep all 24 bits of precision, convolutions too; the slowest.",
    "tf32": "fp32_math tf32: FP32 matrix products and convolutions use tensor cores, inputs rounded to 11 bits.",
}
_LAYOUT = {
    "contiguous": "memory_format contiguous: tensors stay as they are (NCHW).",
    "channels_last": "memory_format channels_last: images and weights lie as NHWC, which tensor cores read directly.",
    "channels_last_3d": "memory_format channels_last_3d: volumes and weights lie as NDHWC.",
}


def explain(policy_file: PolicyFile) -> tuple[str, ...]:
    """One sentence or two a setting, then what the evidence says."""
    return (*_settings(policy_file.policy), *_evidence(policy_file.evidence), *_validity(policy_file.valid_for))


def _settings(policy: Policy) -> Iterator[str]:
    yield _AUTOCAST[policy.autocast]
    yield _FP32_MATH[policy.fp32_math]
    yield from map(_rule, policy.fp32_modules)
    yield from (
        f"half_modules {rule}: runs in {policy.autocast}, though autocast would use FP32."
        for rule in policy.half_modules
    )
    yield _LAYOUT[policy.memory_format]
    if policy.cudnn_benchmark:
        yield "cudnn_benchmark true: cuDNN times its algorithms for every new shape; keep shapes constant."
    if policy.batch_size is not None:
        total = "" if policy.accumulate == 1 else f", accumulated over {policy.accumulate} micro-batches"
        yield f"batch_size {policy.batch_size} per device{total}."
    if policy.compile != "off":
        yield f"compile {policy.compile}: torch.compile runs the model in this mode."
    if policy.fused_optimizer:
        yield "fused_optimizer true: one kernel updates all parameters."
    if policy.loss_scale is not None:
        scale = policy.loss_scale
        yield f"loss_scale: starts at {scale.init:g}, doubles every {scale.growth_interval} clean steps."


def _rule(rule: Fp32Rule) -> str:
    why = ""
    if rule.reason is not None and rule.reason.saves_ms is not None:
        why = f": keeping it out of autocast saves {rule.reason.saves_ms:.3g} ms a step"
    if rule.reason is not None and rule.reason.risk is not None:
        times = (
            "makes what passes through it overflow"
            if rule.reason.risk >= OVERFLOWS
            else f"makes the relative error of what passes through it {rule.reason.risk:.3g} times as large"
        )
        why = f": in half precision it {times}"
    cast = "; its output is cast back" if rule.cast_output else ""
    return f"fp32_modules {rule}: stays in FP32{why}{cast}."


def _evidence(evidence: Mapping[str, Any]) -> Iterator[str]:
    if not evidence:
        yield "There is no evidence in this file: it was written by hand."
        return
    if evidence.get("provisional"):
        yield "Provisional: tuning was interrupted before its final comparison."
    if "step_ms" in evidence:
        yield f"Measured: {evidence['step_ms']:g} ms a step, {evidence.get('samples_per_s', 0):g} samples/s."
    if evidence.get("speedup") == 1:
        yield "Nothing was shown to be faster than the baseline."
    elif "speedup" in evidence:
        interval = evidence.get("speedup_ci95")
        between = f" (95 % interval {interval[0]:g} to {interval[1]:g})" if interval else ""
        yield f"That is {evidence['speedup']:g} times the speed of the baseline{between}."
    yield from map(_bought, evidence.get("ablation", {}).items())
    recipe = evidence.get("amp_recipe")
    if recipe and "step_ms" in recipe:
        yield f"The AMP recipe took {recipe['step_ms']:g} ms a step."
    elif recipe:
        yield "The AMP recipe failed."
    yield from map(_finding, evidence.get("findings", ()))


def _finding(finding: Mapping[str, Any]) -> str:
    module = finding.get("module")
    return (f"{module}: " if module else "") + f"{finding.get('message', '')}."


def _bought(item: tuple[str, Mapping[str, Any]]) -> str:
    setting, figures = item
    interval = figures.get("buys_ci95")
    between = f" (95 % interval {interval[0]:g} to {interval[1]:g})" if interval else ""
    return f"{setting} makes it {figures['buys']:g} times as fast as without{between}."


def _validity(valid_for: Mapping[str, str]) -> Iterator[str]:
    if valid_for:
        named = ", ".join(f"{name} {value}" for name, value in valid_for.items() if name != "model")
        yield f"Valid for {named}."
