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


def _apply(preferred: tuple[AttentionBackend, ...], _: Model) -> Undo:
    if not preferred:
        return lambda: None
    import torch
    import torch.compiler.config as compiler

    order: list[int] = torch._C._get_sdp_priority_order()
    first = [int(getattr(torch._C._SDPBackend, _IN_TORCH[name])) for name in preferred]
    tag = compiler.cache_key_tag
    _set(order=[*first, *(one for one in order if one not in first)], tag=f"{tag} attention {', '.join(preferred)}")
    return lambda: _set(order=order, tag=tag)


def _set(*, order: list[int], tag: str) -> None:
    """Sets the order, of which torch.compile knows nothing: graphs of another order, stored too, are not used again."""
    import torch
    import torch.compiler.config as compiler

    torch._C._set_sdp_priority_order(order)
    compiler.cache_key_tag = tag
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _idle(policy: Settings, model: Model) -> Iterator[Finding]:
    first = next(model.parameters(), None)
    if policy.attention and first is not None and first.device.type != "cuda":
        message = f"attention is for a GPU, and the model is on {first.device}"
        yield Finding(code="attention-without-effect", message=message)


def _told(policy: Settings) -> Iterator[str]:
    if policy.attention:
        yield (
            f"attention {', '.join(policy.attention)}: these kernels compute scaled_dot_product_attention where they "
            "can, and else those that PyTorch prefers."
        )


# Compiled, a model may pass a mask where it says "causal" without a compiler: PyTorch then took kernels that made the
# step of a decoder a third slower than cuDNN's (reports/h100/attention).
ATTENTION = Knob(
    name="attention",
    stock=(),
    values=get_args(AttentionBackend),
    is_order=True,
    is_optional=True,
    matters=lambda value, subject: value == "stock" or subject.attends,
    apply=_apply,
    idle=_idle,
    words="attention {}",
    told=_told,
)
