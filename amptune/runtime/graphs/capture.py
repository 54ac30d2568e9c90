"""A model's forward and backward pass, recorded once as CUDA graphs, to be replayed with the next batches.

Launching a recorded pass takes the host almost no time, whatever the number of its kernels, and the kernels are
PyTorch's own: nothing is compiled (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs). A replay reads
and writes the same memory each time, so this module copies inputs into it and results out of it.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from amptune.changes.blocks import holds_compiled
from amptune.runtime.graphs.differences import Difference, Limits, named_gradients, named_results
from amptune.runtime.graphs.host_effects import DeviceState, NotRecordableError, alike, without_effects, without_repeats
from amptune.runtime.graphs.proxy_weights import with_proxies, without_hooks
from amptune.runtime.graphs.recorder import as_written
from amptune.runtime.graphs.signature import outputs_of
from amptune.runtime.graphs.tensor_use import (
    WAITS,
    TensorWatch,
    WaitMode,
    edges_for,
    name_of_node,
    require_apart,
    sources_among,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import nn

    from amptune.runtime.graphs.recorder import Recorder
    from amptune.runtime.graphs.signature import PassKind

__all__ = ["Recording", "UnusualError", "like"]


# A recording is given up once so many waits for the device had another result, which the model then computed itself, if
# they are one of so many calls or more: the padded batch at the end of each epoch is no reason.
MOST_SURPRISES = 8


class UnusualError(Exception):
    """A batch for which the recorded pass is not the model's; its message says why."""


