"""A forward whose activations are not kept for the backward pass, which computes them again.

That is `torch.utils.checkpoint` without reentrance, which keeps the random numbers and autocast's state. In addition,
what is computed again meets the buffers as the forward pass met them, and changes none: BatchNorm's statistics would
count each batch twice.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import checkpoint

from amptune.changes.blocks import holds_compiled
from amptune.runtime.replica import replica_with_buffers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["recomputed_forward_of"]


def recomputed_forward_of(cls: type[nn.Module]) -> Callable[..., Any]:
    """Returns the class's forward as it runs in training; without gradients and in evaluation it is its own."""

    @functools.wraps(cls.forward, updated=())
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not (self.training and torch.is_grad_enabled()):
            return cls.forward(self, *args, **kwargs)
        # All arguments are positional ones: of others PyTorch would see neither devices nor changes in place.
        devices, count = () if torch.compiler.is_compiling() else _devices_of(self), len(args)
        passes: list[_Buffers] = []

        def run(*given: Any) -> Any:
            own = given[len(devices) :]
            named = dict(zip(kwargs, own[count:], strict=True))
            # A compiled graph writes to buffers once. What the compiler cannot trace is run without it, whole.
            if torch.compiler.is_compiling():
                return cls.forward(self, *own[:count], **named)
            module, around = _around(passes, self)
            with around:
                return cls.forward(module, *own[:count], **named)

        return checkpoint(run, *devices, *args, *kwargs.values(), use_reentrant=False)

    return forward


def _around(passes: list[_Buffers], module: nn.Module) -> tuple[nn.Module, _Buffers | _Lent | nullcontext[None]]:
    """Returns what runs, and in which context: the forward pass, which comes first, or one that computes it again."""
    if not passes:
        passes.append(_Buffers(module))
        return module, passes[0]
    if holds_compiled(module):  # what is compiled belongs to one object
        return module, passes[0].lent()
    return passes[0].replica_of(module), nullcontext()


def _devices_of(module: nn.Module) -> tuple[torch.Tensor, ...]:
    """Returns a tensor on the module's GPU, whose random numbers are kept even if no argument is there."""
    first = next(module.parameters(), None)
    return () if first is None or first.device.type == "cpu" else (torch.empty(0, device=first.device),)


class _Buffers:
    """The buffers that a forward pass of a module changes, as they were before it; a context for that pass."""

    def __init__(self, module: nn.Module) -> None:
        self._holders = [one for one in module.modules() if one._buffers]
        self._before: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []

    def __enter__(self) -> None:
        self._copies = [{name: one.detach().clone() for name, one in _present(holder)} for holder in self._holders]
        self._states = [_state(holder) for holder in self._holders]

    def __exit__(self, *_: object) -> None:
        for holder, state, copies in zip(self._holders, self._states, self._copies, strict=True):
            # kernels of BatchNorm write to its statistics and count no version
            if isinstance(holder, _NormBase) or not _are_same(_state(holder), state):
                self._before.append((holder, copies))
        del self._holders, self._states, self._copies  # with what did not change

    def replica_of(self, module: nn.Module) -> nn.Module:
        """Returns a replica of the module that has copies of these buffers."""
        copies = {holder: {name: one.clone() for name, one in held.items()} for holder, held in self._before}
        return replica_with_buffers(module, copies, {})

    def lent(self) -> _Lent:
        return _Lent(self._before)


class _Lent:
    """A context in which modules have copies of these buffers; entered once for each backward pass."""

    def __init__(self, buffers: Sequence[tuple[nn.Module, dict[str, torch.Tensor]]]) -> None:
        self._lent = buffers

    def __enter__(self) -> None:
        self._own = [(holder, dict(holder._buffers)) for holder, _ in self._lent]
        for holder, buffers in self._lent:
            holder._buffers.update({name: buffer.clone() for name, buffer in buffers.items()})

    def __exit__(self, *_: object) -> None:
        for holder, buffers in self._own:
            holder._buffers.update(buffers)
        del self._own


def _present(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [(name, buffer) for name, buffer in module._buffers.items() if buffer is not None]


def _state(module: nn.Module) -> list[tuple[torch.Tensor, int]]:
    return [(buffer, buffer._version) for _, buffer in _present(module)]


def _are_same(now: Sequence[tuple[torch.Tensor, int]], before: Sequence[tuple[torch.Tensor, int]]) -> bool:
    pairs = zip(now, before, strict=False)
    return len(now) == len(before) and all(one is other and at == then for (one, at), (other, then) in pairs)
