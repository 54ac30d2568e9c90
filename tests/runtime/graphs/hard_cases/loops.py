"""Unusual loops: orders of passes, checkpointing, copies of the model, flags of the process, chance, precision."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import update_bn
from torch.utils.checkpoint import checkpoint

from .case import ALWAYS, CLASSES, EVENT_AT, HIDDEN, LATER, ROWS, SOMETIMES, Cases, Net, Training, Why, loss_of

BF16, FP16 = torch.bfloat16, torch.float16


class Normed(Net):
    def build(self) -> None:
        self.norm = nn.BatchNorm1d(HIDDEN)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.body(x)))


class Wide(Net):
    """Products of matrices that are large enough for TF32 to be used, and a convolution."""

    def build(self) -> None:
        self.middle = nn.Sequential(nn.Linear(HIDDEN, 512), nn.Tanh(), nn.Linear(512, HIDDEN))
        self.conv = nn.Conv1d(1, 1, 5, padding=2)

    def hidden(self, x: Tensor) -> Tensor:
        return self.conv(self.middle(super().hidden(x)).unsqueeze(1)).squeeze(1) * 4


case = Cases("loops")


def losses_of(t: Training, count: int, first: int = 0) -> list[Tensor]:
    return [loss_of(t.called(x), y) for x, y in map(t.batch, range(first, first + count))]


@case.step()
def accumulates(t: Training) -> Tensor:
    """Zeroes gradients at some steps, in place or not, and clips them."""
    if t.number % 3 == 0:
        t.optimizer.zero_grad(set_to_none=t.number % 2 == 0)
    for part in range(3):
        (loss,) = losses_of(t, 1, 3 * t.number + part)
        (loss / 3).backward()
    norm = clip_grad_norm_(t.model.parameters(), 0.2)
    t.optimizer.step()
    return torch.stack([loss.detach(), norm])


@case.step()
def forward_in_vain_is_kept(t: Training) -> Tensor:
    """Keeps outputs with their graph for some steps, without a backward pass, which comes in the end."""
    kept = t.kept.setdefault("outputs", [])
    kept.append(t.called(t.batch(t.number + 50)[0]))
    if len(kept) < 4:
        return t.plain()
    loss = kept[-1].square().mean()
    kept.clear()
    return t.update(loss)


def of_rows(t: Training, rows: int) -> Tensor:
    x, y = t.batch(rows=rows)
    return t.update(functional.cross_entropy(t.called(x), y, reduction="sum") / ROWS)


case("losses_summed_over_batches", step=lambda t: t.update(torch.stack(losses_of(t, 4)).mean()))
case("step_left_out", step=lambda t: t.loss().detach(), when=SOMETIMES)
case("two_forwards", loss=lambda t, x, y: loss_of(t.called(x), y) + t.called(x + 0.1).mean(), when=(ALWAYS, LATER))
case("batches_of_all_sizes", step=lambda t: of_rows(t, 2 + t.number), why=Why.SILENT)
case("empty_batch", step=lambda t: of_rows(t, 0 if t.number % 6 == 5 else ROWS))


# --- checkpointing, and functions of functions ---------------------------------------------------------------------


def checkpointed(own: Any, x: Tensor, reentrant: bool) -> Any:
    return own.head(checkpoint(own.middle, own.hidden(x), use_reentrant=reentrant))


def around(t: Training, x: Tensor, y: Tensor, *, reentrant: bool) -> Tensor:
    return loss_of(checkpoint(t.called, x.requires_grad_(reentrant), use_reentrant=reentrant), y)


def with_forces(own: Any, x: Tensor) -> Tensor:
    """Takes the gradient of an energy, of which the weights need one."""
    place = x.detach().requires_grad_()
    (force,) = torch.autograd.grad(own.logits(place).square().sum(), place, create_graph=True)
    return own.logits(x) + force[:, :CLASSES]


for reentrant, why in ((False, ""), (True, Why.RAISES)):
    way = "reentrant" if reentrant else "plain"
    case(f"{way}_checkpoint_inside", model=Wide, forward=lambda own, x, r=reentrant: checkpointed(own, x, r), why=why)
    case(f"{way}_checkpoint_around", loss=partial(around, reentrant=reentrant), why=Why.SILENT)
case("forces_inside", forward=with_forces, why="has gradients for what is none of the weights")


def by_func(called: Any, x: Tensor, y: Tensor) -> Tensor:
    halved = {name: value * 0.5 for name, value in called.named_parameters()}
    return loss_of(torch.func.functional_call(called, halved, (x,)), y)


def by_grad(t: Training, x: Tensor, y: Tensor) -> Tensor:
    """Gets gradients by torch.func, through torch.vmap, before the usual step."""
    weights = {name: value.detach() for name, value in t.called.named_parameters()}
    slopes = torch.func.grad(lambda given: loss_of(torch.func.functional_call(t.called, given, (x,)), y))(weights)
    return loss_of(torch.vmap(t.called)(x), y) + loss_of(t.called(x), y) * [*slopes.values()][-1].norm()


case("functional_call_of_wrapper", loss=lambda t, x, y: by_func(t.called, x, y), when=(ALWAYS, LATER), why=Why.AGAIN)
case("functional_call_of_model", loss=lambda t, x, y: by_func(t.model, x, y) + loss_of(t.called(x), y))
case("gradients_by_func", loss=by_grad)


copies = Cases("copies", model=Normed)


def go_on_with(t: Training, called: nn.Module) -> None:
    t.called = called
    t.model = getattr(called, "_orig_mod", called)
    t.restart_optimizer()


def loaded(called: nn.Module) -> nn.Module:
    torch.save(called, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


copies("goes_on_with_copy", event=lambda t: go_on_with(t, copy.deepcopy(t.called)))
copies("goes_on_with_loaded", event=lambda t: go_on_with(t, loaded(t.called)))
copies("statistics_updated", event=lambda t: update_bn([t.batch(number)[0] for number in range(4)], t.called))


@copies.step()
def teacher_is_a_copy(t: Training) -> Tensor:
    """A teacher in training mode, without gradients, that follows the student."""
    teacher = t.once("teacher", lambda: copy.deepcopy(t.called).requires_grad_(requires_grad=False))
    x, _ = t.batch()
    with torch.no_grad():
        wanted = teacher(x).softmax(1)
        torch._foreach_lerp_(list(teacher.parameters()), list(t.called.parameters()), 0.1)
    return t.update(functional.cross_entropy(t.called(x), wanted))


flags = Cases("process flags")


def set_tf32(_: Training) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def no_waits(t: Training) -> Tensor:
    """Has PyTorch raise if the host waits for the device in a step, as who looks for waits does."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        return t.plain()
    finally:
        torch.cuda.set_sync_debug_mode("default")


