"""Cases with unusual loops: several backward passes, accumulation, checkpointing, copies, flags of the process."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.checkpoint import checkpoint

from graph_models.case import (
    CLASSES,
    EVENT_AT,
    HIDDEN,
    ROWS,
    WIDTH,
    Net,
    Step,
    Training,
    add,
    event_case,
    loss_case,
    loss_of,
    model_case,
    plain_step,
    step_case,
    step_of,
    trainable,
    update,
)

BACKWARD, LOOPS, COPIES, FLAGS, PRECISION = "backward passes", "loops", "copies", "process flags", "half precision"


class Normed(Net):
    def build(self) -> None:
        self.norm = nn.BatchNorm1d(HIDDEN)

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.body(x)))


class Dropping(Net):
    def hidden(self, x: Tensor) -> Tensor:
        return functional.dropout(super().hidden(x), 0.3, self.training)


# --- several backward passes ---------------------------------------------------------------------------------------


@step_case(BACKWARD)
def backward_twice(training: Training) -> Tensor:
    x, y = training.batch()
    training.optimizer.zero_grad()
    loss = loss_of(training.called(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    training.optimizer.step()
    return loss.detach()


@step_case(BACKWARD)
def backward_twice_later(training: Training) -> Tensor:
    x, y = training.batch()
    training.optimizer.zero_grad()
    loss = loss_of(training.called(x), y)
    if training.number >= EVENT_AT:
        loss.backward(retain_graph=True)
    loss.backward()
    training.optimizer.step()
    return loss.detach()


@step_case(BACKWARD)
def two_losses_of_one_output(training: Training) -> Tensor:
    x, y = training.batch()
    training.optimizer.zero_grad()
    logits = training.called(x)
    functional.cross_entropy(logits, y).backward(retain_graph=True)
    loss = logits.square().mean()
    loss.backward()
    training.optimizer.step()
    return loss.detach()


@loss_case(BACKWARD)
def gradient_penalty_on_inputs(training: Training, x: Tensor, y: Tensor) -> Tensor:
    x.requires_grad_()
    loss = loss_of(training.called(x), y)
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


@loss_case(BACKWARD)
def gradient_penalty_on_weights(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(training.called(x), y)
    slopes = torch.autograd.grad(loss, trainable(training.model), create_graph=True)
    return loss + 0.1 * torch.stack([one.square().sum() for one in slopes]).sum()


@loss_case(BACKWARD)
def gradient_penalty_later(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss = loss_of(training.called(x), y)
    if training.number < EVENT_AT:
        return loss
    slopes = torch.autograd.grad(loss, trainable(training.model), create_graph=True)
    return loss + 0.1 * torch.stack([one.square().sum() for one in slopes]).sum()


@step_case(BACKWARD)
def balanced_by_gradients(training: Training) -> Tensor:
    """Weighs two losses by the norms of their gradients, as multi-task training does."""
    x, y = training.batch()
    logits = training.called(x)
    losses = [functional.cross_entropy(logits, y), logits.square().mean()]
    weight = training.model.head.weight
    norms = [torch.autograd.grad(one, weight, retain_graph=True)[0].norm().detach() for one in losses]
    return update(training, losses[0] + losses[1] * norms[0] / norms[1])


# --- orders of passes ----------------------------------------------------------------------------------------------


@step_case(LOOPS)
def accumulates(training: Training) -> Tensor:
    training.optimizer.zero_grad()
    losses = []
    for part in range(3):
        x, y = training.batch(3 * training.number + part)
        loss = loss_of(training.called(x), y) / 3
        loss.backward()
        losses.append(loss.detach())
    training.optimizer.step()
    return torch.stack(losses)


@step_case(LOOPS)
def gradients_zeroed_sometimes(training: Training) -> Tensor:
    x, y = training.batch()
    if training.number % 3 == 0:
        training.optimizer.zero_grad(set_to_none=training.number % 2 == 0)
    loss = loss_of(training.called(x), y)
    loss.backward()
    training.optimizer.step()
    return loss.detach()


@loss_case(LOOPS)
def two_forwards_then_backward(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(training.called(x), y) + (training.called(x) - training.called(x + 0.1)).square().mean()


@loss_case(LOOPS)
def two_forwards_later(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits = training.called(x)
    other = training.called(x + 0.1) if training.number >= EVENT_AT else logits.detach()
    return functional.cross_entropy(logits, y) + (logits - other).square().mean()


@step_case(LOOPS)
def backwards_in_other_order(training: Training) -> Tensor:
    training.optimizer.zero_grad()
    losses = [loss_of(training.called(x), y) for x, y in map(training.batch, range(3))]
    for loss in losses[1:] + losses[:1] if training.number % 2 else losses:
        loss.backward()
    training.optimizer.step()
    return torch.stack(losses).detach()


@step_case(LOOPS)
def forward_in_vain(training: Training) -> Tensor:
    training.called(training.batch(0)[0])
    return plain_step(training)


@step_case(LOOPS)
def forward_in_vain_is_kept(training: Training) -> Tensor:
    """Keeps outputs with their graph for some steps, without a backward pass, which comes in the end."""
    kept = training.kept.setdefault("outputs", [])
    kept.append(training.called(training.batch(training.number + 50)[0]))
    if len(kept) < 4:
        return plain_step(training)
    loss = torch.stack([one.square().mean() for one in kept[-1:]]).sum()
    kept.clear()
    return update(training, loss)


@step_case(LOOPS)
def losses_summed_over_batches(training: Training) -> Tensor:
    """One backward pass for the losses of four batches."""
    losses = [loss_of(training.called(x), y) for x, y in map(training.batch, range(4))]
    return update(training, torch.stack(losses).mean())


@step_case(LOOPS)
def step_left_out(training: Training) -> Tensor:
    x, y = training.batch()
    loss = loss_of(training.called(x), y)
    return loss.detach() if training.number % 4 == 3 else update(training, loss)


@step_case(LOOPS)
def loop_raises_between_passes(training: Training) -> Tensor:
    """An error after the forward pass, with the outputs in its traceback, is kept."""
    x, y = training.batch()
    try:
        loss = loss_of(training.called(x), y)
        if training.number in (EVENT_AT, 20):
            raise KeyError("lost")
        return update(training, loss)
    except KeyError as error:
        training.kept.setdefault("errors", []).append(error)
        return torch.full((), -1.0)


class RaisesByName(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        if RAISES["now"]:
            raise KeyError("lost")
        return self.head(hidden)


RAISES = {"now": False}


@step_case(LOOPS, model=RaisesByName)
def forward_raises_at_second_pass(training: Training) -> Tensor:
    """The pass that would be recorded raises half way; those that follow do not."""
    RAISES["now"] = training.number in (1, EVENT_AT)
    try:
        return plain_step(training)
    except KeyError:
        return torch.full((), -1.0)
    finally:
        RAISES["now"] = False


add(LOOPS, "unlike_batches", step=lambda t: _step_with_rows(t, 3 if t.number % 5 == 4 else ROWS))
add(LOOPS, "growing_batches", step=lambda t: _step_with_rows(t, 2 + t.number // 5))
add(LOOPS, "batches_of_all_sizes", step=lambda t: _step_with_rows(t, 2 + t.number * 7 % 11))


def _step_with_rows(training: Training, rows: int) -> Tensor:
    x, y = training.batch(rows=rows)
    return update(training, loss_of(training.called(x), y))


@step_case(LOOPS)
def empty_batch(training: Training) -> Tensor:
    x, y = training.batch(rows=0 if training.number % 6 == 5 else ROWS)
    loss = functional.cross_entropy(training.called(x), y, reduction="sum")
    return update(training, loss)


@step_case(LOOPS)
def closure_of_lbfgs(training: Training) -> Tensor:
    optimizer = training.once(
        "lbfgs", lambda: torch.optim.LBFGS(training.model.parameters(), lr=0.05, max_iter=3, history_size=3)
    )
    x, y = training.batch(0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(training.called(x), y)
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


@step_case(LOOPS)
def sharpness_aware(training: Training) -> Tensor:
    """Moves the weights up their gradients, and takes the gradients there (Foret et al., 2021, arXiv:2010.01412)."""
    x, y = training.batch()
    weights: list[Any] = trainable(training.model)
    training.optimizer.zero_grad()
    loss = loss_of(training.called(x), y)
    loss.backward()
    moves = [0.05 * one.grad for one in weights]
    with torch.no_grad():
        torch._foreach_add_(weights, moves)
    update_loss = loss_of(training.called(x), y)
    training.optimizer.zero_grad()
    update_loss.backward()
    with torch.no_grad():
        torch._foreach_sub_(weights, moves)
    training.optimizer.step()
    return torch.stack([loss.detach(), update_loss.detach()])


@step_case(LOOPS)
def gradients_clipped(training: Training) -> Tensor:
    x, y = training.batch()
    training.optimizer.zero_grad()
    loss = loss_of(training.called(x), y)
    loss.backward()
    norm = clip_grad_norm_(training.model.parameters(), 0.2)
    training.optimizer.step()
    return torch.stack([loss.detach(), norm])


@step_case(LOOPS)
def rollout_without_gradients(training: Training) -> Tensor:
    """Runs in training mode without gradients several times, each time on what came before."""
    x, _ = training.batch()
    with torch.no_grad():
        for _ in range(3):
            x = x + functional.pad(training.called(x), (0, WIDTH - CLASSES))
    return update(training, training.called(x).square().mean())


@loss_case(LOOPS)
def called_twice_in_a_row(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Gives its output to itself, with gradients through both."""
    first = training.called(x)
    return loss_of(training.called(x + functional.pad(first, (0, WIDTH - CLASSES))), y)


