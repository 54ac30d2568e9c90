"""Cases with tensors on the CPU, with memory that is made early and freed later, and with inputs that share memory."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from graph_models.case import (
    CLASSES,
    EVENT_AT,
    HIDDEN,
    ROWS,
    WIDTH,
    GainNet,
    Net,
    Training,
    add,
    event_case,
    fading,
    loss_case,
    loss_of,
    model_case,
    numbers,
    step_case,
    update,
)

CPU, FREED, SHARED = "CPU tensors", "freed memory", "shared memory"


# --- tensors on the CPU --------------------------------------------------------------------------------------------


class OnHost(nn.Module):
    """Stays on the CPU when the model moves."""

    def _apply(self, _: Any, recurse: bool = True) -> OnHost:  # noqa: ARG002
        return self


class HostGain(OnHost):
    def __init__(self, *, is_trained: bool) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(())) if is_trained else nn.Buffer(torch.ones(()))


class BufferOnHost(Net):
    """Its 0-dim buffer on the CPU goes into kernels by value."""

    is_trained = False

    def build(self) -> None:
        self.scale: Any = HostGain(is_trained=self.is_trained)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.scale.gain


add(CPU, "host_buffer_filled", model=BufferOnHost, event=lambda t: t.model.scale.gain.fill_(0.25))


@event_case(CPU, model=BufferOnHost)
def host_buffer_filled_by_data(training: Training) -> None:
    training.model.scale.gain.data.numpy()[...] = 0.25


@model_case(CPU)
class HostBufferFalls(BufferOnHost):
    def forward(self, x: Tensor) -> Any:
        self.scale.gain.mul_(0.95)
        return super().forward(x)


class TensorOnHost(GainNet):
    """Its tensor on the CPU is a plain attribute in a list."""

    def build(self) -> None:
        self.gains = [torch.ones((), device="cpu")]

    def gain(self) -> Any:
        return self.gains[0]


add(CPU, "host_tensor_filled", model=TensorOnHost, event=lambda t: t.model.gains[0].fill_(0.25))


@model_case(CPU)
class HostTensorInClosureFalls(GainNet):
    def build(self) -> None:
        held = torch.ones((), device="cpu")
        self.fall = lambda: held.mul_(0.95)

    def gain(self) -> Any:
        return self.fall()


@model_case(CPU)
class WeightOnHost(BufferOnHost):
    """A 0-dim weight on the CPU multiplies tensors of the GPU."""

    is_trained = True


class _HostEmbedding(OnHost):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(CLASSES, HIDDEN)


@model_case(CPU)
class EmbeddingOnHost(Net):
    def build(self) -> None:
        self.host = _HostEmbedding()

    def forward(self, x: Tensor) -> Any:
        rows = self.host.table(torch.arange(len(x), device="cpu") % CLASSES)
        return self.head(self.hidden(x) + rows.to(x.device, non_blocking=True))


def _reading_copy(training: Training) -> Tensor:
    loss = update(training, loss_of(training.called(training.batch()[0]), training.batch()[1]))
    if training.device.type == "cuda":
        torch.cuda.synchronize()
    return torch.cat([loss.reshape(1), training.model.seen.to(training.device).flatten()])


@model_case(CPU, step=_reading_copy)
class CopiesOut(Net):
    """Copies to the CPU without waiting, into memory that it keeps."""

    def build(self) -> None:
        self.seen = torch.zeros(ROWS, CLASSES, device="cpu")
        if torch.cuda.is_available():
            self.seen = self.seen.pin_memory()

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        self.seen.copy_(logits.detach(), non_blocking=True)
        return logits


@model_case(CPU, step=_reading_copy)
class CopiesOutAnew(Net):
    """Keeps a new tensor on the CPU after each pass."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        self.seen = logits.detach().to("cpu", non_blocking=True)
        return logits