flags("tf32_turned_on", model=Wide, event=set_tf32, gpu=True, tolerance=3e-5)
flags("cudnn_turned_off", model=Wide, event=lambda _: setattr(torch.backends.cudnn, "enabled", False))
flags("deterministic_turned_on", event=lambda _: torch.use_deterministic_algorithms(mode=True, warn_only=True))
flags("anomalies_detected", event=lambda _: torch.set_anomaly_enabled(True))
flags("waits_forbidden", step=no_waits, gpu=True, when=LATER)


def same_mask_twice(t: Training) -> Tensor:
    """Puts the state of the generator back, so that two passes drop the same."""
    generator = torch.cuda.default_generators[0] if t.is_cuda else torch.default_generator
    state = generator.get_state()
    first = t.plain()
    generator.set_state(state)
    return torch.stack([first, t.plain()])


def by_generator(held: list[Any], hidden: Tensor) -> Tensor:
    """Draws from a generator of the device that the model has itself."""
    if not held:
        held.append(torch.Generator(hidden.device).manual_seed(0))
    return torch.rand(hidden.shape, generator=held[0], device=hidden.device)


draws = partial(flags, forward=lambda own, x: own.head(functional.dropout(own.hidden(x), 0.3)), on_cpu=Why.DRAWS)
draws("dropout")
draws("random_numbers_between_steps", loss=lambda t, x, y: loss_of(t.called(x + 0.1 * torch.randn_like(x)), y))
draws("same_mask_twice", step=same_mask_twice)
flags.holding("generator_of_device", list, by_generator, why=Why.RAISES, on_cpu=None)


half = Cases("half precision", model=Wide, tolerance=0.1)


def cast(name: str, before: torch.dtype | None, after: torch.dtype | None, **options: Any) -> None:
    """Trains under autocast to a dtype, or without it, and to another one later."""

    def loss(t: Training, x: Tensor, y: Tensor) -> Tensor:
        dtype = after if t.is_late else before
        with torch.autocast(t.device.type, dtype=dtype or BF16, enabled=dtype is not None, **options):
            logits = t.called(x)
        return loss_of(logits, y) * {torch.float32: 1.0, BF16: 1.5, FP16: 2.0}[logits.dtype]

    half(name, loss=loss)


cast("autocast_begins", None, BF16)
cast("autocast_ends", BF16, None)
cast("autocast_to_other", BF16, FP16)
cast("autocast_without_cache", BF16, BF16, cache_enabled=False)


def scaled(t: Training) -> Tensor:
    """Some steps have infinite gradients, and the scale is too large at first."""
    scaler = t.once("scaler", lambda: torch.amp.GradScaler(t.device.type, init_scale=2.0**20))
    t.optimizer.zero_grad()
    with torch.autocast(t.device.type, dtype=FP16):
        loss = t.loss() * (torch.inf if t.number in (EVENT_AT, 12) else 1.0)
    scaler.scale(loss).backward()
    scaler.unscale_(t.optimizer)
    scaler.step(t.optimizer)
    scaler.update()
    return torch.stack([loss.detach().nan_to_num(0.0, 0.0, 0.0), torch.full_like(loss, scaler.get_scale()).log()])


half("scaled_gradients", step=scaled)
