"""Finds the parameters that autocast rounds to half precision; it uses the others in FP32."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amptune.measure.bench.bench import Bench
from amptune.measure.numerics.short_training import Training
from amptune.policy.settings import Policy

__all__ = ["parameters_in_half"]


class _Rounded(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the storage of each FP32 tensor that an operation turns into a half one."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if any(isinstance(one, torch.Tensor) and one.dtype == torch.bfloat16 for one in tree_leaves(out)):
            for one in tree_leaves(args):
                if isinstance(one, torch.Tensor) and one.dtype == torch.float32:
                    self.storages.add(one.untyped_storage().data_ptr())
        return out


def parameters_in_half(bench: Bench, fp32: Policy) -> Collection[str]:
    """Returns the names of the parameters that autocast rounds in a training step; all if that cannot be seen."""
    rounded = _Rounded()
    names = [name for name, _ in bench.model.named_parameters()]
    try:
        with Training.on(bench, replace(fp32, autocast="bf16")) as training:
            with rounded:
                training.step()
            of_model = bench.model.named_parameters()
            found = {name for name, one in of_model if one.untyped_storage().data_ptr() in rounded.storages}
    except (Exception, SystemExit):  # noqa: BLE001  # what the user's code raises under autocast is judged elsewhere
        return names
    return found or names
