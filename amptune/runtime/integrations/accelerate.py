"""Accelerate: the arguments to build an `Accelerator` with, and applying a policy before its `prepare()`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from accelerate.utils import AutocastKwargs, GradScalerKwargs, TorchDynamoPlugin

from amptune.errors import PolicyApplyError
from amptune.runtime.integrations.agreement import (
    Told,
    apply_uncompiled,
    merged,
    require_agreement,
    require_own_scaler,
)
from amptune.runtime.policy_argument import read_policy, settings_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from os import PathLike

    from accelerate import Accelerator
    from accelerate.utils import KwargsHandler
    from torch import nn

    from amptune.policy.policy_file import PolicyFile
    from amptune.policy.settings import Policy
    from amptune.runtime.tuned import Tuned

__all__ = ["accelerator_kwargs", "apply_before_prepare"]

_AUTOCAST = {"no": "off", "bf16": "bf16", "fp16": "fp16"}
_REMEDY = 'Build it as Accelerator(**accelerator_kwargs("policy.yaml"), …).'


def accelerator_kwargs(policy: str | PathLike[str] | Policy | PolicyFile, **own: Any) -> dict[str, Any]:
    """Returns what the policy decides, with your own: `Accelerator(**accelerator_kwargs("policy.yaml", log_with=…))`.

    Your `kwargs_handlers` keep all that the policy leaves open. Accelerate's scaler has no maximum.
    Raises `PolicyApplyError` for arguments that the policy decides, for half weights, and for a static loss scale.
    """
    settings = settings_of(read_policy(policy))
    require_own_scaler(settings, "Accelerate")
    decided: dict[str, Any] = {
        "mixed_precision": "no" if settings.autocast == "off" else settings.autocast,
        "gradient_accumulation_steps": settings.accumulate,
    }
    if settings.compiles_whole:
        decided["dynamo_plugin"] = TorchDynamoPlugin(backend="inductor", mode=settings.compile)
    handlers = _handlers(settings, own.pop("kwargs_handlers", None) or ())
    return merged(decided, own, place="accelerator_kwargs(…)") | ({"kwargs_handlers": handlers} if handlers else {})


def _handlers(settings: Policy, own: Sequence[KwargsHandler]) -> list[KwargsHandler]:
    """Returns the user's handlers, with what the policy decides set in them. Raises `PolicyApplyError` if they differ.

    A field that has Accelerate's default value counts as not set.
    """
    decided = _decided(settings)
    differing = [
        f"\n  {type(handler).__name__}.{name}: {value} in kwargs_handlers, {wanted[name]} in the policy"
        for handler in own
        if (wanted := decided.get(type(handler)))
        for name, value in handler.to_kwargs().items()
        if wanted.get(name, value) != value
    ]
    if differing:
        raise PolicyApplyError(
            f"kwargs_handlers say otherwise than the policy:{''.join(differing)}\n"
            "Leave that out of kwargs_handlers, or change autocast or loss_scale in the policy."
        )
    handlers = [replace(one, **decided[type(one)]) if type(one) in decided else one for one in own]
    if settings.loss_scale is not None and not any(isinstance(one, GradScalerKwargs) for one in own):
        handlers.append(GradScalerKwargs(**decided[GradScalerKwargs]))
    return handlers


def _decided(settings: Policy) -> dict[type[KwargsHandler], dict[str, Any]]:
    autocast = {} if settings.autocast == "off" else {"enabled": True}
    scaler: dict[str, Any] = {"enabled": True} if settings.autocast == "fp16" else {}
    if (scale := settings.loss_scale) is not None:
        scaler |= {"init_scale": scale.init, "growth_interval": scale.growth_interval}
    return {AutocastKwargs: autocast, GradScalerKwargs: scaler}


def apply_before_prepare(
    policy: str | PathLike[str] | Policy | PolicyFile,
    model: nn.Module,
    accelerator: Accelerator,
    *,
    any_hardware: bool = False,
) -> Tuned:
    """Applies the policy, but leaves autocast, loss scaling and compiling to `accelerator.prepare()`.

    Raises `PolicyApplyError` for a model that was prepared already, and if the accelerator's autocast, its compile
    setting or its handlers differ from the policy.
    """
    if getattr(model, "_is_accelerate_prepared", False):
        raise PolicyApplyError(
            f"this {type(model).__name__} went through accelerator.prepare() already: apply the policy before that"
        )
    source = read_policy(policy)
    settings = settings_of(source)
    require_own_scaler(settings, "Accelerate")
    require_agreement(settings, _told(accelerator), remedy=_REMEDY)
    _handlers(settings, [one for one in (accelerator.autocast_handler, accelerator.scaler_handler) if one is not None])
    return apply_uncompiled(source, model, any_hardware=any_hardware)


def _told(accelerator: Accelerator) -> Told:
    dynamo = accelerator.state.dynamo_plugin
    return Told(
        autocast=_AUTOCAST.get(accelerator.mixed_precision, accelerator.mixed_precision),
        compile="off" if dynamo.backend.value == "NO" else dynamo.mode,
    )
