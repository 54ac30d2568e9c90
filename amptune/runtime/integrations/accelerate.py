"""Accelerate: the arguments to build an `Accelerator` with, and applying a policy before its `prepare()`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.utils import GradScalerKwargs, TorchDynamoPlugin

from amptune.errors import PolicyApplyError
from amptune.runtime.integrations.agreement import Told, apply_uncompiled, require_agreement, require_own_scaler
from amptune.runtime.policy_argument import read_policy, settings_of

if TYPE_CHECKING:
    from os import PathLike

    from accelerate import Accelerator
    from torch import nn

    from amptune.policy.policy_file import PolicyFile
    from amptune.policy.settings import Policy
    from amptune.runtime.tuned import Tuned

__all__ = ["accelerator_kwargs", "apply_before_prepare"]

_AUTOCAST = {"no": "off", "bf16": "bf16", "fp16": "fp16"}
_REMEDY = 'Build it as Accelerator(**accelerator_kwargs("policy.yaml"), …).'


def accelerator_kwargs(policy: str | PathLike[str] | Policy | PolicyFile) -> dict[str, Any]:
    """Returns the arguments that the policy decides: `Accelerator(**accelerator_kwargs("policy.yaml"))`.

    Accelerate's scaler has no maximum. Raises `PolicyApplyError` for half weights, and for a static loss scale.
    """
    settings = settings_of(read_policy(policy))
    require_own_scaler(settings, "Accelerate")
    kwargs: dict[str, Any] = {
        "mixed_precision": "no" if settings.autocast == "off" else settings.autocast,
        "gradient_accumulation_steps": settings.accumulate,
    }
    if settings.compile != "off":
        kwargs["dynamo_plugin"] = TorchDynamoPlugin(backend="inductor", mode=settings.compile)
    if (scale := settings.loss_scale) is not None:
        scaling = GradScalerKwargs(init_scale=scale.init, growth_interval=scale.growth_interval)
        kwargs["kwargs_handlers"] = [scaling]
    return kwargs


def apply_before_prepare(
    policy: str | PathLike[str] | Policy | PolicyFile,
    model: nn.Module,
    accelerator: Accelerator,
    *,
    any_hardware: bool = False,
) -> Tuned:
    """Applies the policy, but leaves autocast, loss scaling and compiling to `accelerator.prepare()`.

    Raises `PolicyApplyError` for a model that was prepared already, and if the accelerator's autocast or compile
    setting differs from the policy's.
    """
    if getattr(model, "_is_accelerate_prepared", False):
        raise PolicyApplyError(
            f"this {type(model).__name__} went through accelerator.prepare() already: apply the policy before that"
        )
    source = read_policy(policy)
    require_own_scaler(settings_of(source), "Accelerate")
    require_agreement(settings_of(source), _told(accelerator), remedy=_REMEDY)
    return apply_uncompiled(source, model, any_hardware=any_hardware)


def _told(accelerator: Accelerator) -> Told:
    dynamo = accelerator.state.dynamo_plugin
    return Told(
        autocast=_AUTOCAST.get(accelerator.mixed_precision, accelerator.mixed_precision),
        compile="off" if dynamo.backend.value == "NO" else dynamo.mode,
    )
