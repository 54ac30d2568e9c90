"""Cases in which the loop does more with outputs than to take a loss of one: hooks, gradients, writes, attributes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph_models.case import (
    CLASSES,
    EVENT_AT,
    HIDDEN,
    WIDTH,
    Net,
    Training,
    add,
    fading,
    loss_case,
    loss_of,
    model_case,
    step_case,
    update,
)

OUT = "outputs"


class LossAndLogits(nn.Module):
    """Returns a loss and the logits that it is computed from, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor, y: Tensor) -> Any:
        logits = self.net(x)
        return functional.cross_entropy(logits, y), logits


class TwoHeads(Net):
    """Its heads have nothing in common but the body."""

    def build(self) -> None:
        self.other = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.head(hidden), self.other(hidden)


# --- outputs made from one another ---------------------------------------------------------------------------------


add(OUT, "loss_alone", model=LossAndLogits, loss=lambda t, x, y: t.called(x, y)[0])


@loss_case(OUT, model=LossAndLogits)
def loss_and_logits(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss, logits = training.called(x, y)
    return loss + 0.1 * logits.square().mean()


@loss_case(OUT, model=LossAndLogits)
def logits_used_later(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss, logits = training.called(x, y)
    return loss + 0.1 * logits.square().mean() if training.number >= EVENT_AT else loss


@loss_case(OUT, model=LossAndLogits)
def logits_used_instead_later(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss, logits = training.called(x, y)
    return logits.square().mean() if training.number >= EVENT_AT else loss


@step_case(OUT, model=LossAndLogits)
def retained_gradient_of_logits(training: Training) -> Tensor:
    """The gradient of the loss for the logits, both of which are outputs."""
    loss, logits = training.called(*training.batch())
    logits.retain_grad()
    update(training, loss)
    gradient = logits.grad
    return torch.cat([loss.detach().reshape(1), (torch.zeros_like(logits) if gradient is None else gradient).flatten()])


@loss_case(OUT, model=LossAndLogits)
def hook_on_logits_of_loss(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss, logits = training.called(x, y)
    logits.register_hook(lambda gradient: 0.25 * gradient)
    return loss


@loss_case(OUT, model=LossAndLogits)
def hook_on_logits_of_loss_later(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss, logits = training.called(x, y)
    if training.number >= EVENT_AT:
        logits.register_hook(lambda gradient: 0.25 * gradient)
    return loss


@loss_case(OUT, model=LossAndLogits)
def gradient_between_outputs(training: Training, x: Tensor, y: Tensor) -> Tensor:
    loss, logits = training.called(x, y)
    (slope,) = torch.autograd.grad(loss, logits, retain_graph=True)
    return loss * (1 + slope.norm().detach())


@loss_case(OUT, model=LossAndLogits)
def gradient_between_outputs_unused(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Goes on without the gradient if there is none."""
    loss, logits = training.called(x, y)
    (slope,) = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)
    return loss * 2 if slope is None else loss


@loss_case(OUT, model=LossAndLogits)
def write_to_logits_of_loss(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Plain training raises, since the loss needs what was overwritten; here nothing needs the loss."""
    _, logits = training.called(x, y)
    return functional.cross_entropy(logits.mul_(0.5), y)


class LogitsAndView(Net):
    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return logits, logits[:, :2]


@loss_case(OUT, model=LogitsAndView)
def write_to_output_with_view(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits, view = training.called(x)
    view.mul_(0.25)
    return functional.cross_entropy(logits, y)


class SameTwice(Net):
    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return {"logits": logits, "again": [logits]}


@loss_case(OUT, model=SameTwice)
def write_to_output_given_twice(training: Training, x: Tensor, y: Tensor) -> Tensor:
    outputs = training.called(x)
    outputs["again"][0].mul_(0.25)
    return functional.cross_entropy(outputs["logits"], y)


class DetachedTwin(Net):
    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return logits, logits.detach()


@loss_case(OUT, model=DetachedTwin)
def write_to_detached_twin(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits, twin = training.called(x)
    twin.mul_(0.25)
    return functional.cross_entropy(logits, y)


# --- hooks, gradients and writes -----------------------------------------------------------------------------------


@step_case(OUT)
def retained_gradient(training: Training) -> Tensor:
    x, y = training.batch()
    logits = training.called(x)
    logits.retain_grad()
    loss = update(training, functional.cross_entropy(logits, y))
    return torch.cat([loss.reshape(1), logits.grad.flatten()])


@loss_case(OUT)
def hook_on_output(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits = training.called(x)
    logits.register_hook(lambda gradient: fading(training.number) * gradient)
    return functional.cross_entropy(logits, y)


@step_case(OUT)
def capturing_hook_on_output(training: Training) -> Tensor:
    x, y = training.batch()
    logits = training.called(x)
    found: list[Tensor] = []
    logits.register_hook(found.append)
    loss = update(training, functional.cross_entropy(logits, y))
    return torch.cat([loss.reshape(1), found[0].flatten()])


@loss_case(OUT)
def output_written(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits = training.called(x).mul_(0.5)
    return functional.cross_entropy(logits.masked_fill_(logits.detach() > 1, 0.0), y)


@step_case(OUT)
def output_written_after_backward(training: Training) -> Tensor:
    x, y = training.batch()
    logits = training.called(x)
    loss = update(training, functional.cross_entropy(logits, y))
    with torch.no_grad():
        logits.zero_()
    return loss


@loss_case(OUT)
def outputs_of_earlier_steps(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Compares with outputs of the last steps, which it keeps as they are."""
    logits = training.called(x)
    earlier = training.kept.setdefault("logits", [])
    loss = functional.cross_entropy(logits, y)
    for one in earlier[-3:]:
        loss = loss + 0.1 * (logits - one).square().mean()
    earlier.append(logits.detach())
    return loss


@step_case(OUT)
def gradients_kept(training: Training) -> Tensor:
    """Keeps the tensors of gradients over steps, and adds those of the last step to the new."""
    x, y = training.batch()
    training.optimizer.zero_grad()
    loss = functional.cross_entropy(training.called(x), y)
    loss.backward()
    weights = list(training.model.parameters())
    now = [one.grad for one in weights]
    for weight, before in zip(weights, training.kept.get("gradients", now), strict=True):
        weight.grad = 0.5 * (weight.grad + before)
    training.kept["gradients"] = now
    training.optimizer.step()
    return loss.detach()


@step_case(OUT)
def backward_of_logits(training: Training) -> Tensor:
    x, y = training.batch()
    logits = training.called(x)
    training.optimizer.zero_grad()
    logits.backward(gradient=logits.detach().softmax(1) - functional.one_hot(y, CLASSES))
    training.optimizer.step()
    return logits.detach()


@step_case(OUT)
def backward_for_some_weights(training: Training) -> Tensor:
    x, y = training.batch()
    training.optimizer.zero_grad()
    loss = loss_of(training.called(x), y)
    loss.backward(inputs=list(training.model.head.parameters()))
    training.optimizer.step()
    return loss.detach()


@step_case(OUT)
def gradients_asked_for(training: Training) -> Tensor:
    """Asks for the gradients of some weights by autograd.grad, and updates by hand."""
    x, y = training.batch()
    loss = loss_of(training.called(x), y)
    weights = list(training.model.parameters())
    chosen = weights if training.number % 2 == 0 else weights[:2]
    with torch.no_grad():
        for weight, slope in zip(chosen, torch.autograd.grad(loss, chosen), strict=True):
            weight.sub_(slope, alpha=0.05)
    return loss.detach()


@step_case(OUT)
def gradient_for_one_weight(training: Training) -> Tensor:
    x, y = training.batch()
    loss = loss_of(training.called(x), y)
    (slope,) = torch.autograd.grad(loss, training.model.head.weight, retain_graph=training.number >= EVENT_AT)
    training.optimizer.zero_grad()
    training.model.head.weight.grad = slope
    training.optimizer.step()
    return loss.detach()


add(OUT, "backward_through_some_rows", loss=lambda t, x, y: functional.cross_entropy(t.called(x)[:4], y[:4]))


@loss_case(OUT)
def other_loss_of_odd_steps(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits = training.called(x)
    return functional.cross_entropy(logits, y) if training.number % 2 == 0 else logits.square().mean()


@loss_case(OUT)
def loss_times_zero(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(training.called(x), y) * (0.0 if training.number == EVENT_AT else 1.0)


# --- heads that some batches leave out -----------------------------------------------------------------------------


@loss_case(OUT, model=TwoHeads)
def head_left_out_by_some(training: Training, x: Tensor, y: Tensor) -> Tensor:
    one, other = training.called(x)
    loss = functional.cross_entropy(one, y)
    return loss if training.number % 3 == 2 else loss + functional.cross_entropy(other, y)


@loss_case(OUT, model=TwoHeads)
def head_used_later(training: Training, x: Tensor, y: Tensor) -> Tensor:
    one, other = training.called(x)
    loss = functional.cross_entropy(one, y)
    return loss + functional.cross_entropy(other, y) if training.number >= EVENT_AT else loss


add(OUT, "heads_in_turn", model=TwoHeads, loss=lambda t, x, y: functional.cross_entropy(t.called(x)[t.number % 2], y))


@loss_case(OUT, model=TwoHeads)
def head_by_its_name(training: Training, x: Tensor, y: Tensor) -> Tensor:
    """Leaves out the head whose output is a constant with no gradient from a step on."""
    training.model.other.requires_grad_(training.number < EVENT_AT)
    one, other = training.called(x)
    return functional.cross_entropy(one, y) + functional.cross_entropy(other, y)


# --- kinds of outputs ----------------------------------------------------------------------------------------------


class NamedOutput(NamedTuple):
    logits: Tensor
    size: Any


@dataclass
class DataOutput:
    logits: Tensor
    size: Any


class HeldOutput:
    __slots__ = ("logits", "size")

    def __init__(self, logits: Tensor, size: Any) -> None:
        self.logits, self.size = logits, size


class _OfKind(Net):
    kind: Any = NamedOutput

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.kind(self.head(hidden), hidden.square().mean())


def _of_fields(training: Training, x: Tensor, y: Tensor) -> Tensor:
    outputs = training.called(x)
    return functional.cross_entropy(outputs.logits, y) + outputs.size


@model_case(OUT, loss=_of_fields)
class NamedTupleOut(_OfKind):
    pass


@model_case(OUT, loss=_of_fields)
class DataclassOut(_OfKind):
    kind = DataOutput


@model_case(OUT, loss=_of_fields)
class ObjectOut(_OfKind):
    kind = HeldOutput


class GeneratorOut(Net):
    def forward(self, x: Tensor) -> Iterator[Tensor]:
        hidden = self.hidden(x)
        yield self.head(hidden)
        yield hidden.square().mean()


@loss_case(OUT, model=GeneratorOut)
def generator_out(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits, size = training.called(x)
    return functional.cross_entropy(logits, y) + size


class ListKept(Net):
    """Returns a list that it keeps and fills anew."""

    def build(self) -> None:
        self.found: list[Tensor] = []

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        self.found[:] = [self.head(hidden), hidden]
        return self.found


@loss_case(OUT, model=ListKept)
def output_list_is_kept(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits, hidden = training.called(x)
    return functional.cross_entropy(logits, y) + hidden.square().mean()


@step_case(OUT, model=TwoHeads)
def output_list_is_changed(training: Training) -> Tensor:
    """Changes the dictionary that it was given."""
    x, y = training.batch()
    outputs = training.once("model", lambda: training.called)(x)
    changed = list(outputs)
    changed.reverse()
    return update(training, functional.cross_entropy(changed[0], y))


_calls = [0]


class CountOut(Net):
    """Returns a number of the host besides."""

    def build(self) -> None:
        _calls[0] = 0

    def forward(self, x: Tensor) -> Any:
        _calls[0] += 1
        return super().forward(x), fading(_calls[0]), f"pass {_calls[0]}"


@loss_case(OUT, model=CountOut)
def number_out(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits, gain, _ = training.called(x)
    return functional.cross_entropy(logits, y) * gain


class AttributeOut(Net):
    """Hangs a second loss on what it returns."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        logits = self.head(hidden)
        vars(logits)["extra"] = hidden.square().mean()
        return logits


@loss_case(OUT, model=AttributeOut)
def attribute_of_output(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits = training.called(x)
    return functional.cross_entropy(logits, y) + logits.extra


@loss_case(OUT, model=AttributeOut)
def attribute_of_output_if_there(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits = training.called(x)
    return functional.cross_entropy(logits, y) + getattr(logits, "extra", 0.0)


class AttributeOnInput(Net):
    """Hangs a second loss on its input."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        vars(x)["extra"] = hidden.square().mean()
        return self.head(hidden)


@loss_case(OUT, model=AttributeOnInput)
def attribute_hung_on_input(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits = training.called(x)
    return functional.cross_entropy(logits, y) + getattr(x, "extra", 0.0)


@loss_case(OUT)
def autograd_function_inspected(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits = training.called(x)
    known = logits.grad_fn is not None and logits.grad_fn.name() == "AddmmBackward0"
    return functional.cross_entropy(logits, y) * (1.0 if known else 0.25)


@model_case(OUT)
class SpectrumOut(Net):
    def forward(self, x: Tensor) -> Any:
        return torch.fft.rfft(super().forward(x), n=2 * CLASSES).abs()


class ComplexOut(Net):
    def forward(self, x: Tensor) -> Any:
        return torch.fft.fft(super().forward(x))


@loss_case(OUT, model=ComplexOut)
def complex_out(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(torch.view_as_real(training.called(x)).sum(-1), y)


class EmptyOut(Net):
    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return logits, logits[:0], None, logits.argmax(1)


@loss_case(OUT, model=EmptyOut)
def empty_and_whole_numbers_out(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits, none, _, guess = training.called(x)
    return functional.cross_entropy(logits, y) * (1 + (guess == y).float().mean()) + none.sum()


class SparseOut(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).to_sparse()


add(OUT, "sparse_out", model=SparseOut, loss=lambda t, x, y: functional.cross_entropy(t.called(x).to_dense(), y))


class SubclassOut(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x).as_subclass(_Scores)


class _Scores(torch.Tensor):
    @property
    def factor(self) -> float:
        return 0.5


@loss_case(OUT, model=SubclassOut)
def subclass_out(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits = training.called(x)
    return functional.cross_entropy(logits.as_subclass(Tensor), y) * getattr(logits, "factor", 1.0)


class MemberOut(Net):
    """Returns a tensor that it made before, for which no gradient is."""

    def build(self) -> None:
        self.frozen = nn.Linear(WIDTH, CLASSES).requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.frozen(x)


@loss_case(OUT, model=MemberOut)
def frozen_teacher_inside(training: Training, x: Tensor, y: Tensor) -> Tensor:
    logits, wanted = training.called(x)
    return functional.cross_entropy(logits, y) + functional.kl_div(
        logits.log_softmax(1), wanted.softmax(1), reduction="batchmean"
    )
