"""The modules that keep FP32 weights when a policy holds the others in half, and a check that this is possible."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from amptune.errors import PolicyApplyError
from amptune.runtime.gradient_dtype import CAN_DIFFER

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn

__all__ = ["modules_kept", "require_convertible"]


def modules_kept(model: nn.Module, named: Collection[nn.Module], *, keep_batchnorm: bool) -> set[nn.Module]:
    """Returns the named modules, all modules inside them, and BatchNorm if the policy says so."""
    kept = {inner for module in named for inner in module.modules()}
    if keep_batchnorm:  # as in Apex: a BatchNorm without weights has nothing to keep
        kept |= {module for module in model.modules() if isinstance(module, _BatchNorm) and module.affine}
    return kept


def require_convertible(model: nn.Module, kept: Collection[nn.Module], *, masters: bool) -> None:
    """Raises `PolicyApplyError` if the weights cannot be held in half as the policy asks."""
    if masters and not CAN_DIFFER:
        raise PolicyApplyError(
            f"master_weights need gradients in FP32 for weights in half, which PyTorch has since 2.10; this is "
            f"{torch.__version__}: use a newer one, or autocast fp16, which needs no master weights"
        )
    owners: dict[nn.Parameter, str] = {}
    for path, module in model.named_modules():
        if module in kept:
            owners |= {p: path for p in module._parameters.values() if p is not None}
    for path, module in model.named_modules():
        tied = [] if module in kept else [p for p in module._parameters.values() if p is not None and p in owners]
        if tied:
            raise PolicyApplyError(
                f"{owners[tied[0]]} stays in FP32 and shares a weight with {path or 'the model itself'}, whose "
                "weights are to be in half: keep both in FP32 (fp32_modules), or untie them"
            )
