"""Memory: tensors on the CPU, caches and masks that are replaced or freed, inputs and outputs that share memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import HIDDEN, ROWS, WIDTH, Cases, Net, Training, Why, loss_of

host = Cases("CPU tensors", "host_", on_cpu=None)


class OnHost(nn.Module):
    """Stays on the CPU when the model moves."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Buffer(torch.ones(()))

    def _apply(self, _: Any, recurse: bool = True) -> OnHost:  # noqa: ARG002
        return self


def pinned(value: float) -> Tensor:
    held = torch.full((HIDDEN,), value, device="cpu")
    return held.pin_memory() if torch.cuda.is_available() else held


def moved(tensor: Tensor, hidden: Tensor) -> Tensor:
    return tensor.to(hidden.device, non_blocking=True)


def fill(tensor: Tensor) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    tensor.fill_(0.25)


# A 0-dim tensor on the CPU goes into kernels by value.
host.holding("buffer_falls", OnHost, lambda held, _: held.gain.mul_(0.95), why=Why.ON_HOST)
host.holding("buffer_filled", OnHost, lambda held, _: held.gain, lambda held: fill(held.gain), why=Why.ON_HOST)
host.holding("number_filled", lambda: [torch.ones(())], lambda h, _: h[0], lambda h: fill(h[0]), why=Why.ELSEWHERE)
host.holding("pageable_memory_filled", lambda: torch.ones(HIDDEN), moved, fill, why=Why.ELSEWHERE)
host.holding("pinned_memory_filled", lambda: pinned(1.0), moved, fill, why=Why.ELSEWHERE)
host.holding("pinned_anew", list, lambda _, hidden: moved(pinned(0.5), hidden), why=Why.FROM_HOST)
host.holding("permutation", list, lambda _, h: 1 + moved(torch.randperm(HIDDEN, device="cpu"), h), why=Why.FROM_HOST)
host.holding("copies_out", dict, lambda held, h: held.update(seen=h.detach().cpu()) or 1.0, why=Why.AGAIN)
host.holding(
    "fill_value",
    lambda: [1.0],
    lambda held, hidden: torch.full((), held[0], device=hidden.device),
    lambda held: held.insert(0, 0.25),
)
host(
    "output",
    forward=lambda own, x: own.logits(x).cpu(),
    loss=lambda t, x, y: loss_of(t.called(x), y.cpu()),
    why=Why.TO_HOST,
)
given = functools.partial(
    host, forward=lambda own, x, gain: own.logits(x.to(own.head.weight.device)) * gain, why=Why.SILENT
)
given("input", loss=lambda t, x, y: loss_of(t.called(x.cpu(), 1.0), y))


freed = Cases("freed memory")
MASKS: dict[Any, Tensor] = {}


@functools.lru_cache(maxsize=1)
def cached_mask(width: int, device: torch.device) -> Tensor:
    return (torch.arange(width, device=device) % 3 + 1).float()


def of_cache(_: Any, hidden: Tensor) -> Tensor:
    return cached_mask(HIDDEN, hidden.device)


def kept_mask(held: Any, hidden: Tensor) -> Tensor:
    if "mask" not in held:
        with torch.inference_mode(held.get("inference", False)):
            held["mask"] = (torch.arange(HIDDEN, device=hidden.device) % 3 + 1).float()
    return held["mask"].clone()


def scale_kept(held: dict[str, Tensor]) -> None:
    held["mask"] = held["mask"] * 0.97


elsewhere = functools.partial(freed.holding, why=Why.ELSEWHERE)
elsewhere("cache_cleared", cached_mask.cache_clear, of_cache, lambda _: cached_mask.cache_clear())
elsewhere("cache_displaced", cached_mask.cache_clear, of_cache, lambda _: cached_mask(7, torch.device("cpu")))
elsewhere(
    "mask_replaced",
    lambda: SimpleNamespace(inner={}),
    lambda h, x: kept_mask(h.inner, x),
    lambda h: scale_kept(h.inner),
)
elsewhere("mask_made_in_inference", lambda: {"inference": True}, kept_mask)


def in_buffer(name: str, change: Any = None, value: Any = None, read: Any = None, why: str = "") -> None:
    """Adds a model with a buffer in place of what others hold; `change` gets the module that has the buffer."""

    def hold() -> nn.Module:
        module = nn.Module()
        module.register_buffer("kept", None if value is None else value.clone())
        return module

    read = read or (lambda held, _: held.kept)
    freed.holding(f"buffer_{name}", hold, read, change, why=why)


