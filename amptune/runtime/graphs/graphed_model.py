"""A model whose training passes are replayed from CUDA graphs if that computes the same as its own forward."""

from __future__ import annotations

import operator
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amptune.runtime.graphs.dispatch import Recordings
from amptune.runtime.graphs.recorder import CudaRecorder

if TYPE_CHECKING:
    from collections.abc import Callable

    from amptune.policy.findings import Finding
    from amptune.runtime.graphs.recorder import Recorder

__all__ = ["GraphedModel"]


class GraphedModel(nn.Module):
    """A wrapper of `model` that replays recorded training passes; all other passes run the model itself.

    A pass is recorded when its inputs' shapes come for the second time, and is now and then compared with the model's
    own, which then is the one that trains. The model itself runs in evaluation, without gradients, after a change, and
    while a backward pass may still need the tensors of the last forward pass. If a pass cannot be recorded, or a replay
    differs, or a backward pass comes that was not recorded, `say` gets one finding, and the model runs from then on.

    Attributes are read from and written to the model. As with `torch.compile`, the wrapper's state_dict has another
    prefix: save the model's own.
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
        """The mode of the model."""
        return self._orig_mod.training

    @training.setter
    def training(self, _: bool) -> None:
        """Ignores the value that PyTorch sets when it makes a module; later `__setattr__` sets the model's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        is_replica = vars(self).get("_is_replica", False)  # DataParallel makes a replica for one pass
        if torch.compiler.is_compiling() or is_replica:
            return self._orig_mod(*args, **kwargs)
        return self.recordings.run(args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedModel:
        """A copy has recordings of its own."""
        own = self.recordings
        return GraphedModel(deepcopy(own.model, memo), own.say, recorder=own.recorder, device_type=own.device_type)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the model itself."""
        return _itself, (self._orig_mod,)

    def __getattr__(self, name: str) -> Any:
        """Returns the model's attribute if the wrapper does not have it."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["_orig_mod"], name)

    def __getitem__(self, place: Any) -> Any:
        return self._orig_mod[place]  # type: ignore[index]

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets the attributes that PyTorch gives every module on the wrapper, all others on the model."""
        if name in vars(self) or "_orig_mod" not in vars(self).get("_modules", {}):
            super().__setattr__(name, value)
        else:
            setattr(self._orig_mod, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._orig_mod, name)


def _itself(model: nn.Module) -> nn.Module:
    return model


def _on_model(do: Callable[..., Any]) -> Callable[..., Any]:
    return lambda wrapper, *args, **kwargs: do(wrapper._orig_mod, *args, **kwargs)


# Python looks for the first four on the class, and nn.Module would register on the wrapper.
_OF_MODEL: dict[str, Callable[..., Any]] = {
    "__contains__": operator.contains,
    "__len__": len,
    "__iter__": iter,
    "__bool__": bool,
    "register_buffer": lambda model, *args, **kwargs: model.register_buffer(*args, **kwargs),
    "register_parameter": lambda model, *args, **kwargs: model.register_parameter(*args, **kwargs),
    "add_module": lambda model, *args, **kwargs: model.add_module(*args, **kwargs),
}
for _name, _do in _OF_MODEL.items():
    setattr(GraphedModel, _name, _on_model(_do))
