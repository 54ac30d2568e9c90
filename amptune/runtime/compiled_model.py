"""torch.compile, as a policy has it: of the whole model or of its repeated blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from amptune.changes.blocks import compile_blocks

if TYPE_CHECKING:
    from contextlib import ExitStack

    from torch import nn

    from amptune.policy.settings import CompileMode

__all__ = ["compiled"]


def compiled(mode: CompileMode, model: nn.Module, steps: ExitStack) -> nn.Module:
    """Returns the compiled model. torch.compile sets attributes on `model`, which `steps` removes again."""
    if mode == "off":
        return model
    if mode == "blocks":
        steps.callback(compile_blocks(model))
        return model
    before = set(vars(model))
    whole = cast("nn.Module", torch.compile(model, mode=None if mode == "default" else mode))
    for mark in vars(model).keys() - before:
        steps.callback(vars(model).pop, mark, None)
    return whole
