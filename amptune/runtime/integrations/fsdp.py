"""FSDP2: modules that a policy keeps in FP32 are gathered in FP32, all others in autocast's dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import fsdp

from amptune.errors import PolicyApplyError
from amptune.runtime.class_swap import precision_of
from amptune.runtime.half.training import NOT_FOR_FSDP2
from amptune.runtime.tuned import AUTOCAST_DTYPES

if TYPE_CHECKING:
    from torch import nn

    from amptune.runtime.tuned import Tuned

__all__ = ["fully_shard"]


def fully_shard(module: nn.Module, tuned: Tuned, **options: Any) -> nn.Module:
    """Calls PyTorch's `fully_shard` in the precision of the policy; `options` are its options except `mp_policy`.

        for block in model.blocks:
            fully_shard(block, tuned)
        fully_shard(model, tuned)

    Call it after `amptune.apply` and before the optimizer is built. Each inner module that is kept in FP32 becomes a
    unit with its own gather. Gradients are reduced in FP32, as in training on one device. The loop stays as it is,
    `tuned.autocast()` included: autocast casts inputs operation by operation, so units do not cast theirs.

    Raises `PolicyApplyError` for weights that FSDP2 cannot shard (not contiguous, or shared by an FP32 module with
    others), and if the policy records CUDA graphs or holds weights in half, which FSDP2 does by itself.
    """
    if tuned.policy.weights == "half":
        raise PolicyApplyError(NOT_FOR_FSDP2)
    if tuned.policy.cuda_graphs:
        raise PolicyApplyError(
            "a CUDA graph holds whole weights where they lie, and FSDP2 gathers them anew for each pass: use a policy "
            "without cuda_graphs"
        )
    _require_shardable(module, options)
    excluded = {inner for inner in tuned.model.modules() if precision_of(inner) in ("fp32", "fp32-cast")}
    for inner in reversed(list(module.modules())):  # inner modules before those that hold them
        if inner in excluded and inner is not module and _can_be_unit(inner):
            _require_own_weights(inner, tuned.model)
            _shard(inner, torch.float32, options)
    in_fp32 = any(module is inner for one in excluded for inner in one.modules())
    _shard(module, torch.float32 if in_fp32 else AUTOCAST_DTYPES.get(tuned.policy.autocast), options)
    return module


def _shard(module: nn.Module, dtype: torch.dtype | None, options: dict[str, Any]) -> None:
    precision = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    fsdp.fully_shard(module, mp_policy=precision, **options)


def _can_be_unit(module: nn.Module) -> bool:
    return not isinstance(module, fsdp.FSDPModule) and any(True for _ in module.parameters())


def _require_shardable(module: nn.Module, options: dict[str, Any]) -> None:
    if "mp_policy" in options:
        raise PolicyApplyError("the policy decides the dtypes: leave mp_policy out, or call PyTorch's own fully_shard")
    if hasattr(module, "_orig_mod"):
        raise PolicyApplyError("this model is compiled: shard the model itself, before torch.compile")
    strided = [name for name, parameter in module.named_parameters() if not parameter.is_contiguous()]
    if strided:
        raise PolicyApplyError(
            f"FSDP2 shards contiguous weights alone, and {strided[0]} is not: use a policy whose memory_format is "
            "contiguous"
        )


def _require_own_weights(module: nn.Module, model: nn.Module) -> None:
    """Raises `PolicyApplyError` for shared weights. FSDP2 silently unties them: a unit replaces only its own."""
    own, inside = set(module.parameters()), set(module.modules())
    others = {name: other for name, other in model.named_modules() if other not in inside}
    for name, other in others.items():
        if not own.isdisjoint(other.parameters(recurse=False)):
            raise PolicyApplyError(
                f"{type(module).__name__} is kept in FP32 and shares weights with {name or 'the model itself'}, which "
                "FSDP2 cannot gather apart: untie them, or use a policy that keeps neither in FP32"
            )
