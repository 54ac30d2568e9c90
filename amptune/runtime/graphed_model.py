"""A model whose training passes are replayed from CUDA graphs, wherever that computes the same as its own forward."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amptune.runtime.cuda_recorder import CudaRecorder
from amptune.runtime.recordings import Recordings

if TYPE_CHECKING:
    from collections.abc import Callable

    from amptune.policy.findings import Finding
    from amptune.runtime.cuda_recorder import Recorder

__all__ = ["GraphedModel"]


class GraphedModel(nn.Module):
    """Stands for `model`: training passes are replayed as they were recorded, all others are the model's own.

    A pass is recorded when its inputs' shapes come for the second time, and replayed as long as the model has the same
    modules and attributes, its weights lie in the same places, modules are in the same mode, and autocast is as it was.
    Everything else runs as without: in evaluation, without gradients, while a backward pass is still to come that needs
    what the last forward pass kept. What cannot be recorded is said once, by `say`, and runs by itself from then on.
    What a backward pass was not recorded for (create_graph, retain_graph, other outputs in the loss) is an error.

    Attributes are the model's, read and written. As `torch.compile`'s, its state_dict has another prefix: save the
    model's own.
    """

    _orig_mod: nn.Module
    recordings: Recordings

    def __init__(
        self,
        model: nn.Module,
        say: Callable[[Finding], None],
        *,
        recorder: Callable[[torch.device], Recorder] = CudaRecorder,
        device_type: str = "cuda",
    ) -> None:
        super().__init__()
        self._modules["_orig_mod"] = model
        vars(self)["recordings"] = Recordings(model, say, recorder, device_type)

    @property
    def training(self) -> bool:
        """The model's."""
        return self._orig_mod.training

    @training.setter
    def training(self, _: bool) -> None:
        """For PyTorch, which sets it as it makes a module; later `__setattr__` sets the model's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        is_replica = vars(self).get("_is_replica", False)  # which DataParallel makes for one pass
        if torch.compiler.is_compiling() or is_replica:
            return self._orig_mod(*args, **kwargs)
        return self.recordings.run(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedModel:
        """A copy has recordings of its own."""
        own = self.recordings
        return GraphedModel(deepcopy(own.model, memo), own.say, recorder=own.recorder, device_type=own.device_type)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """What is pickled is the model itself."""
        return _itself, (self._orig_mod,)

    def __getattr__(self, name: str) -> Any:
        """What it has not itself, the model has."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["_orig_mod"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What every module has is set here, by PyTorch; all else on the model."""
        if name in vars(self) or "_orig_mod" not in vars(self).get("_modules", {}):
            super().__setattr__(name, value)
        else:
            setattr(self._orig_mod, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._orig_mod, name)

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Registers it on the model."""
        self._orig_mod.register_buffer(name, tensor, persistent)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Registers it on the model."""
        self._orig_mod.register_parameter(name, param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Adds it to the model."""
        self._orig_mod.add_module(name, module)


def _itself(model: nn.Module) -> nn.Module:
    return model