# --- checkpointing and functions of functions ----------------------------------------------------------------------


class Checkpointed(Dropping):
    reentrant = False

    def build(self) -> None:
        self.middle = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Dropout(0.2))

    def forward(self, x: Tensor) -> Any:
        return self.head(checkpoint(self.middle, self.hidden(x), use_reentrant=self.reentrant))


@model_case(LOOPS)
class CheckpointInside(Checkpointed):
    pass


@model_case(LOOPS)
class ReentrantCheckpointInside(Checkpointed):
    reentrant = True


@loss_case(LOOPS, model=Dropping)
def checkpoint_around(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(checkpoint(training.called, x, use_reentrant=False), y)


@loss_case(LOOPS, model=Dropping)
def reentrant_checkpoint_around(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(checkpoint(training.called, x.requires_grad_(), use_reentrant=True), y)


@model_case(LOOPS)
class ForcesInside(Net):
    """Takes the gradient of an energy in its forward pass."""

    def forward(self, x: Tensor) -> Any:
        place = x.detach().requires_grad_()
        energy = super().forward(place).square().sum()
        (force,) = torch.autograd.grad(energy, place, create_graph=True)
        return super().forward(x) + force[:, :CLASSES]


@model_case(LOOPS)
class BackwardInside(Net):
    """Runs a backward pass into a tensor of its own."""

    def forward(self, x: Tensor) -> Any:
        place = self.body(x).detach().requires_grad_()
        with torch.enable_grad():
            place.square().sum().backward()
        assert place.grad is not None  # noqa: S101
        return super().forward(x) + place.grad[:, :CLASSES]


@loss_case(LOOPS)
def functional_call_of_wrapper(training: Training, x: Tensor, y: Tensor) -> Tensor:
    halved = {name: value * 0.5 for name, value in training.called.named_parameters()}
    return loss_of(torch.func.functional_call(training.called, halved, (x,)), y)


@loss_case(LOOPS)
def functional_call_of_model(training: Training, x: Tensor, y: Tensor) -> Tensor:
    halved = {name: value * 0.5 for name, value in training.model.named_parameters()}
    return loss_of(torch.func.functional_call(training.model, halved, (x,)), y) + loss_of(training.called(x), y)


@loss_case(LOOPS)
def functional_call_later(training: Training, x: Tensor, y: Tensor) -> Tensor:
    if training.number < EVENT_AT:
        return loss_of(training.called(x), y)
    return functional_call_of_wrapper(training, x, y)


@step_case(LOOPS)
def gradients_by_func(training: Training) -> Tensor:
    x, y = training.batch()
    weights = {name: value.detach() for name, value in training.called.named_parameters()}

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(training.called, weights, (x,)), y)

    slopes, value = torch.func.grad_and_value(loss)(weights)
    for name, weight in training.called.named_parameters():
        weight.grad = slopes[name]
    training.optimizer.step()
    plain_step(training)
    return value


add(LOOPS, "mapped_over_rows", loss=lambda t, x, y: loss_of(torch.vmap(t.called)(x), y) + loss_of(t.called(x), y))


@loss_case(LOOPS)
def inner_steps(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Trains copies of the weights in the loss, as MAML does."""
    weights = dict(training.model.named_parameters())
    inner = loss_of(training.called(x), y)
    slopes = torch.autograd.grad(inner, list(weights.values()))
    moved = {name: one - 0.1 * slope for (name, one), slope in zip(weights.items(), slopes, strict=True)}
    return loss_of(torch.func.functional_call(training.model, moved, (x,)), y)


@loss_case(LOOPS)
def two_wrappers_of_one_model(training: Training, x: Tensor, y: Tensor) -> Tensor:
    other = training.once("other", lambda: training.wrap(training.model))
    return loss_of(training.called(x), y) + loss_of(other(x + 0.1), y)


@loss_case(LOOPS)
def two_models_share_a_layer(training: Training, x: Tensor, y: Tensor) -> Tensor:
    def made() -> nn.Module:
        other = Net().to(training.device)
        other.body = training.model.body
        return training.wrap(other)

    return loss_of(training.called(x), y) + loss_of(training.once("other", made)(x), y)


# --- copies --------------------------------------------------------------------------------------------------------


def _goes_on_with(training: Training, called: nn.Module) -> None:
    """Trains the copy from here on."""
    training.called = called
    training.model = getattr(called, "_orig_mod", called)
    training.restart_optimizer()


add(COPIES, "goes_on_with_copy", model=Normed, event=lambda t: _goes_on_with(t, copy.deepcopy(t.called)))


@event_case(COPIES, model=Normed)
def goes_on_with_original(training: Training) -> None:
    other = copy.deepcopy(training.called)
    for weight in other.parameters():
        weight.data.zero_()
    training.kept["other"] = other


@event_case(COPIES, model=Normed)
def goes_on_with_loaded(training: Training) -> None:
    file = io.BytesIO()
    torch.save(training.called, file)
    file.seek(0)
    _goes_on_with(training, torch.load(file, weights_only=False))


@step_case(COPIES, model=Normed)
def original_and_copy_in_turn(training: Training) -> Tensor:
    """Trains both; the copy was made after recordings were."""
    loss = plain_step(training)
    if training.number < EVENT_AT:
        return loss
    other = training.once("other", lambda: copy.deepcopy(training.called))
    optimizer = training.once("optimizer", lambda: torch.optim.SGD(other.parameters(), lr=0.05))
    x, y = training.batch()
    optimizer.zero_grad()
    second = loss_of(other(x), y)
    second.backward()
    optimizer.step()
    return torch.stack([loss, second.detach()])


@step_case(COPIES, model=Normed)
def averaged_model(training: Training) -> Tensor:
    average = training.once("average", lambda: AveragedModel(training.called, multi_avg_fn=get_ema_multi_avg_fn(0.9)))
    loss = plain_step(training)
    average.update_parameters(training.called)
    with torch.no_grad():
        score = average(training.batch(0)[0]).square().mean()
    return torch.stack([loss, score])


@step_case(COPIES, model=Normed)
def averaged_model_gets_statistics(training: Training) -> Tensor:
    average = training.once("average", lambda: AveragedModel(training.model))
    loss = plain_step(training)
    average.update_parameters(training.model)
    if training.number % 10 == 9:
        update_bn([training.batch(number)[0] for number in range(4)], average)
        with torch.no_grad():
            return torch.stack([loss, average(training.batch(0)[0]).mean()])
    return loss


@event_case(COPIES, model=Normed)
def statistics_of_model_updated(training: Training) -> None:
    update_bn([training.batch(number)[0] for number in range(4)], training.called)


@step_case(COPIES, model=Normed)
def teacher_is_a_copy(training: Training) -> Tensor:
    """A teacher in training mode, without gradients, that follows the student."""
    teacher = training.once("teacher", lambda: copy.deepcopy(training.called).requires_grad_(requires_grad=False))
    x, y = training.batch()
    with torch.no_grad():
        wanted = teacher(x).softmax(1)
    logits = training.called(x)
    loss = update(training, functional.cross_entropy(logits, y) + functional.cross_entropy(logits, wanted))
    with torch.no_grad():
        torch._foreach_lerp_(list(teacher.parameters()), list(training.called.parameters()), 0.1)
    return loss


# --- flags of the process ------------------------------------------------------------------------------------------


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, HIDDEN, 5, padding=2), nn.Tanh(), nn.Conv1d(HIDDEN, HIDDEN, 5), nn.Tanh()
        )
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.body(x.unsqueeze(1)).mean(2))


class Wide(Net):
    """Products of matrices that are large enough for TF32 to be used."""

    def build(self) -> None:
        self.middle = nn.Sequential(nn.Linear(HIDDEN, 512), nn.Tanh(), nn.Linear(512, HIDDEN))

    def hidden(self, x: Tensor) -> Tensor:
        return self.middle(super().hidden(x)) * 4


@event_case(FLAGS, model=Wide, gpu=True, tolerance=3e-5)
def tf32_turned_on(_: Training) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


@event_case(FLAGS, model=Conv, gpu=True, tolerance=3e-5)
def tf32_of_convolutions_turned_on(_: Training) -> None:
    torch.backends.cudnn.allow_tf32 = True


add(FLAGS, "benchmark_turned_on", model=Conv, event=lambda _: setattr(torch.backends.cudnn, "benchmark", True))
add(FLAGS, "cudnn_turned_off", model=Conv, event=lambda _: setattr(torch.backends.cudnn, "enabled", False))


@event_case(FLAGS, model=Wide)
def deterministic_turned_on(_: Training) -> None:
    torch.use_deterministic_algorithms(mode=True, warn_only=True)


class MakesTensors(Net):
    def forward(self, x: Tensor) -> Any:
        made = torch.linspace(0.5, 1.5, CLASSES, device=x.device)
        logits = super().forward(x) * made
        return logits if logits.dtype is torch.float32 else logits * 0.25


add(FLAGS, "default_dtype_changed", model=MakesTensors, event=lambda _: torch.set_default_dtype(torch.float64))


class MakesTensorsAnywhere(Net):
    def forward(self, x: Tensor) -> Any:
        made = torch.ones(CLASSES)
        return super().forward(x) * made.to(x.device) * (1.0 if made.device.type == "cpu" else 0.25)


@event_case(FLAGS, model=MakesTensorsAnywhere, gpu=True)
def default_device_changed(training: Training) -> None:
    torch.set_default_device(training.device)


add(FLAGS, "anomalies_detected", event=lambda _: torch.set_anomaly_enabled(True))


@step_case(FLAGS, gpu=True)
def waits_forbidden(training: Training) -> Tensor:
    """Has PyTorch raise if the host waits for the device in a step, as who looks for waits does."""
    if training.number < EVENT_AT:
        return plain_step(training)
    torch.cuda.set_sync_debug_mode("error")
    try:
        return plain_step(training)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@step_case(FLAGS, gpu=True)
def cache_emptied_each_step(training: Training) -> Tensor:
    loss = plain_step(training)
    torch.cuda.empty_cache()
    return loss


@step_case(FLAGS, model=Dropping)
def seed_set_later(training: Training) -> Tensor:
    if training.number in (EVENT_AT, 24):
        torch.manual_seed(7)
    return plain_step(training)


@step_case(FLAGS, model=Dropping)
def random_numbers_between_steps(training: Training) -> Tensor:
    """Draws in the loop, on the GPU, as augmentation does: what the model draws comes between."""
    x, y = training.batch()
    x = x + 0.1 * torch.randn_like(x)
    return update(training, loss_of(training.called(x), y))


@step_case(FLAGS, model=Dropping)
def same_mask_twice(training: Training) -> Tensor:
    """Puts the state of the generator back, so that two passes drop the same."""
    x, y = training.batch()
    generator = torch.cuda.default_generators[0] if training.device.type == "cuda" else torch.default_generator
    training.optimizer.zero_grad()
    state = generator.get_state()
    first = loss_of(training.called(x), y)
    first.backward()
    generator.set_state(state)
    second = loss_of(training.called(x), y)
    second.backward()
    training.optimizer.step()
    return torch.stack([first.detach(), second.detach(), (first - second).detach()])


@step_case(FLAGS, model=Dropping)
def generator_forked(training: Training) -> Tensor:
    with torch.random.fork_rng():
        return plain_step(training)


class DrawsByGenerator(Net):
    """Draws from a generator of the device that it has itself."""

    def build(self) -> None:
        self.generators: list[torch.Generator] = []

    def forward(self, x: Tensor) -> Any:
        if not self.generators:
            self.generators.append(torch.Generator(x.device).manual_seed(0))
        noise = torch.randn(x.shape, generator=self.generators[0], device=x.device)
        return super().forward(x + noise)


add(FLAGS, "generator_of_device", model=DrawsByGenerator)


@model_case(FLAGS)
class NoiseInForward(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.head(hidden + 0.5 * torch.randn_like(hidden) * torch.rand((), device=x.device))


# --- precision -----------------------------------------------------------------------------------------------------


def _cast(dtype_of: Callable[[int], torch.dtype | None]) -> Step:
    """Trains under autocast to the dtype of each step, or without it."""

    def loss(training: Training, x: Tensor, y: Tensor) -> Tensor:
        dtype = dtype_of(training.number)
        with torch.autocast(training.device.type, dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            logits = training.called(x)
        seen = {torch.float32: 1.0, torch.bfloat16: 1.5, torch.float16: 2.0}[logits.dtype]
        return functional.cross_entropy(logits.float(), y) * seen

    return step_of(loss)


def _later(before: torch.dtype | None, after: torch.dtype | None) -> Step:
    return _cast(lambda number: before if number < EVENT_AT else after)


HALF: dict[str, Any] = {"model": Wide, "tolerance": 0.1}
add(PRECISION, "autocast_to_bfloat16", step=_later(torch.bfloat16, torch.bfloat16), **HALF)
add(PRECISION, "autocast_begins_later", step=_later(None, torch.bfloat16), **HALF)
add(PRECISION, "autocast_ends_later", step=_later(torch.bfloat16, None), **HALF)
add(PRECISION, "autocast_to_other_later", step=_later(torch.bfloat16, torch.float16), **HALF)
add(PRECISION, "autocast_in_turn", step=_cast(lambda number: torch.bfloat16 if number % 3 else None), **HALF)


@loss_case(PRECISION, **HALF)
def autocast_without_cache_later(training: Training, x: Tensor, y: Tensor) -> Tensor:
    cached = training.number < EVENT_AT
    with torch.autocast(training.device.type, dtype=torch.bfloat16, cache_enabled=cached):
        return loss_of(training.called(x), y)


@step_case(PRECISION, **HALF)
def one_autocast_for_two_steps(training: Training) -> Tensor:
    """Weights change within one autocast, whose cache of casts was made before."""
    with torch.autocast(training.device.type, dtype=torch.bfloat16):
        first = plain_step(training)
        torch.clear_autocast_cache()
        return torch.stack([first, plain_step(training)])


class CastsInside(Wide):
    dtype = torch.bfloat16

    def forward(self, x: Tensor) -> Any:
        with torch.autocast(x.device.type, dtype=self.dtype):
            return super().forward(x)


add(PRECISION, "autocast_inside", model=CastsInside, tolerance=0.1)


@event_case(PRECISION, model=CastsInside, tolerance=0.1)
def autocast_inside_changed(training: Training) -> None:
    training.model.dtype = torch.float16


def _scaled(training: Training, *, infinite: tuple[int, ...], start: float = 2.0**10) -> Tensor:
    scaler = training.once("scaler", lambda: torch.amp.GradScaler(training.device.type, init_scale=start))
    x, y = training.batch()
    training.optimizer.zero_grad()
    with torch.autocast(training.device.type, dtype=torch.float16):
        loss = loss_of(training.called(x), y)
    if training.number in infinite:
        loss = loss * torch.inf
    scaler.scale(loss).backward()
    scaler.unscale_(training.optimizer)
    clip_grad_norm_(training.model.parameters(), 1.0)
    scaler.step(training.optimizer)
    scaler.update()
    return torch.stack([loss.detach().nan_to_num(0.0, 0.0, 0.0), torch.full_like(loss, scaler.get_scale())])


add(PRECISION, "scaled_gradients", **HALF, step=lambda t: _scaled(t, infinite=()))
add(PRECISION, "infinite_steps", **HALF, step=lambda t: _scaled(t, infinite=(1, 2, 9, 10, EVENT_AT, 16)))
add(PRECISION, "scale_too_large_at_first", **HALF, step=lambda t: _scaled(t, infinite=(), start=2.0**40))


class HalfWeights(Wide):
    def build(self) -> None:
        super().build()
        self.bfloat16()

    def forward(self, x: Tensor) -> Any:
        return super().forward(x.bfloat16())


@step_case(PRECISION, model=HalfWeights, tolerance=0.2)
def master_weights(training: Training) -> Tensor:
    """Trains copies in FP32 of weights in half, and writes these back."""
    own = list(training.model.parameters())
    masters = training.once("masters", lambda: [one.detach().float().requires_grad_() for one in own])
    optimizer = training.once("optimizer", lambda: torch.optim.SGD(masters, lr=0.05))
    x, y = training.batch()
    training.model.zero_grad()
    loss = loss_of(training.called(x), y)
    loss.backward()
    for master, weight in zip(masters, own, strict=True):
        master.grad = weight.grad.float()
    optimizer.step()
    with torch.no_grad():
        torch._foreach_copy_(own, masters)
    return loss.detach()
