"""Linears that multiply in FP8, by torchao: whether a machine and a module can, and their forward."""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["float8_attributes", "no_float8_because", "no_float8_linear_because"]

# Ada's (NVIDIA Ada GPU Architecture whitepaper, "Fourth-Generation Tensor Cores").
FIRST_CAPABILITY = (8, 9)
# torch._scaled_mm takes no other sizes.
MULTIPLE = 16
# Computes in FP32 what FP8 would give, without its speed: tests run on a CPU.
EMULATE = False


def no_float8_because(device: torch.device) -> str | None:
    """Returns why Linears cannot run in FP8 on this machine, or None; a model on the CPU may be moved to the GPU."""
    if not EMULATE:
        if not torch.cuda.is_available():
            return "FP8 needs a GPU of compute capability 8.9 or more, and this PyTorch has none"
        capability = torch.cuda.get_device_capability(device if device.type == "cuda" else None)
        if capability < FIRST_CAPABILITY:
            return "FP8 needs a GPU of compute capability 8.9 or more, and this one has {}.{}".format(*capability)
    try:
        import torchao.float8  # noqa: F401
    except Exception as error:  # noqa: BLE001  # one made for another torch may raise anything
        return f"FP8 needs torchao ({type(error).__name__}: {error}): pip install 'amptune[float8]'"
    return None


def no_float8_linear_because(module: nn.Module) -> str | None:
    """Returns why this module cannot run in FP8, or None."""
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        return "is no plain Linear, and FP8 is for these"
    sizes = module.in_features, module.out_features
    if any(size % MULTIPLE for size in sizes):
        return f"is {sizes[0]} wide and gives {sizes[1]}, and FP8 needs multiples of {MULTIPLE}"
    return None


def float8_attributes() -> dict[str, Any]:
    """Returns what a class of Linears needs to run in FP8: a forward, and what torchao's reads from a module.

    Inputs, weights and gradients are scaled by the largest value of each tensor, torchao's default. Rows of zeros are
    added to a batch whose rows are no multiple of 16; they add nothing to a sum.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    plain = nn.Linear(MULTIPLE, MULTIPLE, device="meta")
    config = Float8LinearConfig(emulate=EMULATE)
    made = convert_to_float8_training(nn.Sequential(plain), config=config)[0]
    own: Callable[[nn.Linear, torch.Tensor], torch.Tensor] = type(made).forward

    @functools.wraps(nn.Linear.forward, updated=())
    def forward(self: nn.Linear, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  # Linear's own name
        rows = math.prod(input.shape[:-1])
        lacking = -rows % MULTIPLE
        if not lacking:
            return own(self, input)
        padded = nn.functional.pad(input.reshape(rows, -1), (0, 0, 0, lacking))
        return own(self, padded)[:rows].reshape(*input.shape[:-1], -1)

    return {"forward": forward, **{name: vars(made)[name] for name in vars(made).keys() - vars(plain).keys()}}
