"""Cases in which weights are frozen, replaced, moved, tied or written to, and modules change their mode."""

from __future__ import annotations

import copy
from operator import setitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, prune

from graph_models.case import (
    CLASSES,
    EVENT_AT,
    HIDDEN,
    WIDTH,
    Net,
    Training,
    add,
    event_case,
    fading,
    loss_case,
    loss_of,
    model_case,
    plain_step,
    step_case,
    trainable,
    update,
)

WEIGHTS, WRITES, MODES = "weights", "weights written in forward", "modes"


class Deep(nn.Module):
    """An encoder and a decoder of the same shape, that can be tied."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.body = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.leave(self.body(torch.tanh(self.enter(x)))))


class TiedByCode(Deep):
    """Uses the entering weight to leave."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.body(torch.tanh(self.enter(x)))
        return self.head(functional.linear(hidden, self.enter.weight.t()))


# --- changed from outside ------------------------------------------------------------------------------------------


add(WEIGHTS, "body_frozen", model=Deep, event=lambda t: t.model.body.requires_grad_(requires_grad=False))


class Frozen(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(requires_grad=False)


@event_case(WEIGHTS, model=Frozen)
def body_unfrozen(training: Training) -> None:
    training.model.body.requires_grad_()
    training.restart_optimizer()


@event_case(WEIGHTS, model=Deep, at=range(40))
def frozen_in_turn(training: Training) -> None:
    training.model.enter.requires_grad_(training.number % 2 == 0)
    training.model.head.requires_grad_(training.number % 2 == 1)


@event_case(WEIGHTS, model=Deep)
def weight_replaced(training: Training) -> None:
    training.model.head.weight = nn.Parameter(training.model.head.weight.detach() * 0.5)
    training.restart_optimizer()


@event_case(WEIGHTS, model=Deep)
def weight_gets_other_data(training: Training) -> None:
    training.model.head.weight.data = training.model.head.weight.data * 0.5


@event_case(WEIGHTS, model=Deep, at=range(3, 40))
def weight_gets_other_data_each_step(training: Training) -> None:
    training.model.head.weight.data = training.model.head.weight.data * 0.99


@event_case(WEIGHTS, model=Deep)
def weight_set_to_other_storage(training: Training) -> None:
    with torch.no_grad():
        training.model.head.weight.set_(training.model.head.weight.detach() * 0.5)


@event_case(WEIGHTS, model=Deep)
def weight_written(training: Training) -> None:
    with torch.no_grad():
        training.model.head.weight.mul_(0.5)


@event_case(WEIGHTS, model=Deep)
def weights_swapped(training: Training) -> None:
    other = copy.deepcopy(training.model.head)
    with torch.no_grad():
        other.weight.mul_(0.5)
    torch.utils.swap_tensors(training.model.head.weight, other.weight)


@event_case(WEIGHTS, model=Deep)
def moved_to_host_and_back(training: Training) -> None:
    training.model.to("cpu")
    training.model.to(training.device)


@event_case(WEIGHTS, model=Deep)
def wrapper_moved_to_host_and_back(training: Training) -> None:
    training.called.to("cpu")
    training.called.to(training.device)


add(WEIGHTS, "tied_later", model=Deep, event=lambda t: setattr(t.model.body[2], "weight", t.model.body[0].weight))


class Tied(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.body[2].weight = self.body[0].weight


@event_case(WEIGHTS, model=Tied)
def untied_later(training: Training) -> None:
    training.model.body[2].weight = nn.Parameter(training.model.body[0].weight.detach().clone())
    training.restart_optimizer()


@event_case(WEIGHTS, model=TiedByCode)
def tied_by_code(training: Training) -> None:
    with torch.no_grad():
        training.model.enter.weight.mul_(0.9)


@event_case(WEIGHTS, model=Deep)
def state_loaded(training: Training) -> None:
    state = {name: 0.7 * value for name, value in training.model.state_dict().items()}
    training.model.load_state_dict(state)


@event_case(WEIGHTS, model=Deep)
def state_assigned(training: Training) -> None:
    state = {name: 0.7 * value for name, value in training.model.state_dict().items()}
    training.model.load_state_dict(state, assign=True)
    training.restart_optimizer()


@event_case(WEIGHTS, model=Deep)
def state_loaded_by_wrapper(training: Training) -> None:
    state = {name: 0.7 * value for name, value in training.called.state_dict().items()}
    training.called.load_state_dict(state)


class AnyPrecision(Deep):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x.to(self.head.weight.dtype))


add(WEIGHTS, "double_later", model=AnyPrecision, event=lambda t: t.model.double())


@event_case(WEIGHTS, model=AnyPrecision, tolerance=0.1)
def bfloat16_later(training: Training) -> None:
    training.model.bfloat16()
    training.restart_optimizer()


@event_case(WEIGHTS, model=Deep)
def layer_added(training: Training) -> None:
    training.model.body.append(nn.Linear(HIDDEN, HIDDEN).to(training.device))
    training.restart_optimizer()


add(WEIGHTS, "layer_replaced", model=Deep, event=lambda t: setitem(t.model.body, 1, nn.ReLU()))


@event_case(WEIGHTS, model=Deep)
def layer_removed(training: Training) -> None:
    del training.model.body[1]


@event_case(WEIGHTS, model=Deep)
def layer_pruned(training: Training) -> None:
    prune.l1_unstructured(training.model.body[0], "weight", amount=0.5)
    training.restart_optimizer()


@event_case(WEIGHTS, model=Deep)
def weights_flattened(training: Training) -> None:
    """Has all weights lie in one tensor."""
    flat = parameters_to_vector(training.model.parameters()).detach().clone()
    start = 0
    for weight in training.model.parameters():
        weight.data = flat[start : start + weight.numel()].view_as(weight)
        start += weight.numel()


@event_case(WEIGHTS, model=Deep)
def weight_transposed_in_memory(training: Training) -> None:
    weight = training.model.body[0].weight
    weight.data = weight.data.t().contiguous().t()


@step_case(WEIGHTS, model=Deep)
def gradients_in_flat_memory(training: Training) -> Tensor:
    """Gradients are views of one tensor, as some optimizers and FSDP have them."""

    def flattened() -> Tensor:
        weights = list(training.model.parameters())
        flat = torch.zeros(sum(one.numel() for one in weights), device=training.device)
        start = 0
        for weight in weights:
            weight.grad = flat[start : start + weight.numel()].view_as(weight)
            start += weight.numel()
        return flat

    flat = training.once("flat", flattened)
    flat.zero_()
    x, y = training.batch()
    loss = loss_of(training.called(x), y)
    loss.backward()
    training.optimizer.step()
    return torch.stack([loss.detach(), flat.norm()])


@event_case(WEIGHTS, model=Deep)
def optimizer_replaced(training: Training) -> None:
    training.optimizer = torch.optim.AdamW(
        trainable(training.model), lr=0.01, fused=training.device.type == "cuda" or None
    )


@step_case(WEIGHTS, model=Deep)
def averaged_weights_swapped_in(training: Training) -> Tensor:
    """Evaluates with averaged weights, whose tensors it puts in place of the weights', and puts these back."""
    weights = list(training.model.parameters())
    averages = training.once("averages", lambda: [one.detach().clone() for one in weights])
    loss = plain_step(training)
    for average, weight in zip(averages, weights, strict=True):
        average.lerp_(weight.detach(), 0.1)
    own = [weight.data for weight in weights]
    for average, weight in zip(averages, weights, strict=True):
        weight.data = average
    training.called.eval()
    with torch.no_grad():
        score = training.called(training.batch(0)[0]).square().mean()
    training.called.train()
    for data, weight in zip(own, weights, strict=True):
        weight.data = data
    return torch.stack([loss, score])


@step_case(WEIGHTS, model=Deep)
def adversaries(training: Training) -> Tensor:
    """Two recorded models; one is trained through the other, which is frozen meanwhile."""
    critic = training.once("critic", lambda: nn.Sequential(nn.Linear(CLASSES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)))
    critic.to(training.device)
    called = training.once("called", lambda: training.wrap(critic))
    other = training.once("other", lambda: torch.optim.SGD(critic.parameters(), lr=0.05))
    x, _ = training.batch()
    real = x[:, :CLASSES]
    critic.requires_grad_()
    other.zero_grad()
    loss_of_critic = (called(training.called(x).detach()) - called(real)).mean()
    loss_of_critic.backward()
    other.step()
    critic.requires_grad_(requires_grad=False)
    loss = update(training, -called(training.called(x)).mean())
    return torch.stack([loss, loss_of_critic.detach()])


# --- written to by the forward pass --------------------------------------------------------------------------------


@model_case(WRITES)
class MomentumEncoder(Net):
    """Moves the weights of a second encoder towards its own in each forward pass, as MoCo does."""

    def build(self) -> None:
        self.slow = nn.Linear(WIDTH, HIDDEN).requires_grad_(requires_grad=False)

    def follow(self, slow: Tensor, own: Tensor) -> None:
        with torch.no_grad():
            slow.mul_(0.9).add_(own, alpha=0.1)

    def forward(self, x: Tensor) -> Any:
        for slow, own in zip(self.slow.parameters(), self.body.parameters(), strict=True):
            self.follow(slow, own)
        return self.head(self.hidden(x) + torch.tanh(self.slow(x)))


@model_case(WRITES)
class MomentumEncoderByData(MomentumEncoder):
    def follow(self, slow: Tensor, own: Tensor) -> None:
        slow.data = slow.data * 0.9 + own.data * 0.1


@model_case(WRITES)
class AverageInAttribute(Net):
    """Keeps a moving average of what it saw in a dictionary."""

    def build(self) -> None:
        self.averages: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        mean = hidden.detach().mean(0)
        self.averages["hidden"] = mean.lerp(self.averages.get("hidden", mean), 0.9)
        return self.head(hidden - self.averages["hidden"])


@model_case(WRITES)
class AverageInAttributeInPlace(Net):
    def build(self) -> None:
        self.averages: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        mean = hidden.detach().mean(0)
        if not self.averages:
            self.averages.append(mean.clone())
        self.averages[0].lerp_(mean, 0.1)
        return self.head(hidden - self.averages[0].clone())


@model_case(WRITES)
class AverageInBuffer(Net):
    average: Tensor

    def build(self) -> None:
        self.register_buffer("average", torch.zeros(HIDDEN))

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        with torch.no_grad():
            self.average.lerp_(hidden.mean(0), 0.1)
        return self.head(hidden - self.average.clone())


@model_case(WRITES)
class AverageInNewBuffer(AverageInBuffer):
    """Sets its buffer to a new tensor in each pass."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        self.average = self.average.lerp(hidden.detach().mean(0), 0.1)
        return self.head(hidden - self.average)


@model_case(WRITES)
class NormsItsWeight(Net):
    def forward(self, x: Tensor) -> Any:
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


@model_case(WRITES)
class ClampsItsWeight(Net):
    def forward(self, x: Tensor) -> Any:
        self.body.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@model_case(WRITES)
class GeneratesWeight(Net):
    """Has the weight of a layer made anew in each pass, as weight dropping did."""

    def build(self) -> None:
        self.raw = nn.Parameter(self.head.weight.detach().clone())
        del self.head._parameters["weight"]

    def forward(self, x: Tensor) -> Any:
        self.head.weight = torch.tanh(self.raw)
        return super().forward(x)


@model_case(WRITES)
class ReplacesParameter(Net):
    """Makes a new parameter in each pass, which is not trained."""

    def build(self) -> None:
        self.shift = nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        self.shift = nn.Parameter(0.9 * self.shift + 0.1 * hidden.detach().mean(0), requires_grad=False)
        return self.head(hidden - self.shift)


@model_case(WRITES)
class SetsUpByData(Net):
    """Sets its scale by the first batch, as ActNorm does, and remembers that in a buffer."""

    def build(self) -> None:
        self.scale = nn.Parameter(torch.ones(HIDDEN))
        self.register_buffer("is_set", torch.tensor(0))

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        if self.is_set.item() == 0:
            self.scale.data.copy_(1 / hidden.detach().std(0))
            self.is_set.fill_(1)
        return self.head(hidden * self.scale)


add(WRITES, "set_up_again", model=SetsUpByData, event=lambda t: t.model.is_set.zero_())


@model_case(WRITES)
class CodebookByAverages(Net):
    """A codebook of moving averages, as VQ-VAE has it."""

    def build(self) -> None:
        self.register_buffer("codes", torch.randn(8, HIDDEN))
        self.register_buffer("counts", torch.ones(8))

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        nearest = torch.cdist(hidden.detach(), self.codes).argmin(1)
        chosen = functional.one_hot(nearest, 8).float()
        with torch.no_grad():
            self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.lerp_(chosen.t() @ hidden / (self.counts.unsqueeze(1) + 1e-3), 0.1)
        coded = hidden + (self.codes[nearest] - hidden).detach()
        return self.head(coded)


@model_case(WRITES)
class ObservedRange(Net):
    """Rounds by a range that it observes and keeps in buffers, as training for quantization does."""

    def build(self) -> None:
        self.register_buffer("low", torch.tensor(torch.inf))
        self.register_buffer("high", torch.tensor(-torch.inf))

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        self.low.copy_(torch.minimum(self.low, hidden.detach().min()))
        self.high.copy_(torch.maximum(self.high, hidden.detach().max()))
        unit = (self.high - self.low) / 255
        return self.head(hidden + ((hidden / unit).round() * unit - hidden).detach())


# --- modes and norms -----------------------------------------------------------------------------------------------


class Normed(Net):
    def build(self) -> None:
        self.norm, self.drop = nn.BatchNorm1d(HIDDEN), nn.Dropout(0.3)
        self.slope = nn.LeakyReLU(0.01)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.slope(self.norm(self.body(x))))


class Dropping(Normed):
    def forward(self, x: Tensor) -> Any:
        return self.head(self.drop(self.hidden(x)))


@model_case(MODES)
class NormsByBatch(Normed):
    pass


@model_case(MODES)
class NormsByBatchWithoutMomentum(Normed):
    """Averages all batches, by a count in a buffer that the host reads."""

    def build(self) -> None:
        super().build()
        self.norm = nn.BatchNorm1d(HIDDEN, momentum=None)


@model_case(MODES)
class Drops(Dropping):
    """The baseline of what draws: are the draws of a recording those of the model?"""


add(MODES, "momentum_changed", model=Normed, event=lambda t: setattr(t.model.norm, "momentum", 0.5))


@event_case(MODES, model=Normed, at=range(1, 40))
def momentum_decays(training: Training) -> None:
    training.model.norm.momentum = fading(training.number)


add(MODES, "norm_evaluated_for_a_while", model=Normed, at=(12, 24), event=lambda t: t.model.norm.train(t.number == 24))
add(MODES, "norm_forgets_statistics", model=Normed, event=lambda t: t.model.norm.reset_running_stats())
add(
    MODES, "norm_keeps_no_statistics", model=Normed, event=lambda t: setattr(t.model.norm, "track_running_stats", False)
)
add(MODES, "epsilon_changed", model=Normed, event=lambda t: setattr(t.model.norm, "eps", 0.5))
add(MODES, "slope_changed", model=Normed, event=lambda t: setattr(t.model.slope, "negative_slope", 0.5))
add(MODES, "dropout_changed", model=Dropping, event=lambda t: setattr(t.model.drop, "p", 0.0))
add(MODES, "dropout_evaluated", model=Dropping, event=lambda t: t.model.drop.eval())
add(MODES, "training_set_by_hand", model=Dropping, event=lambda t: setattr(t.model.drop, "t", False))


DROP = {"share": 0.3}


class DropsByGlobal(Net):
    def forward(self, x: Tensor) -> Any:
        return self.head(functional.dropout(self.hidden(x), DROP["share"], self.training))


add(MODES, "share_of_dropout_in_global", model=DropsByGlobal, event=lambda t: t.patch(DROP, "share", 0.0))
# All is in evaluation from here on, and is trained further.
add(MODES, "trained_in_evaluation", model=Normed, event=lambda t: t.called.eval())


@step_case(MODES, model=Normed)
def evaluated_in_between(training: Training) -> Tensor:
    loss = plain_step(training)
    if training.number % 5 == 4:
        training.called.eval()
        with torch.no_grad():
            score = training.called(training.batch(0)[0]).mean()
        training.called.train()
        return torch.stack([loss, score])
    return loss


@step_case(MODES, model=Normed)
def evaluated_between_forward_and_backward(training: Training) -> Tensor:
    x, y = training.batch()
    loss = loss_of(training.called(x), y)
    training.called.eval()
    with torch.no_grad():
        score = training.called(training.batch(0)[0]).mean()
    training.called.train()
    return torch.stack([update(training, loss), score])


@loss_case(MODES, model=Normed)
def statistics_without_gradients(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Runs in training mode without gradients first, which moves the statistics."""
    with torch.no_grad():
        training.called(x + 1)
    with torch.inference_mode():
        training.called(x - 1)
    return loss_of(training.called(x), y)


@loss_case(MODES, model=Normed)
def submodules_called_by_themselves(training: Training, x: Tensor, y: Tensor) -> Tensor:
    hidden = training.called.norm(training.called.body(x))
    return loss_of(training.called(x), y) + hidden.square().mean() * (training.number >= EVENT_AT)
