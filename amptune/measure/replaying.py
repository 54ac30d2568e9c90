"""One module's forward call, run again by itself in FP32 or in half: what comes out, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from amptune.measure.stopwatch import hold_device
from amptune.runtime.nested import map_tensors, tensors_in

__all__ = ["Call", "Ran", "Replay", "floating_in", "kept_as_it_is", "later_ms", "versions_of"]

# The device is held for so long: more than the host needs to hand over one module's passes.
HOLD_MS = 0.5


@dataclass
class Call:
    """What a forward call was given; detached, and nothing of it copied. `versions` tell whether it was written to."""

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
        """Lets the inputs go: the hook that holds this lives as long as the graph."""
        self.args, self.kwargs, self.done = (), {}, True

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells how long it takes: another module of the same type and shapes takes as long."""
        weights = tuple((p.shape, p.dtype) for p in self.module.parameters())
        inputs = tuple((t.shape, t.dtype, t.stride()) for t in tensors_in((self.args, self.kwargs)))
        return (type(self.module), self.module.extra_repr(), weights, inputs)

    def inputs(self, dtype: torch.dtype | None) -> tuple[tuple[Any, ...], dict[str, Any], list[torch.Tensor]]:
        """(args, kwargs, those of their tensors that need a gradient), copied: a module may write into its inputs."""
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


@dataclass
class Ran:
    """What came of running a call again: outputs, and the gradients of weights and of inputs."""

    outputs: list[torch.Tensor]
    weights: list[torch.Tensor]
    inputs: list[torch.Tensor]


class Replay:
    """Forward and backward of one call, its inputs copied ahead; gradients come out divided by `scale` again.

    `gradients` are those of the outputs that need one, None of an output that nothing came of.
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

    def run(self) -> Ran:
        with kept_as_it_is(self._module, self._device):
            torch.manual_seed(0)  # a module that draws numbers draws the same in every precision
            outputs = self._forward()
        self._gradients = [
            (self._scale * gradient).to(out.dtype) for gradient, out in zip(self._gradients, outputs, strict=True)
        ]
        found = self._backward(outputs)
        zero = outputs[0].new_zeros((), dtype=torch.float32)
        unscaled = [zero if one is None else one.float() / self._scale for one in found]
        count = len(self._weights)
        return Ran([out.detach() for out in outputs], unscaled[:count], unscaled[count:])

    def backpropagate(self) -> None:
        """Once more, and nothing besides: this is what is timed."""
        self._backward(self._forward())

    def _forward(self) -> list[torch.Tensor]:
        with self._precision:
            output = self._module(*self._args, **self._kwargs)
        need = [tensor for tensor in floating_in(output) if tensor.requires_grad]
        return [tensor for tensor, used in zip(need, self._used, strict=True) if used]

    def _backward(self, outputs: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        wanted = [*self._weights, *self._inputs]
        return torch.autograd.grad(outputs, wanted, self._gradients, allow_unused=True)


def later_ms(run: Callable[[], object], device: torch.device) -> Callable[[], float]:
    """Times one run; on a GPU its time can be asked for once the device is done.

    There the device is kept waiting while the host hands the run over, or it is the host that would be timed.
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
    """The module's buffers are copies, whose changes nobody sees; training's random numbers go on as they would."""
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
    """How often each tensor was written to."""
    return [tensor._version for tensor in tensors_in(value)]


def floating_in(value: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(value) if tensor.is_floating_point()]
