"""Puts a policy on a model: checks everything, then changes it step by step, each with its way back."""

from __future__ import annotations

import os
import warnings
import weakref
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from amptune.errors import PolicyApplyError
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.runtime.digest import model_digest
from amptune.runtime.fp32_modules import obstacle, overlaid, swap, swapped_class, unswap
from amptune.runtime.global_flags import keep_autocast_out_of_compiled_backward, set_cudnn_benchmark, set_fp32_math
from amptune.runtime.layout import convert_model, convertible
from amptune.runtime.selection import select
from amptune.runtime.tuned import Tuned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    from amptune.policy.file import PolicyFile
    from amptune.policy.settings import CompileMode
    from amptune.runtime.selection import Selected

__all__ = ["PolicyDriftWarning", "apply"]

_under_a_policy: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class PolicyDriftWarning(UserWarning):
    """The policy was tuned with other software, or on another model; its speed is not what was measured."""


def apply(policy: str | PathLike[str] | Policy | PolicyFile, model: nn.Module, *, any_hardware: bool = False) -> Tuned:
    """Applies a policy, a policy file or the fitting entry of a profile to the model, until `Tuned.undo`.

    Apply before building the optimizer, `torch.compile`, DistributedDataParallel and `fully_shard`.
    Raises `HardwareMismatchError` for a file that was tuned on another GPU, unless `any_hardware` or the
    environment's AMPTUNE_ANY_HARDWARE=1 says so; `FileFormatError` for a malformed one; `PolicyApplyError`
    where the policy does not fit the model. Then nothing was changed. A bare `Policy` is not held against the
    hardware. Other versions than it was tuned with give a `PolicyDriftWarning`.
    """
    _require_plain(model)
    settings, drift = _read(policy, model, any_hardware=any_hardware)
    selected = select(model, settings.fp32_modules)
    if settings.autocast == "off":
        selected = []
    _require_swappable(selected)
    for finding in drift:
        warnings.warn(str(finding), PolicyDriftWarning, stacklevel=2)
    return _apply(settings, model, selected, (*drift, *_without_effect(settings, model)))


def _require_plain(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        raise PolicyApplyError(f"a policy is applied to a torch.nn.Module, not to {_kind(model)}")
    patched = [path for path, module in model.named_modules() if swapped_class(module) is not None]
    if model in _under_a_policy or patched:
        where = f" (it keeps {patched[0] or 'itself'} in FP32)" if patched else ""
        raise PolicyApplyError(
            f"this {type(model).__name__} already has a policy{where}; undo that one first, with tuned.undo(); "
            "a copy has the policy of its original"
        )


def _read(
    policy: str | PathLike[str] | Policy | PolicyFile, model: nn.Module, *, any_hardware: bool
) -> tuple[Policy, tuple[Finding, ...]]:
    """The settings, and what has drifted since they were found."""
    if isinstance(policy, Policy):
        return policy, ()
    from amptune.policy.file import PolicyFile

    if isinstance(policy, str | os.PathLike):
        from amptune.policy.loading import load

        policy = load(policy)
    if not isinstance(policy, PolicyFile):
        raise PolicyApplyError(
            f"a policy is a path, an amptune.Policy or what amptune.load(path) returns, not {_kind(policy)}"
        )
    return policy.policy, _validity(policy, model, any_hardware=any_hardware)


def _validity(policy: PolicyFile, model: nn.Module, *, any_hardware: bool) -> tuple[Finding, ...]:
    if not policy.valid_for:
        return ()
    from amptune.hardware.probing import probe
    from amptune.policy.matching import require_valid

    labels = dict(probe(_gpu_of(model)).labels)
    if "model" in policy.valid_for:
        labels["model"] = model_digest(model)
    return require_valid(policy, labels, any_hardware=any_hardware)


def _gpu_of(model: nn.Module) -> str | None:
    """The GPU the model is on. One still on the CPU is likely to be moved to the default GPU later: None."""
    first = next(model.parameters(), None)
    return str(first.device) if first is not None and first.device.type == "cuda" else None


def _require_swappable(selected: Sequence[Selected]) -> None:
    reasons = [f"\n  {one} {reason}" for one in selected if (reason := obstacle(one.module)) is not None]
    if reasons:
        raise PolicyApplyError(f"not every module can be kept in FP32:{''.join(reasons)}")


def _without_effect(settings: Policy, model: nn.Module) -> Iterator[Finding]:
    if settings.autocast == "off" and settings.fp32_modules:
        yield Finding(
            code="fp32-modules-without-effect",
            message="autocast is off, so everything runs in FP32 and fp32_modules changes nothing",
        )
    if settings.memory_format == "contiguous":
        return
    if not any(convertible(parameter, settings.memory_format) for parameter in model.parameters()):
        yield Finding(
            code="memory-format-without-effect",
            message=f"the model has no weights that memory_format {settings.memory_format} is for",
        )


def _apply(settings: Policy, model: nn.Module, selected: Sequence[Selected], findings: Sequence[Finding]) -> Tuned:
    with ExitStack() as steps:  # takes every step back if a later one fails
        _under_a_policy.add(model)
        steps.callback(_under_a_policy.discard, model)
        steps.callback(set_fp32_math(settings.fp32_math))
        steps.callback(set_cudnn_benchmark(settings.cudnn_benchmark))
        if settings.autocast != "off":
            steps.callback(keep_autocast_out_of_compiled_backward())
        steps.callback(convert_model(model, settings.memory_format))
        for one in selected:
            swap(one.module, cast_output=one.rule.cast_output)
            steps.callback(unswap, one.module)
        compiled = model if settings.compile == "off" else _compiled(settings.compile, model, steps)
        way_back = steps.pop_all()

    def undo() -> None:
        _require_unswappable(selected)
        way_back.close()

    return Tuned(settings, model, model=compiled, findings=findings, undo=undo)


def _compiled(mode: CompileMode, model: nn.Module, steps: ExitStack) -> nn.Module:
    """torch.compile leaves marks on the model, which go again with `steps`."""
    before = set(vars(model))
    compiled = cast("nn.Module", torch.compile(model, mode=None if mode == "default" else mode))
    for mark in vars(model).keys() - before:
        steps.callback(vars(model).pop, mark, None)
    return compiled


def _require_unswappable(selected: Sequence[Selected]) -> None:
    in_the_way = [str(one) for one in selected if overlaid(one.module)]
    if in_the_way:
        raise PolicyApplyError(
            f"the class of {', '.join(in_the_way)} was changed again after the policy was applied (parametrize "
            "and fully_shard do that): undo that first, then the policy"
        )


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
