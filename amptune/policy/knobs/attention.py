"""The kernels that compute `torch.nn.functional.scaled_dot_product_attention`, by preference."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Literal, get_args

from amptune.policy.findings import Finding
from amptune.policy.knobs.knob import Knob, Model, Settings, Undo

__all__ = ["ATTENTION", "AttentionBackend"]

AttentionBackend = Literal["cudnn", "flash", "efficient", "math"]
# Their names in torch.nn.attention.SDPBackend.
_IN_TORCH = {
    "cudnn": "CUDNN_ATTENTION",
    "flash": "FLASH_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}


def _apply(preferred: tuple[AttentionBackend, ...], model: Model) -> Undo:
    if not preferred or not _is_on_gpu(model):
        return lambda: None
    import torch
    import torch.compiler.config as compiler

    # The first choice of a process makes PyTorch's own order, which would replace ours
    # (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp).
    tiny = torch.empty(1, 1, 1, 8, device=next(model.parameters()).device)
    torch._fused_sdp_choice(tiny, tiny, tiny)
    order: list[int] = torch._C._get_sdp_priority_order()
    first = [int(getattr(torch._C._SDPBackend, _IN_TORCH[name])) for name in preferred]
    tag = compiler.cache_key_tag
    _set(order=[*first, *(one for one in order if one not in first)], tag=f"{tag} attention {', '.join(preferred)}")
    return lambda: _set(order=order, tag=tag)


def _is_on_gpu(model: Model) -> bool:
    first = next(model.parameters(), None)
    return first is not None and first.device.type == "cuda"


def _set(*, order: list[int], tag: str) -> None:
    """Sets the order, of which torch.compile knows nothing: graphs of another order, stored too, are not used again."""
    import torch
    import torch.compiler.config as compiler

    torch._C._set_sdp_priority_order(order)
    compiler.cache_key_tag = tag
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _idle(policy: Settings, model: Model) -> Iterator[Finding]:
    if policy.attention and not _is_on_gpu(model):
        message = "attention is for a model on a GPU: move the model there, and then apply the policy"
        yield Finding(code="attention-without-effect", message=message)


def _told(policy: Settings) -> Iterator[str]:
    if policy.attention:
        yield (
            f"attention {', '.join(policy.attention)}: these kernels compute scaled_dot_product_attention where they "
            "can, and else those that PyTorch prefers."
        )


# PyTorch's own order is the fastest on an H100 with torch 2.11 (reports/h100/attention), so that no space has another.
ATTENTION = Knob(
    name="attention",
    stock=(),
    values=get_args(AttentionBackend),
    is_order=True,
    is_optional=True,
    # All of them sum in FP32, over blocks of other sizes.
    numerics="order",
    matters=lambda value, subject: value == "stock" or subject.attends,
    apply=_apply,
    idle=_idle,
    words="attention {}",
    told=_told,
)