class HostArray(Net):
    """Copies in what the host wrote, from memory that is pinned or not."""

    is_pinned = True

    def build(self) -> None:
        held = torch.ones(CLASSES, device="cpu")
        self.held = [held.pin_memory() if torch.cuda.is_available() and self.is_pinned else held]

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.held[0].to(x.device, non_blocking=True)


@event_case(CPU, model=HostArray)
def pinned_memory_filled(training: Training) -> None:
    if training.device.type == "cuda":
        torch.cuda.synchronize()
    training.model.held[0][1:] = 0.25


@event_case(CPU, model=HostArray)
def pinned_memory_replaced(training: Training) -> None:
    training.model.held = [training.model.held[0].clone() * 0.25]


class PageableArray(HostArray):
    is_pinned = False


@event_case(CPU, model=PageableArray)
def pageable_memory_filled(training: Training) -> None:
    training.model.held[0][1:] = 0.25


@model_case(CPU)
class PinnedMemoryChanges(HostArray):
    """Pins memory anew in each pass, with other content."""

    def build(self) -> None:
        super().build()
        self.gains = numbers(1.0, 0.5, 0.25)

    def forward(self, x: Tensor) -> Any:
        held = torch.full((CLASSES,), next(self.gains), device="cpu")
        self.held[0] = held.pin_memory() if x.is_cuda else held
        return super().forward(x)


STAGE = {"gains": [1.0, 1.0, 1.0, 1.0]}