ones = torch.ones(HIDDEN)
in_buffer("replaced", lambda held: held.register_buffer("kept", held.kept * 0.5), ones)
in_buffer("gets_other_data", lambda held: setattr(held.kept, "data", held.kept.data * 0.5), ones)
in_buffer("filled", lambda held: held.kept.fill_(0.5), ones)
in_buffer(
    "is_sparse", value=ones.to_sparse(), read=lambda held, _: held.kept.to_dense(), why="which is no plain tensor"
)


shared = Cases("shared memory")


class Table(Net):
    """Writes to a buffer that the loop may give it, and then reads the input; returns input and buffer."""

    def build(self) -> None:
        self.register_buffer("table", torch.linspace(-1, 1, ROWS * WIDTH).view(ROWS, WIDTH).clone())

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        self.table.mul_(0.95)
        return self.logits(x + other) if other is not None else (self.logits(x), x, self.table)


def second(name: str, forward: Any, other: Callable[[Training, Tensor], Any], why: Any = "") -> None:
    """Adds a model whose second input shares memory with something; the loop reads the first after the pass."""

    def loss(t: Training, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(t.called(x, other(t, x)), y) + x.mean()

    shared(name, model=Table, forward=forward, loss=loss, why=why)


def halving(own: Any, x: Tensor, other: Tensor) -> Tensor:
    return own.logits(x.mul_(0.5) + other)


def reading(own: Any, x: Tensor, weight: Tensor) -> Tensor:
    return own.logits(x) + 0.5 * functional.linear(own.hidden(x), weight)


def gradient_of(t: Training, _: Tensor) -> Tensor:
    gradient: Tensor | None = t.model.head.weight.grad
    return torch.zeros_like(t.model.head.weight) if gradient is None else gradient


second("input_is_buffer", None, lambda t, _: t.model.table, Why.SILENT)
second("input_becomes_buffer", None, lambda t, _: t.model.table if t.is_late else t.model.table.clone())
second("input_given_twice", halving, lambda _, x: x, Why.WRITES)
second("input_given_twice_later", halving, lambda t, x: x if t.is_late else x.clone(), Why.WRITES)
second("input_is_weight", reading, lambda t, _: t.model.head.weight.detach(), Why.SILENT)
second("input_is_gradient", reading, gradient_of)


def input_of(name: str, change: Callable[[Training, Tensor], Any], **options: Any) -> None:
    """Adds a loop that changes the input before it gives it."""
    shared(name, loss=lambda t, x, y: loss_of(t.called(change(t, x)), y).as_subclass(Tensor), **options)


input_of("input_expanded", lambda _, x: x[:1].expand(ROWS, -1))
input_of("input_transposed_later", lambda t, x: x.t().contiguous().t() if t.is_late else x)
# The model treats an input that was written to in place otherwise.
input_of(
    "input_of_other_version",
    lambda t, x: x.clone().mul_(1.0) if t.is_late else x.clone(),
    forward=lambda own, x: own.logits(x) * (1.0 if x._version == 0 else 0.25),
    why=Why.DIFFERS,
    ends=False,
)


def popping(own: Any, batch: dict[str, Any]) -> Any:
    batch["seen"] = batch.get("seen", 0) + 1
    return own.logits(batch.pop("x"))


@shared.loss(forward=popping, why=Why.GIVEN)
def input_dictionary_changed(t: Training, x: Tensor, y: Tensor) -> Tensor:
    batch: dict[str, Any] = {"x": x}
    return loss_of(t.called(batch), y) * (1.0 if "x" not in batch and batch["seen"] == 1 else 0.5)


def with_state(own: Any, x: Tensor, state: Tensor) -> Any:
    state = torch.tanh(own.body(x) + state)
    return own.head(state), state


@shared.loss(forward=with_state)
def output_is_next_input(t: Training, x: Tensor, y: Tensor) -> Tensor:
    logits, state = t.called(x, t.kept.get("state", torch.zeros(ROWS, HIDDEN, device=t.device)))
    t.kept["state"] = state.detach()
    return functional.cross_entropy(logits, y)


@shared.step(model=Table, why=Why.SHARES)
def output_is_input_and_buffer(t: Training) -> Tensor:
    """Reads the buffer that the last pass gave; writes to what was given back, and reads its input."""
    x, y = t.batch()
    logits, same, table = t.called(x)
    before = t.kept.get("table", table)
    t.kept["table"] = table
    loss = t.update(functional.cross_entropy(logits, y))
    same.add_(1.0)
    return torch.cat([loss.reshape(1), x.flatten(), before.flatten()])
