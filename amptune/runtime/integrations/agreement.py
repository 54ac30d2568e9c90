"""Holds the settings of a framework that casts and compiles by itself to those of the policy."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from amptune.errors import PolicyApplyError
from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import PolicyDriftWarning, apply

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from amptune.policy.policy_file import PolicyFile
    from amptune.runtime.tuned import Tuned

__all__ = ["Told", "apply_uncompiled", "merged", "require_agreement", "require_own_scaler"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """The settings a framework was given, in a policy's words."""

    autocast: str
    compile: str


def merged(decided: Mapping[str, Any], own: Mapping[str, Any], *, place: str) -> dict[str, Any]:
    """Returns the arguments that the policy decides with the user's own, which were given at `place`.

    Raises `PolicyApplyError` for arguments in both, with equal values too: with the next policy they would differ.
    """
    if twice := sorted(decided.keys() & own.keys()):
        values = "".join(f"\n  {name}: {own[name]!r} in {place}, {decided[name]!r} from the policy" for name in twice)
        raise PolicyApplyError(
            f"set in two places:{values}\nLeave {', '.join(twice)} out of {place}, or change the policy."
        )
    return {**decided, **own}


def require_agreement(policy: Policy, told: Told, *, remedy: str) -> None:
    """Raises `PolicyApplyError` with every setting in which the framework differs from the policy."""
    wanted = {"autocast": policy.autocast, "compile": policy.compile if policy.compiles_whole else "off"}
    differing = [
        f"\n  {name}: {getattr(told, name)} here, {value} in the policy"
        for name, value in wanted.items()
        if getattr(told, name) != value
    ]
    if differing:
        raise PolicyApplyError(f"the framework was told otherwise than the policy says:{''.join(differing)}\n{remedy}")


def require_own_scaler(policy: Policy, framework: str) -> None:
    """Raises `PolicyApplyError` for a policy that needs `tuned.scaler`, in a framework that has a scaler of its own."""
    if policy.weights == "half":
        raise PolicyApplyError(
            f"{framework} scales the loss beside its own autocast alone, not for half weights: train them in a loop of "
            "your own or with Lightning's PolicyPrecision, or use a policy of autocast fp16 (apex:O1)"
        )
    if policy.loss_scale is not None and policy.loss_scale.static:
        raise PolicyApplyError(
            f"{framework} makes its own loss scaler, whose scale cannot be static: leave loss_scale out, or train in a "
            "loop of your own"
        )


def apply_uncompiled(policy: Policy | PolicyFile, model: nn.Module, *, any_hardware: bool) -> Tuned:
    """Applies the policy, but leaves compiling the model to the framework, and CUDA graphs out, which none has."""
    settings = policy if isinstance(policy, Policy) else policy.policy
    if settings.cuda_graphs:
        warnings.warn(
            "this framework calls the model itself, so nothing is recorded as a CUDA graph and cuda_graphs is left out",
            PolicyDriftWarning,
            stacklevel=3,
        )
    eager = replace(settings, compile="off" if settings.compiles_whole else settings.compile, cuda_graphs=False)
    if isinstance(policy, Policy):
        return apply(eager, model)
    evidence = policy.evidence.copy()
    if settings.cuda_graphs:
        evidence.pop("step_ms", None)  # a time that steps cannot reach without graphs
    return apply(replace(policy, policy=eager, evidence=evidence), model, any_hardware=any_hardware)
