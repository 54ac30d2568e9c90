"""The state of a built model, from which each training starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from amptune.changes.tensor_tree import stored_in
from amptune.measure.bench.drawn_batches import bytes_of, sums_of
from amptune.measure.bench.plain_attributes import PlainAttributes, can_be_written

__all__ = ["InitialState"]

# Initial weights of at most this share of the device's memory are kept on it while training restarts from them often.
NEAR_SHARE = 1 / 32


class InitialState:
    """A model's weights, buffers, modes and plain attributes at this moment, when it is on the CPU."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._values = [self._kept(tensor) for tensor in self._tensors()]
        self._near: list[torch.Tensor] | None = None  # only while the model stays on the device
        self._sums: tuple[float, ...] | None = None
        self._kinds = self._kinds_now()
        self._attributes = PlainAttributes(model)
        self._modes = {module: module.training for module in model.modules()}

    def _tensors(self) -> list[torch.Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor's value, for good: what is trained on another device is a copy of it already."""
        value = tensor.detach()
        return value if tensor.device.type == "cpu" and self._device.type != "cpu" else value.clone()

    def _kinds_now(self) -> list[tuple[torch.Size, torch.dtype, bool]]:
        return [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in self._tensors()]

    @property
    def fits(self) -> bool:
        """False if training made, dropped or converted a parameter or buffer: copying cannot undo that."""
        return self._kinds_now() == self._kinds

    @property
    def is_near(self) -> bool:
        """True while a copy is kept on the device."""
        return self._near is not None

    def keep_near(self) -> None:
        """Keeps a copy on the device, where the model is in its initial state, if it is small."""
        if self._near is None and self._is_small:
            self._near = [tensor.detach().clone() for tensor in self._tensors()]

    def forget_near(self) -> None:
        self._near = None

    @property
    def _is_small(self) -> bool:
        if self._device.type != "cuda":
            return False
        total = torch.cuda.get_device_properties(self._device).total_memory
        return bytes_of(self._values) <= NEAR_SHARE * total

    def sums(self) -> tuple[float, ...]:
        """Returns sums of the weights and buffers."""
        if self._sums is None:
            self._sums = sums_of(self._values)
        return self._sums

    @torch.no_grad()
    def put_back(
        self,
        weights: Sequence[torch.Tensor] = (),
        write: Callable[[torch.Tensor, torch.Tensor], object] | None = None,
    ) -> None:
        """Restores the model, each tensor by `write`. With `weights`, one for each parameter, these get them."""
        self._attributes.put_back()
        initial_state = self._values if self._near is None else self._near
        for tensor, initial in zip(self._tensors(), [*weights, *initial_state[len(weights) :]], strict=True):
            if can_be_written(tensor) and stored_in(tensor)[0].data_ptr() != stored_in(initial)[0].data_ptr():
                if tensor.shape != initial.shape:
                    tensor.resize_(initial.shape)  # observers of quantization-aware training resize their buffers
                tensor.copy_(initial) if write is None else write(tensor, initial)
            tensor.grad = None
        for module, training in self._modes.items():
            module.training = training

    def replace_trained(self) -> None:
        """Gives the parameters the initial values themselves.

        What was trained is not needed again, and copying it to the CPU takes as long as a trial's first steps.
        """
        if self.fits:
            for parameter, initial in zip(self._model.parameters(), self._values, strict=False):
                parameter.data = initial
