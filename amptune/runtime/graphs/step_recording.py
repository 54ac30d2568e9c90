"""One training step, recorded as one CUDA graph, and how a replay of it is compared with the step itself."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch

from amptune.runtime.graphs.capture import like
from amptune.runtime.graphs.differences import unit_of
from amptune.runtime.graphs.host_effects import (
    HostSnapshot,
    NotRecordableError,
    RandomState,
    SavedValues,
    without_repeats,
)
from amptune.runtime.graphs.optimizer_inputs import OptimizerInputs
from amptune.runtime.graphs.signature import outputs_of
from amptune.runtime.graphs.step_memory import MemoryWatch, differences, whole
from amptune.runtime.graphs.tensor_use import place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from amptune.runtime.graphs.recorder import Recorder
    from amptune.runtime.graphs.step_parts import StepKind, StepParts

__all__ = ["StepRecording"]

# A difference counts above so many times what the step's own results differ by.
SLACK, LEAST = 4.0, 1e-5


class StepRecording:
    """One recorded step for batches like `tensors`; `watch` saw the memory that it uses.

    Raises `NotRecordableError`, or any error of the step.
    """

    def __init__(
        self,
        kind: StepKind,
        step: Callable[[Any], Any],
        subject: StepParts,
        tensors: Sequence[torch.Tensor],
        watch: MemoryWatch,
        by: Recorder,
    ) -> None:
        self.kind = kind
        self.calls, self.compared_at, self.due = 0, 0, 1
        self.inputs = [like(one) for one in tensors]
        self._step, self._by, self._subject = step, by, subject
        self._kept = watch  # and what it read, which replays read too
        self._device = subject.device
        weights = subject.weights
        gradients = [one.grad for one in weights]
        # gradients that the step adds to, where replays read them
        self._before = [(weights[number], one) for number in watch.added if (one := gradients[number]) is not None]
        self.optimizers = OptimizerInputs(subject.optimizers, subject.recipe.scaler, self._device)
        random_state, host = RandomState(self._device), HostSnapshot(subject.models, subject.code)
        torch.clear_autocast_cache()
        try:
            with self.optimizers.as_recorded():
                returned, self._replay = by.record(lambda: step(kind.filled(self.inputs)))
            self.returns, outputs = outputs_of(returned)
        finally:
            torch.clear_autocast_cache()
            random_state.put_back()
            host.put_back()
        self._outputs = {f"output {number}": one.detach() for number, one in enumerate(outputs, 1)}
        # and those that it leaves, where replays write them
        self._left = [(one, one.grad) for one in weights if one.grad is not None]
        self._empty = [one for one in weights if one.grad is None]
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        of_weights = {place_of(one): one for _, one in (*self._before, *self._left)}
        left = {f"gradient {number}": whole(one) for number, one in enumerate(of_weights.values(), 1)}
        self._state = {**subject.named({place: whole(one) for place, one in watch.written.items()}), **left}

    def _bring(self) -> None:
        """Lays the gradients that the step adds to where replays read them."""
        for weight, gradient in self._before:
            if weight.grad is not None and weight.grad is not gradient:
                weight.grad = gradient.copy_(weight.grad)

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Trains, and returns copies of what the step returned."""
        self._by.take_turn()
        self._bring()
        for own, given in zip(self.inputs, tensors, strict=True):
            without_repeats(own).copy_(without_repeats(given), non_blocking=True)
        self.optimizers.fill()
        self._replay()
        for weight, gradient in self._left:
            weight.grad = gradient
        for weight in self._empty:
            weight.grad = None
        return self.returns.filled([one.clone() for one in self._outputs.values()])

    def compared(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, str | None]:
        """Returns what the step itself returns, which trains on, and how a replay differs from it, or None.

        Raises `OutOfMemoryError` with everything as before.
        """
        self._bring()
        before = SavedValues([*self._state.values()], self._device)
        weights = self._subject.weights
        gradients = [one.grad for one in weights]

        def go_back() -> None:
            before.put_back()
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient

        try:
            self.replay(tensors)
            replayed = self._results(SavedValues([*self._state.values()], self._device).copies)
            go_back()
            returned, told = self._trained(tensors)
            starts = dict(zip(self._state, before.copies, strict=True))
            found = {} if told else differences(self._results(), replayed, starts)
            if found:
                allowed = self._allowed(tensors, starts, go_back)
                found = {name: apart for name, apart in found.items() if apart > allowed.get(name, 0.0) + LEAST}
        except torch.OutOfMemoryError:
            go_back()
            raise
        name, apart = next(iter(found.items()), ("", 0.0))
        return returned, told or (f"{name} is another by {apart:.2g} of its change" if found else None)

    def _trained(self, tensors: Sequence[torch.Tensor]) -> tuple[Any, str | None]:
        """Runs the step itself; leaves its gradients where replays do, and tells what else it did than a replay."""
        gradients = [one.grad for one in self._subject.weights]
        watch = None if self._subject.compiles else MemoryWatch(tensors, gradients, self._device)
        with watch or nullcontext():
            returned = self._step(self.kind.filled(tensors))
        try:
            signature, outputs = outputs_of(returned)
        except NotRecordableError:
            return returned, "what it returns is another"
        if signature != self.returns:
            return returned, "what it returns is another"
        self._own = [one.detach() for one in outputs]
        for weight, gradient in self._left:
            if weight.grad is None or weight.grad.shape != gradient.shape:
                return returned, "a gradient is another"
            if weight.grad is not gradient:
                gradient.copy_(weight.grad)
                weight.grad = gradient
        others = [] if watch is None else [*watch.written.keys() ^ self._kept.written.keys()]
        if watch is not None and others:
            tensor = (watch.written | self._kept.written)[others[0]]
            return returned, f"{next(iter(self._subject.named({others[0]: tensor})))} is not always written"
        return returned, None

    def _results(self, state: Sequence[torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Returns what the step itself left and returned, or what a replay did with its `state`, by name."""
        outputs = self._own if state is None else self._outputs.values()
        kept = self._state.values() if state is None else state
        return dict(zip((*self._state, *self._outputs), (*kept, *outputs), strict=True))

    def _allowed(
        self, tensors: Sequence[torch.Tensor], starts: Mapping[str, torch.Tensor], go_back: Callable[[], None]
    ) -> dict[str, float]:
        """Returns by how much results of the step itself differ, alone and after a rounding error in its batch."""
        own, results = SavedValues([*self._state.values()], self._device), [*self._own]
        first = dict(zip((*self._state, *self._outputs), (*own.copies, *results), strict=True))
        found: dict[str, float] = {}
        for given in (tensors, self._rounded(tensors)):
            go_back()
            self._trained(given)
            for name, apart in differences(first, self._results(), starts).items():
                found[name] = max(found.get(name, 0.0), SLACK * apart)
        own.put_back()
        return found

    def _rounded(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the batch with floating values changed by a unit in the last place of the dtype that computes."""
        with self._subject.recipe.autocast():
            unit = unit_of(self._device.type, self._subject.models[0])
        signs = torch.Generator(self._device).manual_seed(0)
        return [
            one
            * (1 + unit * (torch.randint(0, 2, one.shape, generator=signs, device=one.device) * 2 - 1)).to(one.dtype)
            if one.is_floating_point()
            else one
            for one in tensors
        ]
