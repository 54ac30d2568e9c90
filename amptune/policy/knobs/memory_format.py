"""The layout of weights and batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from amptune.policy.findings import Finding
from amptune.policy.knobs.knob import Knob, Model, Settings, Undo

__all__ = ["MEMORY_FORMAT", "MemoryFormat"]

MemoryFormat = Literal["contiguous", "channels_last", "channels_last_3d"]

# The spatial dimensions of the convolutions that a layout is for.
_DIMENSIONS = {"channels_last": 2, "channels_last_3d": 3}


def _apply(memory_format: MemoryFormat, model: Model) -> Undo:
    from amptune.changes.layout import convert_model

    return convert_model(model, memory_format)


def _idle(policy: Settings, model: Model) -> Iterator[Finding]:
    if policy.memory_format == "contiguous":
        return
    from torch.nn.parameter import is_lazy

    from amptune.changes.layout import convertible

    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        yield Finding(
            code="memory-format-of-lazy-weights",
            message=f"{lazy[0]} is not built yet and will not get memory_format {policy.memory_format}: run a batch "
            "through the model before the policy is applied",
        )
    elif not any(convertible(parameter, policy.memory_format) for parameter in model.parameters()):
        yield Finding(
            code="memory-format-without-effect",
            message=f"the model has no weights that memory_format {policy.memory_format} is for",
        )


MEMORY_FORMAT = Knob(
    name="memory_format",
    stock="contiguous",
    values=get_args(MemoryFormat),
    is_always_written=True,
    numerics="order",
    matters=lambda value, subject: value == "contiguous" or _DIMENSIONS[value] in subject.convolution_dims,
    apply=_apply,
    idle=_idle,
    words="{}",
    sentences={
        "contiguous": "memory_format contiguous: images and weights lie as NCHW, PyTorch's default.",
        "channels_last": "memory_format channels_last: images and weights lie as NHWC, which a GPU's tensor cores "
        "read.",
        "channels_last_3d": "memory_format channels_last_3d: volumes and weights lie as NDHWC.",
    },
)
