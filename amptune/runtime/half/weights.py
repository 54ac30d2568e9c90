"""The weights and buffers of a model held in half, as `model.half()` would, and the FP32 values they stand for.

Parameters keep their identity, so optimizers still hold them. If the policy has master weights, every trained half
weight has an FP32 master, made from the original weight: optimizers update the master, checkpoints save and load it,
and `undo` puts it back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from amptune.runtime.gradient_dtype import take_gradients_in

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

__all__ = ["HALF", "HalfWeights", "HeldWeight"]

HALF = torch.float16
_META = torch.device("meta")


@dataclass(slots=True, eq=False)
class HeldWeight:
    """A parameter in half. `master` is its FP32 value, or None; `seen` are the versions of both when they agreed.

    `gradient` is that of the parameter while it is undone.
    """

    half: nn.Parameter
    master: nn.Parameter | None = None
    seen: tuple[int, int] = (-1, -1)
    gradient: torch.Tensor | None = None

    @property
    def fp32(self) -> nn.Parameter:
        """The master; only for a weight that has one."""
        assert self.master is not None  # noqa: S101  # `with_master` has seen to that
        return self.master

    @property
    def versions(self) -> tuple[int, int]:
        return self.half._version, self.fp32._version


@dataclass(slots=True, eq=False)
class _Buffer:
    """A buffer in half, and its FP32 value, if it had one.

    It is held by name, as moving a model to a device replaces its buffers.
    """

    module: nn.Module
    name: str
    fp32: torch.Tensor | None = None

    @property
    def half(self) -> torch.Tensor | None:
        now = self.module._buffers.get(self.name)
        return now if now is not None and now.dtype is HALF else None


class HalfWeights:
    """The weights and buffers of a model that are in half, from `convert` until `undo`.

    A weight's FP32 value is its master, wherever the master still rounds to the weight; elements that were written to
    since have the value that was written. If only the master was written to (state_dict() gives it out), the weight
    becomes the rounded master.
    """

    def __init__(self, *, masters: bool) -> None:
        self.has_masters = masters
        self._weights: dict[nn.Parameter, HeldWeight] = {}
        self._buffers: list[_Buffer] = []
        self._not_ours: set[tuple[nn.Module, str]] = set()  # buffers that were in half already
        self.modules: list[nn.Module] = []

    def convert(self, model: nn.Module, kept: Collection[nn.Module]) -> None:
        """Converts the own weights and buffers of the model's modules, except the modules `kept` in FP32."""
        self._not_ours = {(module, name) for module, name, _ in _buffers_in_half(model)}
        self.modules = [module for module in model.modules() if module not in kept]
        for module in self.modules:
            self._convert(module)
        self._flatten()

    def adopt(self, model: nn.Module, kept: Collection[nn.Module]) -> None:
        """Takes in half weights and buffers that were made of those it has: by `weight_norm`, or by pruning."""
        self.modules = [*dict.fromkeys([*self.modules, *(one for one in model.modules() if one not in kept)])]
        for parameter in model.parameters():
            if parameter.dtype is HALF and parameter not in self._weights:
                self._take(parameter)
        known = self._not_ours.union((buffer.module, buffer.name) for buffer in self._buffers)
        self._buffers += [_Buffer(one, name) for one, name, _ in _buffers_in_half(model) if (one, name) not in known]

    def _convert(self, module: nn.Module) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.dtype is torch.float32:
                self._take(parameter)
        shared = {id(known.half): known.fp32 for known in self._buffers}
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype is torch.float32:
                self._buffers.append(_Buffer(module, name, buffer.detach()))
                buffer.data = buffer.data.to(HALF)
            elif id(buffer) in shared:
                self._buffers.append(_Buffer(module, name, shared[id(buffer)]))

    def _take(self, parameter: nn.Parameter) -> None:
        weight = self._weights[parameter] = HeldWeight(parameter)
        gradient, parameter.grad = parameter.grad, None
        is_whole = parameter.dtype is torch.float32 and not nn.parameter.is_lazy(parameter)
        if self.has_masters and parameter.requires_grad and is_whole:
            weight.master = nn.Parameter(parameter.data)
        parameter.data = parameter.data.to(HALF)
        if weight.master is not None:
            weight.seen = weight.versions
        dtype = torch.float32 if self.has_masters else HALF
        take_gradients_in(dtype, parameter)
        parameter.grad = None if gradient is None else gradient.to(dtype)

    def undo(self) -> None:
        """Puts all back to FP32: the values of masters and of FP32 buffers; weights without a master are widened.

        After an interruption another call goes on.
        """
        for weight in self._weights.values():
            half = weight.half
            if half.dtype is not torch.float32:
                if half.grad is not None:
                    weight.gradient, half.grad = half.grad, None
                half.data = _plain(half) if weight.master is None else self._fresh(weight).data
            take_gradients_in(torch.float32, half)
            if weight.gradient is not None:
                half.grad = weight.gradient.float()
        for buffer in self._buffers:
            if buffer.half is not None:
                buffer.half.data = _restored(buffer.half, buffer.fp32)
        self._weights, self._buffers = {}, []
        self._flatten()

    @property
    def is_empty(self) -> bool:
        """True if no weight is held in half: the model has no FP32 weights, or all of them stay in FP32."""
        return not self._weights

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._weights

    def with_master(self, parameter: nn.Parameter) -> HeldWeight | None:
        """Returns a parameter in half with its master, made now if it was frozen or lazy; None for any other."""
        weight = self._weights.get(parameter)
        if weight is not None and weight.master is None:
            self._fresh(weight)
        return weight

    def refresh(self, weights: Sequence[HeldWeight]) -> None:
        """Updates masters and weights with what was written to the other; moves masters to the weights' device."""
        for weight in weights:
            half, master = weight.half, weight.master
            if master is None or weight.seen != weight.versions or master.device != half.device:
                self._fresh(weight)

    @torch.no_grad()
    def _fresh(self, weight: HeldWeight) -> nn.Parameter:
        if weight.master is not None and weight.seen[0] == weight.half._version and weight.seen != weight.versions:
            weight.half.copy_(weight.master)
        value = _value(weight.half, weight.master)
        if weight.master is None:
            weight.master = nn.Parameter(value, requires_grad=weight.half.requires_grad)
        elif weight.master.shape == value.shape and weight.master.device == value.device:
            weight.master.copy_(value)
        else:
            weight.master.data = value
        weight.seen = weight.versions
        return weight.master

    @torch.no_grad()
    def round(self, weights: Sequence[HeldWeight]) -> None:
        """Sets the weights to their masters, rounded, in a few kernels for all of them."""
        if weights:
            torch._foreach_copy_([weight.half for weight in weights], [weight.fp32 for weight in weights])
        for weight in weights:
            weight.seen = weight.versions

    @torch.no_grad()
    def write(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        """Gives a tensor of the model an FP32 value; its master, if it has one, gets the value unrounded."""
        tensor.copy_(value)
        weight = self._weights.get(tensor)  # type: ignore[call-overload]  # a buffer is none
        if weight is not None and weight.master is not None:
            self._fresh(weight).copy_(value)

    def widen_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """With masters, converts half gradients to FP32; under DistributedDataParallel gradients come in half."""
        if not self.has_masters:
            return
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.dtype is HALF and parameter in self._weights:
                parameter.grad = gradient.float()

    def fp32_values(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Yields (name, tensor, its FP32 value) of each tensor that the module itself has in half."""
        for name, parameter in module._parameters.items():
            weight = None if parameter is None else self._weights.get(parameter)
            if weight is not None and not nn.parameter.is_lazy(weight.half):
                value = _plain(weight.half) if weight.master is None else self._fresh(weight).detach()
                yield name, weight.half, value
        for buffer in self._buffers_of(module):
            if buffer.half is not None:
                yield buffer.name, buffer.half, _value(buffer.half, buffer.fp32)

    @torch.no_grad()
    def take_masters(self, module: nn.Module, state: Mapping[str, Any], prefix: str) -> None:
        """Copies a checkpoint into masters and buffers; the weights load the same values rounded, which is no write."""
        for name, parameter in module._parameters.items():
            weight, value = None if parameter is None else self._weights.get(parameter), state.get(prefix + name)
            if weight is not None and weight.master is not None and _fits(value, weight.half):
                self._fresh(weight).copy_(value)
        for buffer in self._buffers_of(module):
            value = state.get(prefix + buffer.name)
            if buffer.half is not None and _fits(value, buffer.half):
                buffer.fp32 = value.detach().to(buffer.half.device, torch.float32, copy=True)

    def _buffers_of(self, module: nn.Module) -> Iterator[_Buffer]:
        return (buffer for buffer in self._buffers if buffer.module is module)

    def _flatten(self) -> None:
        """Flattens recurrent modules, as cuDNN wants their weights in one piece of memory."""
        for module in self.modules:
            if isinstance(module, nn.RNNBase):
                module.flatten_parameters()


def _value(half: torch.Tensor, fp32: torch.Tensor | None) -> torch.Tensor:
    """Returns the FP32 value of a tensor in half: `fp32` wherever that rounds to it, else the half value, widened."""
    wide = half.detach().float()
    if fp32 is None or fp32.shape != half.shape:
        return wide
    fp32 = fp32.detach().to(half.device)
    return torch.where(fp32.to(HALF) == half.detach(), fp32, wide)


def _restored(half: torch.Tensor, fp32: torch.Tensor | None) -> torch.Tensor:
    """Returns the FP32 value: the tensor itself, whose memory others may share, unless the buffer was written to."""
    value = _value(half, fp32)
    return fp32 if fp32 is not None and fp32.device == value.device != _META and torch.equal(value, fp32) else value


def _buffers_in_half(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.dtype is HALF:
                yield module, name, buffer


def _plain(half: nn.Parameter) -> torch.Tensor:
    return half.data.float()


def _fits(value: Any, tensor: torch.Tensor) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape
