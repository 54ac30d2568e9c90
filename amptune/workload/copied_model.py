"""A model of the user's that is copied, in place of a function that builds one."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from amptune.errors import TargetError
from amptune.runtime.apply_policy import has_policy
from amptune.workload.by_value import from_bytes, to_bytes

__all__ = ["CopiedModel", "copy_of", "plain_model"]


class CopiedModel:
    """A function that returns copies of a module on the CPU. It is pickled with the module's weights of that moment.

    A copy of a module in evaluation mode is in training mode, which loops set when they begin.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        require_copyable(module)

    def __call__(self) -> nn.Module:
        self._require_no_policy()
        made = copy_of(self.module)
        return made if made.training else made.train()

    def give_back(self) -> None:
        """Moves the module to the CPU, in a process that needs its copies alone: it would take the device's memory."""
        self.module.to("cpu")
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has not typed it
            torch.cuda.empty_cache()

    def __reduce__(self) -> tuple[type[CopiedModel], tuple[nn.Module]]:
        self._require_no_policy()
        return type(self), (self.module,)

    def _require_no_policy(self) -> None:
        if has_policy(self.module):
            raise TargetError(
                f"a policy is applied to the model ({type(self.module).__name__}) that is to be tuned: apply it under "
                '`if __name__ == "__main__":`, or call tuned.undo() before'
            )


def copy_of(module: nn.Module) -> nn.Module:
    """Returns a copy of the module on the CPU."""
    try:
        return copy.deepcopy(module).to("cpu")
    except Exception:  # noqa: BLE001  # a module may hold what only pickling knows how to copy
        made: nn.Module = from_bytes(to_bytes(module, "model"))
        return made


def plain_model(model: nn.Module) -> Any:
    """Returns the module inside the wrapper of torch.compile or of CUDA graphs, or the model itself."""
    return getattr(model, "_orig_mod", model)


def require_copyable(module: nn.Module) -> None:
    """Raises `TargetError` for a model whose copy would not train as the model itself does."""
    kinds = {kind.__name__ for kind in type(module).__mro__}
    reason = None
    if kinds & {"DistributedDataParallel", "FullyShardedDataParallel", "DataParallel"}:
        reason = "it is wrapped for several devices: give the model in it, as before it was wrapped"
    elif "DeepSpeedEngine" in kinds or any(hasattr(parameter, "ds_id") for parameter in module.parameters()):
        reason = "DeepSpeed holds its weights and its step: amptune measures PyTorch's own"
    elif plain_model(module) is not module:
        reason = "it is compiled already: give the model before torch.compile, which amptune tries by itself"
    elif getattr(module, "is_quantized", False) or getattr(module, "quantization_method", None) is not None:
        reason = "its weights are quantised: their kernels have one precision, so there is nothing to choose"
    elif len(set(getattr(module, "hf_device_map", {}).values())) > 1:
        reason = "its device_map spreads it over several devices: amptune measures the step on one"
    elif any(parameter.is_meta for parameter in module.parameters()):
        reason = "its weights are on the meta device: they have no values to start from"
    elif any(type(parameter.data).__name__ == "DTensor" for parameter in module.parameters()):
        reason = "its weights are sharded: give the model before it is sharded"
    if reason is not None:
        raise TargetError(f"the model ({type(module).__name__}) cannot be copied: {reason}")