class Recording:
    """The recorded forward and backward pass of a model for tensors like `inputs`, with the weights at their addresses.

    `of_outputs` are gradients of outputs, by place: those from which the backward pass begins. Raises
    `NotRecordableError`, or any error of the model.
    """

    def __init__(
        self,
        kind: PassKind,
        model: nn.Module,
        inputs: Sequence[torch.Tensor],
        of_outputs: Mapping[int, torch.Tensor],
        by: Recorder,
    ) -> None:
        self.kind, self.model = kind, model
        self.own = kind.caller(model, inputs[0].device.type)
        self.calls = self._surprises = 0
        self.inputs = [like(tensor) for tensor in inputs]
        self.of_outputs = of_outputs
        self.last: Callable[[], Any] = lambda: None  # the last replay, as long as the loop may come back to it
        self.doubt: Difference | None = None  # that the next comparison is to settle
        self.by = by
        self._compiles = holds_compiled(model)
        with without_effects(model) as put_back, with_proxies(model) as by_own:
            fixed, buffers = [*self.inputs, *model.parameters()], [*model.buffers()]
            edges = partial(edges_for, weights=[*by_own.values()], others=[*fixed, *buffers])
            numbers = self._rehearse(edges, put_back)
            put_back()
            outputs = self._record_forward(numbers)
            require_apart(outputs, [*fixed, *buffers])
            self._record_backward(outputs, edges, [*by_own])

    def _rehearse(self, edges: Callable[..., Any], put_back: Callable[[], None]) -> list[Any]:
        """Returns the numbers for which the pass waits, and measures the limits of differences."""
        known = [*self.inputs, *self.model.parameters(), *self.of_outputs.values()]
        numbers: list[Any] = []
        for around in (self.by.warming_up(), self.by.rehearsing()):
            put_back()
            with around, as_written(self._compiles), TensorWatch(known, [*self.model.buffers()]) as watch:
                rehearsed = self._pass(edges)
            numbers, former = watch.seen, numbers
        if repr(numbers) != repr(former):
            raise NotRecordableError(WAITS)

        def another() -> dict[str, torch.Tensor]:
            put_back()
            with self.by.warming_up(), WaitMode(numbers):
                return self._pass(edges)

        self.limits = self._limits(another() if self._compiles else rehearsed, another)
        return numbers

    def _record_forward(self, numbers: Sequence[Any]) -> list[torch.Tensor]:
        self._same: torch.Tensor | None = None

        def forward() -> Any:
            with WaitMode(numbers) as waiting:
                returned = self._called()
            # a library may leave the question out while a graph is captured, and compute what is right for any answer
            self._same = torch.stack(waiting.same).all() if waiting.same else None
            return returned

        returned, self._forward = self.by.record(forward)
        if any(map(vars, self.inputs)):
            raise NotRecordableError("sets attributes of its inputs")
        self.returns, outputs = outputs_of(returned)
        self._outputs = [one.detach() for one in outputs]  # their autograd graph belongs to the recording's stream
        self.sources = sources_among(outputs)
        self.has_gradient = [one.requires_grad for one in outputs]
        self.node_name = next((name for one in outputs if (name := name_of_node(one))), "")
        return outputs

    def _record_backward(
        self, outputs: Sequence[torch.Tensor], edges: Callable[..., Any], weights: Sequence[nn.Parameter]
    ) -> None:
        ends = self._ends(outputs)
        self.of_outputs = {place: torch.zeros_like(one) for place, one in ends.items()}
        starts, points = list(self.of_outputs.values()), edges([*ends.values()])
        found, self._backward = self.by.record(
            lambda: torch.autograd.grad([*ends.values()], points, starts, allow_unused=True)
        )
        pairs = [(own, gradient) for own, gradient in zip(weights, found, strict=True) if gradient is not None]
        if any(gradient.layout is not torch.strided for _, gradient in pairs):
            raise NotRecordableError("has gradients that are sparse")
        self.weights = [own for own, _ in pairs]
        self._gradients = [gradient for _, gradient in pairs]
        self._dtypes = [_widest_of(*pair) for pair in pairs]
        self._alike = alike(zip((one.dtype for one in self._gradients), self._dtypes, strict=True))

    def _ends(self, outputs: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Returns the outputs from which the backward pass begins, by place."""
        ends = {place: one for place, one in enumerate(outputs) if one.requires_grad and place in self.of_outputs}
        if not ends:
            raise NotRecordableError("gives nothing that has a gradient")
        return ends

    def _called(self) -> Any:
        """Calls with an empty autocast cache, as cached casts are not recorded; then empties it of the recorded."""
        torch.clear_autocast_cache()
        try:
            return self.own(self.inputs)
        finally:
            torch.clear_autocast_cache()

    def _pass(self, edges: Callable[..., Any]) -> dict[str, torch.Tensor]:
        """Returns the outputs, buffers and gradients of one pass of the model, by name."""
        _, outputs = outputs_of(self._called())
        ends = self._ends(outputs)
        starts = [_gradient_for(one, self.of_outputs[place]) for place, one in ends.items()]
        weights = [one for one in self.model.parameters() if one.requires_grad]
        found = torch.autograd.grad([*ends.values()], edges([*ends.values()]), starts, allow_unused=True)
        buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        gradients = named_gradients(self.model, zip(weights, found, strict=True))
        return {**named_results(outputs, buffers), **gradients}

    def _limits(self, first: Mapping[str, torch.Tensor], another: Callable[[], Mapping[str, torch.Tensor]]) -> Limits:
        return Limits.of(first, another, self.inputs, [*self.of_outputs.values()], self.model)

    def measure_limits(self, inputs: Sequence[torch.Tensor]) -> None:
        """Widens the limits by what passes for these inputs differ by; nothing trains."""
        self._copy_in(inputs)
        weights = [one for one in self.model.parameters() if one.requires_grad]

        def another() -> dict[str, torch.Tensor]:
            put_back()
            return self._pass(lambda _: weights)

        with without_effects(self.model) as put_back, without_hooks(weights):
            self.limits = self.limits.widened(self._limits(another(), another))

    @property
    def is_busy(self) -> bool:
        """True while a later backward pass may need the tensors that the last forward pass kept."""
        last = self.last()
        return last is not None and not last.over

    def surprises_often(self) -> bool:
        """Notes that a batch was unusual; returns True if too many were."""
        self._surprises += 1
        return self._surprises >= max(MOST_SURPRISES, self.calls / MOST_SURPRISES)

    def begin(self, inputs: Sequence[torch.Tensor]) -> None:
        """Replays the forward pass. Raises `UnusualError` if it waits for numbers that are not those recorded."""
        self._copy_in(inputs)
        before = None if self._same is None else DeviceState(self.model)
        self._forward()
        if self._same is not None and before is not None and not self._same.item():
            before.put_back()
            raise UnusualError(WAITS + ", and the result is not always the same")

    def _copy_in(self, inputs: Sequence[torch.Tensor]) -> None:
        self.by.take_turn()
        for own, given in zip(self.inputs, inputs, strict=True):
            without_repeats(own).copy_(without_repeats(given), non_blocking=True)

    def outputs(self) -> list[torch.Tensor]:
        """Returns copies of the outputs of the last replay."""
        return [one.clone() for one in self._outputs]

    def go_back(self, of_outputs: Sequence[torch.Tensor | None]) -> None:
        """Replays the backward pass for these gradients of the outputs."""
        for place, given in enumerate(of_outputs):
            if given is not None:
                self.of_outputs[place].copy_(given, non_blocking=True)
        self._backward()

    def gradients(self) -> list[torch.Tensor]:
        """Returns copies of the gradients of `weights`, as the next replay overwrites them; half ones are cast."""
        copies = [torch.empty_like(one, dtype=dtype) for one, dtype in zip(self._gradients, self._dtypes, strict=True)]
        for places in self._alike:
            torch._foreach_copy_([copies[place] for place in places], [self._gradients[place] for place in places])
        return copies

    def recorded_gradients(self) -> dict[str, torch.Tensor]:
        """Returns the gradients of the last replay by a name for messages; the next one overwrites them."""
        return named_gradients(self.model, zip(self.weights, self._gradients, strict=True))


def _gradient_for(output: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    return known if (known.shape, known.dtype) == (output.shape, output.dtype) else torch.ones_like(output)


def _widest_of(own: torch.Tensor, gradient: torch.Tensor) -> torch.dtype:
    """Returns the wider dtype: a half weight may have FP32 gradients, and others' gradients may be taken in half."""
    return torch.promote_types(own.dtype, gradient.dtype)


def like(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same strides; an expanded tensor is expanded in the copy too."""
    plain = without_repeats(tensor.detach())
    own = torch.empty_strided(plain.shape, plain.stride(), dtype=plain.dtype, device=plain.device)
    return own.copy_(plain).expand(tensor.shape)
