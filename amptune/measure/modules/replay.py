"""Replay of one module's forward call alone, in FP32 or in half, for its time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from amptune.changes.tensor_tree import map_tensors, tensors_in
from amptune.measure.bench.clocks import hold_device

__all__ = ["TIMED_RUNS", "Call", "Replay", "floating_in", "kept_as_it_is", "later_ms", "versions_of"]

# Modules of one type and shape share their times, and so do products: this many runs of them are timed in total.
TIMED_RUNS = 3
# The device is held this long: more than the host needs to enqueue one module's passes.
HOLD_MS = 1.0


@dataclass
class Call:
    """The inputs of a forward call, detached but not copied. `versions` shows if they were written to."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    need_gradient: list[bool]
    versions: list[int]
    done: bool = False

    @property
    def intact(self) -> bool:
        return versions_of((self.args, self.kwargs)) == self.versions

    def finish(self) -> None:
        """Frees the inputs: the hook that holds this call lives as long as the graph."""
        self.args, self.kwargs, self.done = (), {}, True

    @property
    def key(self) -> tuple[Any, ...]:
        """Key for sharing times: calls with equal keys (module type and shapes) take the same time."""
        weights = tuple((p.shape, p.dtype) for p in self.module.parameters())
        inputs = tuple((t.shape, t.dtype, t.stride()) for t in tensors_in((self.args, self.kwargs)))
        return (type(self.module), self.module.extra_repr(), weights, inputs)

    def inputs(self, dtype: torch.dtype | None) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """Returns copies, as a module may write into its inputs: (args, kwargs, their tensors that need a gradient)."""
        need = iter(self.need_gradient)
        leaves: list[torch.Tensor] = []

        def fresh(tensor: torch.Tensor) -> torch.Tensor:
            wanted = next(need)
            if not tensor.is_floating_point():
                return tensor
            copy = tensor.clone() if dtype is None or tensor.dtype is not torch.float32 else tensor.to(dtype)
            if wanted:
                leaves.append(copy.requires_grad_())
            return copy

        args, kwargs = map_tensors(fresh, (self.args, self.kwargs))
        return args, kwargs, leaves


class Replay:
    """Forward and backward pass of one call, with inputs copied beforehand; `scale` is a loss scale.

    `gradients` are those of the outputs that need one, None for an output that was not used.
    """

    def __init__(
        self,
        call: Call,
        gradients: Sequence[torch.Tensor | None],
        dtype: torch.dtype | None,
        device: torch.device,
        scale: float,
    ) -> None:
        self._module = call.module
        self._args, self._kwargs, self._inputs = call.inputs(dtype)
        self._weights = [weight for weight in call.module.parameters() if weight.requires_grad]
        self._used = [gradient is not None for gradient in gradients]
        self._gradients = [gradient for gradient in gradients if gradient is not None]
        self._precision = torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
        self._device = device
        self._scale = scale

    def run(self) -> list[torch.Tensor]:
        """Runs both passes; returns the outputs that are used."""
        with kept_as_it_is(self._module, self._device):
            outputs = self._forward()
        self._gradients = [
            (self._scale * gradient).to(out.dtype) for gradient, out in zip(self._gradients, outputs, strict=True)
        ]
        self._backward(outputs)
        return [out.detach() for out in outputs]

    def backpropagate(self) -> None:
        """Runs only the forward and backward pass once more, for timing."""
        self._backward(self._forward())

    def _forward(self) -> list[torch.Tensor]:
        with self._precision:
            output = self._module(*self._args, **self._kwargs)
        need = [tensor for tensor in floating_in(output) if tensor.requires_grad]
        return [tensor for tensor, used in zip(need, self._used, strict=True) if used]

    def _backward(self, outputs: list[torch.Tensor]) -> None:
        torch.autograd.grad(outputs, [*self._weights, *self._inputs], self._gradients, allow_unused=True)


def later_ms(run: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Times one run; returns a function for its time in ms, on a GPU to be called when the device is done.

    A GPU is held while the host enqueues the run; otherwise the host would be timed.
    """
    if device.type != "cuda":
        start_s = time.perf_counter()
        run()
        took_ms = 1000 * (time.perf_counter() - start_s)
        return lambda: took_ms
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    hold_device(HOLD_MS)
    before.record()
    run()
    after.record()
    return lambda: float(before.elapsed_time(after))


@contextmanager
def kept_as_it_is(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Replaces the module's buffers by copies and restores them and the random generators at the end."""
    buffers = dict(module._buffers)
    copies = {name: buffer.detach().clone() for name, buffer in buffers.items() if buffer is not None}
    module._buffers.update(copies)
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        module._buffers.clear()
        module._buffers.update(buffers)


def versions_of(value: Any) -> list[int]:
    """Returns how often each tensor was written to."""
    return [tensor._version for tensor in tensors_in(value)]


def floating_in(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]
