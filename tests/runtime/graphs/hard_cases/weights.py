"""Weights that are frozen, replaced, moved, tied or written to, and modules that change their mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import setitem
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

from .case import CLASSES, EVENT_AT, HIDDEN, STEPS, WIDTH, Cases, Net, Training, Why, fading


class Deep(nn.Module):
    """An encoder and a decoder of the same shape, that can be tied."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.body = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Any:
        x = x.to(self.head.weight.dtype)
        return self.head(self.leave(self.body(torch.tanh(self.enter(x)))))


case = Cases("weights", model=Deep)


def edit(name: str, change: Any, **options: Any) -> None:
    """Changes the model, and makes the optimizer anew for the weights that it has then."""
    case(name, event=lambda t: (change(t.model), t.restart_optimizer()), **options)


def halved(model: Any) -> Tensor:
    return model.head.weight.detach() * 0.5


def load(into: Any, **how: Any) -> None:
    into.load_state_dict({name: 0.7 * value for name, value in into.state_dict().items()}, **how)


def there_and_back(module: nn.Module, device: torch.device) -> None:
    module.to("cpu")
    module.to(device)


def set_data(model: Any, data: Tensor) -> None:
    model.body[0].weight.data = data


edit("body_frozen", lambda model: model.body.requires_grad_(requires_grad=False))
edit("weight_replaced", lambda model: setattr(model.head, "weight", nn.Parameter(halved(model))))
edit("tied_later", lambda model: setattr(model.body[2], "weight", model.body[0].weight))
edit("state_assigned", lambda model: load(model, assign=True))
edit("bfloat16_later", nn.Module.bfloat16, tolerance=0.1)
edit("layer_added", lambda model: model.body.append(nn.Linear(HIDDEN, HIDDEN).to(model.head.weight.device)))
edit("layer_replaced", lambda model: setitem(model.body, 1, nn.ReLU()))
edit("layer_pruned", lambda model: prune.l1_unstructured(model.body[0], "weight", amount=0.5), why=Why.HOOK)
case("weight_gets_other_data", event=lambda t: set_data(t.model, t.model.body[0].weight.data * 0.5))
case(
    "weight_gets_other_data_each_step",
    event=lambda t: set_data(t.model, t.model.body[0].weight.data * 0.99),
    at=range(3, STEPS),
    why=Why.AGAIN,
)
case("weight_transposed_in_memory", event=lambda t: set_data(t.model, t.model.body[0].weight.data.t().contiguous().t()))
case("weight_set_to_other_storage", event=lambda t: torch.no_grad()(t.model.head.weight.set_)(halved(t.model)))
case("moved_to_host_and_back", event=lambda t: there_and_back(t.model, t.device))
case("state_loaded_by_wrapper", event=lambda t: load(t.called))


writes = Cases("weights written in forward")


def keeps(name: str, write: Callable[[Any, Tensor], Any], why: str = "", **tensors: Tensor) -> None:
    """Adds a model whose hidden state is multiplied by what the pass makes of tensors that it keeps and writes to."""

    def hold() -> nn.Module:
        module = nn.Module()
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                module.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))
            else:
                module.register_buffer(name, tensor.clone())
        module.register_buffer("one", torch.ones(()))
        return module

    writes.holding(name, hold, lambda held, hidden: 1 + write(held, hidden.detach()), why=why)


def in_attribute(held: Any, hidden: Tensor) -> Tensor:
    held.kept = 0.1 * hidden.mean(0) + 0.9 * getattr(held, "kept", hidden.mean(0))
    return held.kept


def anew(held: Any, hidden: Tensor) -> Tensor:
    """Sets a new tensor in place of the buffer or parameter."""
    mean = 0.9 * held.mean + 0.1 * hidden.mean(0)
    held.mean = nn.Parameter(mean, requires_grad=False) if isinstance(held.mean, nn.Parameter) else mean
    return held.mean


def set_up(held: Any, hidden: Tensor) -> Tensor:
    """Sets its scale by the first batch, as ActNorm does, and remembers that in a buffer."""
    if held.is_set.item() == 0:
        held.scale.copy_(1 / hidden.std(0))
        held.is_set.fill_(1)
    return held.scale.clone()


mean, weight = torch.zeros(HIDDEN), nn.Parameter(torch.zeros(HIDDEN), requires_grad=False)
keeps("average_in_attribute", in_attribute, Why.AGAIN)
keeps("average_in_buffer", lambda held, h: held.mean.lerp_(h.mean(0), 0.1).clone(), mean=mean)
keeps("average_in_new_buffer", anew, Why.AGAIN, mean=mean)
keeps("average_in_new_parameter", anew, Why.AGAIN, mean=weight)
keeps("average_in_parameter", lambda held, h: held.mean.mul_(0.9).add_(h.mean(0)).clone(), Why.WRITES, mean=weight)
keeps("average_in_data_of_parameter", lambda held, h: _set_data(held, h), Why.AGAIN, mean=weight)
keeps("set_up_by_data", set_up, is_set=torch.tensor(0), scale=mean)


def _set_data(held: Any, hidden: Tensor) -> Tensor:
    held.mean.data = 0.9 * held.mean.data + 0.1 * hidden.mean(0)
    return held.mean


# --- modes and norms -----------------------------------------------------------------------------------------------

DROP = {"share": 0.3}


class Normed(Net):
    def build(self) -> None:
        self.norm, self.drop = nn.BatchNorm1d(HIDDEN), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Any:
        return self.head(torch.relu(self.norm(self.body(x))))


modes = Cases("modes", model=Normed)


def on_norm(name: str, change: Any, **options: Any) -> None:
    modes(name, event=lambda t: change(t.model.norm, t.number), **options)


def without_gradients(t: Training) -> None:
    """Runs in training mode, which moves the statistics."""
    for off in (torch.no_grad(), torch.inference_mode()):
        with off:
            t.called(t.batch(0)[0])


on_norm("momentum_changed", lambda norm, _: setattr(norm, "momentum", 0.5))
on_norm(
    "momentum_decays", lambda norm, number: setattr(norm, "momentum", fading(number)), at=range(1, STEPS), why=Why.AGAIN
)
on_norm("norm_evaluated_for_a_while", lambda norm, number: norm.train(number == 12), at=(EVENT_AT, 12))
on_norm("norm_keeps_no_statistics", lambda norm, _: setattr(norm, "track_running_stats", False))
on_norm("norm_without_momentum", lambda norm, _: setattr(norm, "momentum", None), at=0, why=Why.WAITS, on_cpu=None)
modes("trained_in_evaluation", event=lambda t: t.called.eval())
modes("statistics_without_gradients", event=without_gradients, at=range(STEPS))
drops = partial(modes, forward=lambda own, x: own.head(own.drop(own.hidden(x))), on_cpu=Why.DRAWS)
drops("dropout_changed", event=lambda t: setattr(t.model.drop, "p", 0.0))
drops("dropout_evaluated", event=lambda t: t.model.drop.eval())
modes(
    "share_of_dropout_in_global",
    forward=lambda own, x: own.head(functional.dropout(own.hidden(x), DROP["share"], own.training)),
    event=lambda t: t.patch(DROP, "share", 0.0),
    why=Why.DIFFERS,
    on_cpu=None,
)


@modes.step()
def evaluated_between_forward_and_backward(t: Training) -> Tensor:
    loss = t.loss()
    score = t.evaluated(t.batch(0)[0]).mean()
    return torch.stack([t.update(loss), score])