class TensorOfPythonValues(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * torch.tensor(STAGE["gains"], device=x.device)


@event_case(CPU, model=TensorOfPythonValues)
def python_values_changed(training: Training) -> None:
    training.patch(STAGE, "gains", [0.25, 0.5, 1.0, 2.0])


class TensorOfOneValue(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * torch.full((), STAGE["gains"][0], device=x.device)


add(CPU, "fill_value_changed", model=TensorOfOneValue, event=lambda t: t.patch(STAGE, "gains", [0.25]))


@model_case(CPU)
class PermutationOfHost(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x[:, torch.randperm(WIDTH, device="cpu").to(x.device)])


@model_case(CPU)
class PositionsOfHost(Net):
    def build(self) -> None:
        self.positions = nn.Embedding(ROWS, HIDDEN)

    def forward(self, x: Tensor) -> Any:
        places = torch.arange(len(x), device="cpu").to(x.device)
        return self.head(self.hidden(x) + self.positions(places))


class MovesItsInput(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.to(self.head.weight.device, non_blocking=True))


add(CPU, "input_on_host", model=MovesItsInput, loss=lambda t, x, y: loss_of(t.called(x.cpu()), y))


class GainGiven(Net):
    def forward(self, x: Tensor, gain: Any) -> Any:
        return super().forward(x) * gain


@loss_case(CPU, model=GainGiven)
def host_scalar_as_input(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(training.called(x, torch.tensor(fading(training.number), device="cpu")), y)


@loss_case(CPU, model=GainGiven)
def numpy_scalar_as_input(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(training.called(x, np.float32(fading(training.number))), y)


class LossOnHost(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).cpu()


add(CPU, "output_on_host", model=LossOnHost, loss=lambda t, x, y: loss_of(t.called(x), y.cpu()))


# --- memory that is made early and freed later ---------------------------------------------------------------------


def _mask_of(width: int, device: torch.device) -> Tensor:
    return (torch.arange(width, device=device) % 3 + 1).float()


@functools.lru_cache(maxsize=1)
def _cached_mask(width: int, device: torch.device) -> Tensor:
    return _mask_of(width, device)


class CachedMask(Net):
    """Its mask comes from a cache that lies outside of it."""

    def build(self) -> None:
        _cached_mask.cache_clear()

    def forward(self, x: Tensor) -> Any:
        return self.head(self.hidden(x) * _cached_mask(HIDDEN, x.device))


add(FREED, "cache_of_masks_cleared", model=CachedMask, event=lambda _: _cached_mask.cache_clear())
add(FREED, "cache_of_masks_displaced", model=CachedMask, event=lambda t: _cached_mask(7, t.device))
# The memory stays: a recording reads what is there.
add(FREED, "cached_mask_written", model=CachedMask, event=lambda t: _cached_mask(HIDDEN, t.device).mul_(0.5))


MASKS: dict[tuple[int, torch.device], Tensor] = {}


class MaskInGlobal(Net):
    def build(self) -> None:
        MASKS.clear()

    def forward(self, x: Tensor) -> Any:
        key = (HIDDEN, x.device)
        if key not in MASKS:
            MASKS[key] = _mask_of(*key)
        return self.head(self.hidden(x) * MASKS[key])


add(FREED, "global_masks_cleared", model=MaskInGlobal, event=lambda _: MASKS.clear())


@event_case(FREED, model=MaskInGlobal)
def global_mask_replaced(_: Training) -> None:
    for key in MASKS:
        MASKS[key] = MASKS[key] * 0.5


class WeakMask(Net):
    """Holds its mask weakly, and makes it anew if it is gone."""

    def build(self) -> None:
        self.masks: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.hold: list[Tensor] = []
        MASKS.clear()

    def forward(self, x: Tensor) -> Any:
        mask = self.masks.get(HIDDEN)
        if mask is None:
            mask = _mask_of(HIDDEN, x.device)
            self.masks[HIDDEN] = MASKS[HIDDEN, x.device] = mask
        return self.head(self.hidden(x) * mask)


add(FREED, "weakly_held_mask_dropped", model=WeakMask, event=lambda _: MASKS.clear())


class Rotary(nn.Module):
    """Multiplies tokens by a cache of cosines, which grows when a longer sequence comes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Linear(1, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.keep: Callable[[Tensor | None], Tensor | None] = _cell()

    def cosines(self, length: int, device: torch.device) -> Tensor:
        kept = self.keep(None)
        if kept is None or len(kept) < length:
            angles = torch.outer(torch.arange(length, device=device).float(), torch.ones(HIDDEN, device=device))
            kept = self.keep(angles.cos() * length**0.1)
        assert kept is not None  # noqa: S101
        return kept[:length]

    def forward(self, x: Tensor) -> Any:
        tokens = self.embed(x.unsqueeze(-1)) * self.cosines(x.shape[1], x.device)
        return self.head(torch.tanh(self.body(tokens)).mean(1))


def _cell() -> Callable[[Tensor | None], Tensor | None]:
    kept: Tensor | None = None

    def keep(new: Tensor | None) -> Tensor | None:
        nonlocal kept
        kept = new if new is not None else kept
        return kept

    return keep


class RotaryInAttribute(Rotary):
    kept: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.keep = self.hold

    def hold(self, new: Tensor | None) -> Tensor | None:
        if new is not None:
            self.kept = new
        return self.kept


class RotaryInBuffer(Rotary):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", None, persistent=False)
        self.keep = self.hold

    def hold(self, new: Tensor | None) -> Tensor | None:
        if new is not None:
            self.kept = new
        return self.kept


def _evaluated_on_longer(training: Training) -> None:
    training.called.eval()
    with torch.no_grad():
        training.called(training.batch(width=2 * WIDTH)[0])
    training.called.train()


add(FREED, "rotary_cache_in_closure_grows", model=Rotary, event=_evaluated_on_longer)
add(FREED, "rotary_cache_in_attribute_grows", model=RotaryInAttribute, event=_evaluated_on_longer)
add(FREED, "rotary_buffer_grows", model=RotaryInBuffer, event=_evaluated_on_longer)


@event_case(FREED, model=Rotary, at=range(3, 40, 2))
def lengths_grow_in_evaluation(training: Training) -> None:
    training.called.eval()
    with torch.no_grad():
        training.called(training.batch(width=WIDTH + training.number)[0])
    training.called.train()


class MaskInAttribute(Net):
    def build(self) -> None:
        self.masks: dict[str, Any] = {}
        self.held = _Held()

    def forward(self, x: Tensor) -> Any:
        if "mask" not in self.masks:
            self.masks["mask"] = _mask_of(HIDDEN, x.device)
            self.held.mask = _mask_of(HIDDEN, x.device)
        return self.head(self.hidden(x) * self.masks["mask"] * self.held.mask)


class _Held:
    __slots__ = ("mask",)
    mask: Tensor


@event_case(FREED, model=MaskInAttribute)
def mask_in_dict_replaced(training: Training) -> None:
    training.model.masks["mask"] = training.model.masks["mask"] * 0.5


@event_case(FREED, model=MaskInAttribute)
def mask_in_slots_replaced(training: Training) -> None:
    training.model.held.mask = training.model.held.mask * 0.5


@event_case(FREED, model=MaskInAttribute, at=range(2, 40))
def mask_in_slots_replaced_each_step(training: Training) -> None:
    if training.number > 1:
        training.model.held.mask = training.model.held.mask * 0.97


class MaskInBuffer(Net):
    def build(self) -> None:
        self.register_buffer("buffer", torch.ones(HIDDEN))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.hidden(x) * self.buffer)


@event_case(FREED, model=MaskInBuffer)
def buffer_replaced(training: Training) -> None:
    training.model.register_buffer("buffer", training.model.buffer * 0.5)


@event_case(FREED, model=MaskInBuffer)
def buffer_gets_other_data(training: Training) -> None:
    training.model.buffer.data = training.model.buffer.data * 0.5


add(FREED, "buffer_set_to_other_storage", model=MaskInBuffer, event=lambda t: t.model.buffer.set_(t.model.buffer * 0.5))
add(FREED, "buffer_filled", model=MaskInBuffer, event=lambda t: t.model.buffer.mul_(0.5))


@model_case(FREED)
class MadeInInference(Net):
    """Made its mask in an evaluation before."""

    mask: Tensor | None = None

    def forward(self, x: Tensor) -> Any:
        if self.mask is None:
            with torch.inference_mode():
                self.mask = _mask_of(HIDDEN, x.device)
        return self.head(self.hidden(x)) * self.mask[:CLASSES].clone()


@model_case(FREED)
class ScratchMemory(Net):
    """Writes into memory that it keeps."""

    def build(self) -> None:
        self.scratch: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        if not self.scratch:
            self.scratch.append(torch.empty(ROWS, WIDTH, device=x.device))
        torch.mul(x, 2.0, out=self.scratch[0])
        return super().forward(self.scratch[0].clone())


@model_case(FREED)
class CacheByIdentity(Net):
    """Keeps what it made of an input for the next pass with a tensor at the same address."""

    def build(self) -> None:
        self.made: dict[int, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        if x.data_ptr() not in self.made:
            self.made = {x.data_ptr(): x.sign()}
        return super().forward(x * (1 + 0.5 * self.made[x.data_ptr()].abs()))


@model_case(FREED)
class QueueOfKeys(Net):
    """Writes keys into a queue, as MoCo does, at a place that the host counts."""

    def build(self) -> None:
        self.register_buffer("queue", torch.zeros(4 * ROWS, CLASSES))
        self.place = 0

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        with torch.no_grad():
            self.queue[self.place : self.place + len(x)] = logits
        self.place = (self.place + len(x)) % len(self.queue)
        return logits + 0.1 * self.queue.mean(0)


@model_case(FREED)
class QueueAtPlaceOnDevice(Net):
    """The same with the place in a buffer: nothing of it is on the host."""

    def build(self) -> None:
        self.register_buffer("queue", torch.zeros(4 * ROWS, CLASSES))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        with torch.no_grad():
            rows = (self.place + torch.arange(len(x), device=x.device)) % len(self.queue)
            self.queue.index_copy_(0, rows, logits.detach())
            self.place.add_(len(x))
        return logits + 0.1 * self.queue.mean(0).clone()


# --- inputs that share memory --------------------------------------------------------------------------------------


class Table(Net):
    """Has a buffer that the loop may give it."""

    def build(self) -> None:
        self.register_buffer("table", torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).clone())

    def forward(self, x: Tensor, other: Tensor) -> Any:
        with torch.no_grad():
            self.table.mul_(0.95)
        return super().forward(x + other)


# The forward pass writes to the buffer before it reads the input.
add(SHARED, "input_is_buffer", model=Table, loss=lambda t, x, y: loss_of(t.called(x, t.model.table), y))


@loss_case(SHARED, model=Table)
def input_is_view_of_buffer(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(training.called(x, training.model.table[:1].expand(ROWS, -1)), y)


@loss_case(SHARED, model=Table)
def input_becomes_buffer(training: Training, x: Tensor, y: Tensor) -> Tensor:
    table = training.model.table
    return loss_of(training.called(x, table if training.number >= EVENT_AT else table.clone()), y)


class Pair(Net):
    """Writes to its first input, then reads the second."""

    def forward(self, x: Tensor, other: Tensor) -> Any:
        with torch.no_grad():
            x.mul_(0.5)
        return super().forward(x + other)


add(SHARED, "one_tensor_given_twice", model=Pair, loss=lambda t, x, y: loss_of(t.called(x, x), y))


@loss_case(SHARED, model=Pair)
def one_tensor_given_twice_later(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(training.called(x, x if training.number >= EVENT_AT else x.clone()), y)


@loss_case(SHARED, model=Pair)
def inputs_overlap_later(training: Training, x: Tensor, y: Tensor) -> Tensor:
    wide = torch.cat([x, x.flip(0)], dim=1)
    one, other = wide[:, :WIDTH], wide[:, WIDTH // 2 : WIDTH // 2 + WIDTH]
    if training.number < EVENT_AT:
        other = torch.cat([wide, wide], 1)[:, WIDTH // 2 : WIDTH // 2 + 2 * WIDTH].clone()[:, :WIDTH]
    return loss_of(training.called(one, other), y)


class ReadsOther(Net):
    def forward(self, x: Tensor, other: Tensor) -> Any:
        return super().forward(x) + 0.5 * functional.linear(self.hidden(x), other)


add(SHARED, "input_is_weight", model=ReadsOther, loss=lambda t, x, y: loss_of(t.called(x, t.model.head.weight), y))


@loss_case(SHARED, model=ReadsOther)
def input_is_detached_weight(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(training.called(x, training.model.head.weight.detach()), y)


@loss_case(SHARED, model=ReadsOther)
def input_is_gradient(training: Training, x: Tensor, y: Tensor) -> Tensor:
    weight = training.model.head.weight
    return loss_of(training.called(x, torch.zeros_like(weight) if weight.grad is None else weight.grad), y)


add(SHARED, "expanded_input", loss=lambda t, x, y: loss_of(t.called(x[:1].expand(ROWS, -1)), y))


@loss_case(SHARED)
def transposed_input_later(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(training.called(x.t().contiguous().t() if training.number >= EVENT_AT else x), y)


@step_case(SHARED, model=Pair)
def input_written_and_read_after(training: Training) -> Tensor:
    x, y = training.batch()
    loss = update(training, loss_of(training.called(x, x.clone()), y))
    return torch.cat([loss.reshape(1), x.flatten()])


@loss_case(SHARED)
def input_in_static_memory(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """The loop has one tensor for all batches."""
    static: Tensor = training.once("x", lambda: torch.empty_like(x)).copy_(x)
    return loss_of(training.called(static.detach()), y)


class GivesState(Net):
    def forward(self, x: Tensor, state: Tensor) -> Any:
        state = torch.tanh(self.body(x) + state)
        return self.head(state), state


@loss_case(SHARED, model=GivesState)
def output_is_next_input(training: Training, x: Tensor, y: Tensor) -> Tensor:
    state = training.kept.get("state", torch.zeros(ROWS, HIDDEN, device=training.device))
    logits, state = training.called(x, state)
    training.kept["state"] = state.detach()
    return functional.cross_entropy(logits, y)


class GivesBack(Net):
    """Returns an input, a weight and a buffer."""

    def build(self) -> None:
        self.register_buffer("mean", torch.zeros(CLASSES))

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        with torch.no_grad():
            self.mean.lerp_(logits.mean(0), 0.1)
        return logits, x, self.head.weight, self.mean


@loss_case(SHARED, model=GivesBack)
def output_is_weight(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits, _, weight, _ = training.called(x)
    return functional.cross_entropy(logits, y) + 0.1 * weight.square().sum()


@step_case(SHARED, model=GivesBack)
def output_is_buffer(training: Training) -> Tensor:
    """Reads the buffer that the last pass gave, after this pass has changed it."""
    x, y = training.batch()
    logits, _, _, mean = training.called(x)
    before = training.kept.get("mean", mean)
    training.kept["mean"] = mean
    return torch.cat([update(training, functional.cross_entropy(logits, y)).reshape(1), before])


@step_case(SHARED, model=GivesBack)
def output_is_input(training: Training) -> Tensor:
    """Writes to what was given back, and reads its input."""
    x, y = training.batch()
    logits, same, _, _ = training.called(x)
    loss = update(training, functional.cross_entropy(logits, y))
    same.add_(1.0)
    return torch.cat([loss.reshape(1), x.flatten()])


class ReadsNested(Net):
    """Takes its inputs out of a dictionary, which it changes."""

    def forward(self, batch: dict[str, Any]) -> Any:
        batch["seen"] = batch.get("seen", 0) + 1
        x = batch.pop("x")
        return super().forward(x) * batch["gain"]


@loss_case(SHARED, model=ReadsNested)
def dictionary_of_inputs_changed(training: Training, x: Tensor, y: Tensor) -> Tensor:
    batch = {"x": x, "gain": torch.full((), fading(training.number), device=x.device)}
    loss = loss_of(training.called(batch), y)
    return loss * (1.0 if "x" not in batch and batch["seen"] == 1 else 0.5)


class ReadsList(Net):
    def forward(self, x: Tensor, found: list[Any]) -> Any:
        hidden = self.hidden(x)
        found.append(hidden)
        return self.head(hidden)


@loss_case(SHARED, model=ReadsList)
def list_of_inputs_grows(training: Training, x: Tensor, y: Tensor) -> Tensor:
    found: list[Tensor] = []
    loss = loss_of(training.called(x, found), y)
    return loss + found[0].square().mean()


class ReadsAttribute(Net):
    """Reads what hangs on its input."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * getattr(x, "gain", 1.0)


@loss_case(SHARED, model=ReadsAttribute)
def attribute_on_input(training: Training, x: Tensor, y: Tensor) -> Tensor:
    vars(x)["gain"] = fading(training.number)
    return loss_of(training.called(x), y)


class ReadsVersion(Net):
    """Treats an input that was written to in place otherwise."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1.0 if x._version == 0 else 0.25)


@loss_case(SHARED, model=ReadsVersion)
def version_of_input(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(training.called(x.clone().mul_(1.0) if training.number >= EVENT_AT else x.clone()), y)


@loss_case(SHARED)
def input_with_gradient(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Trains on an input that was moved along its gradient."""
    x.requires_grad_()
    (slope,) = torch.autograd.grad(loss_of(training.called(x), y), x)
    return loss_of(training.called((x + 0.1 * slope.sign()).detach()), y)


@loss_case(SHARED)
def input_gets_gradient_later(training: Training, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_(training.number >= EVENT_AT)
    loss = loss_of(training.called(x), y)
    return loss + torch.autograd.grad(loss, x, retain_graph=True)[0].square().sum() if x.requires_grad else loss


@loss_case(SHARED)
def input_is_subclass(training: Training, x: Tensor, y: Tensor) -> Tensor:
    given = x.as_subclass(_Named) if training.number >= EVENT_AT else x
    return loss_of(training.called(given), y).as_subclass(Tensor)


class _Named(torch.Tensor):
    pass
