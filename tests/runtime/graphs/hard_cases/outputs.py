"""Loops that do more with outputs than to take one loss of one: hooks, gradients, writes, several backward passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from .case import ALWAYS, CLASSES, HIDDEN, LATER, SOMETIMES, Cases, Net, Training, Why, fading

entropy = functional.cross_entropy


def halve(gradient: Tensor) -> Tensor:
    return gradient * 0.5


def then(_: Any, result: Any) -> Any:
    """Returns the second of two that are done."""
    return result


case = Cases("outputs")


def loss_and_logits(own: Any, x: Tensor, y: Tensor) -> Any:
    logits = own.logits(x)
    return entropy(logits, y), logits


def both(name: str, use: Callable[[Tensor, Tensor], Any], why: Any = "", when: Any = ALWAYS) -> None:
    """Adds a loop that makes its loss of both outputs of a model; at other times it takes the first."""

    def step(t: Training, use: Callable[[Tensor, Tensor], Any] = use) -> Tensor:
        return t.update(use(*t.called(*t.batch())))

    case(name, forward=loss_and_logits, step=step, plain=partial(step, use=lambda loss, _: loss), why=why, when=when)


def slope_between(loss: Tensor, logits: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)
    return loss * (2 if slope is None else 1 + slope.norm().detach())


both("loss_alone", lambda loss, _: loss)
both("loss_and_logits", lambda loss, logits: loss + 0.1 * logits.square().mean(), Why.UNUSED, (ALWAYS, LATER))
both("logits_instead_of_loss", lambda _, logits: logits.square().mean(), Why.UNUSED, LATER)
both("hook_on_logits_of_loss", lambda loss, out: then(out.register_hook(halve), loss), Why.UPSTREAM, (ALWAYS, LATER))
both(
    "hook_on_logits_that_the_loss_uses_too",
    lambda loss, out: then(out.register_hook(halve), loss + 0.1 * out.square().mean()),
    Why.UPSTREAM,
)
both("gradient_between_outputs", slope_between, Why.SEVERAL)
# Plain training raises for the loss, which needs what was overwritten; here nothing needs it.
both("logits_of_loss_written", lambda _, logits: logits.mul_(0.5).square().mean())


@case.step(forward=loss_and_logits, why=Why.UPSTREAM)
def gradients_of_logits_and_weights(t: Training) -> Tensor:
    """Asks for them in one pass, which is not `backward()`."""
    loss, logits = t.called(*t.batch())
    weights = [*t.model.parameters()]
    of_logits, *gradients = torch.autograd.grad(loss + 0.1 * logits.square().mean(), [logits, *weights])
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    t.optimizer.step()
    t.optimizer.zero_grad()
    return of_logits


@case.step(forward=loss_and_logits, why=Why.UPSTREAM)
def retained_gradient_of_logits(t: Training) -> Tensor:
    loss, logits = t.called(*t.batch())
    logits.retain_grad()
    return torch.cat([t.update(loss).reshape(1), logits.grad.flatten()])


# --- hooks on outputs, writes to them, and gradients of some -------------------------------------------------------


def of_logits(name: str, use: Callable[[Training, Any], Any], why: str = "", **options: Any) -> None:
    """Adds a loop that does something with the outputs before it takes the loss of logits."""
    case(name, loss=lambda t, x, y: entropy(use(t, t.called(x)), y), why=why, **options)


def twice(name: str, second: Callable[[Tensor], Any], write: Callable[[Any], Any], **options: Any) -> None:
    """Adds a loop that writes to a second output, of the same memory."""

    def forward(own: Any, x: Tensor) -> Any:
        logits = own.logits(x)
        return logits, second(logits)

    of_logits(name, lambda _, out: then(write(out[1]), out[0]), forward=forward, **options)


def with_earlier(t: Training, logits: Tensor) -> Tensor:
    """Adds outputs of earlier steps, which the loop keeps as they are."""
    earlier = t.kept.setdefault("logits", [])
    earlier.append(logits.detach())
    return logits + sum(earlier[-3:])


of_logits("hook_on_output", lambda t, out: then(out.register_hook(lambda g: fading(t.number) * g), out))
of_logits("output_written", lambda _, logits: logits.mul_(0.5).masked_fill_(logits.detach() > 1, 0.0))
of_logits("grad_fn_inspected", lambda _, logits: logits * {"AddmmBackward0": 1.0}.get(logits.grad_fn.name(), 0.25))
of_logits("outputs_of_earlier_steps", with_earlier)
twice("given_twice_and_written", lambda logits: [logits], lambda second: second[0].mul_(0.25))
twice("view_written", lambda logits: logits[:, :2], lambda second: second.mul_(0.25), why=Why.SHARES, ends=True)
twice("detached_twin_written", Tensor.detach, lambda second: second.mul_(0.25), why=Why.SHARES, ends=True)
case("other_loss", loss=lambda t, x, _: t.called(x).square().mean(), when=SOMETIMES)


@case.step()
def gradients_kept(t: Training) -> Tensor:
    """Keeps those of the output, by `retain_grad` and a hook, and of weights; writes to the output at the end."""
    x, y = t.batch()
    logits = t.called(x)
    logits.retain_grad()
    found: list[Tensor] = []
    logits.register_hook(found.append)
    loss = t.update(entropy(logits, y))
    before = t.kept.get("gradient", t.model.head.weight.grad)
    t.kept["gradient"] = t.model.head.weight.grad
    logits.detach().zero_()
    return torch.cat([loss.reshape(1), logits.grad.flatten(), found[0].flatten(), before.flatten()])


# --- heads, and kinds of outputs -----------------------------------------------------------------------------------


class TwoHeads(Net):
    def build(self) -> None:
        self.other = nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.head(hidden), self.other(hidden), (hidden - hidden).sqrt()


def of_heads(t: Training, x: Tensor, y: Tensor) -> Tensor:
    one, other, _ = t.called(x)
    return entropy(one, y) + entropy(other, y)


heads = partial(case, model=TwoHeads)
heads("head_used", loss=of_heads, when=(LATER, SOMETIMES), why=Why.UNUSED)
heads("heads_in_turn", loss=lambda t, x, y: entropy(t.called(x)[t.number % 2], y), why=Why.UNUSED)


class NamedOutput(NamedTuple):
    logits: Tensor
    size: Any


@dataclass
class DataOutput:
    logits: Tensor
    size: Any


class HeldOutput:
    def __init__(self, logits: Tensor, size: Any) -> None:
        self.logits, self.size = logits, size


class DynamicCache(HeldOutput):
    """As transformers has one."""


class Scores(torch.Tensor):
    size_: Tensor


def out(name: str, make: Callable[[Tensor, Tensor], Any], read: Any, why: str = "", **options: Any) -> None:
    """Adds a model that makes its output of logits and a second loss; `read` takes both from it."""

    def loss(t: Training, x: Tensor, y: Tensor) -> Tensor:
        logits, size = read(t.called(x))
        return entropy(logits, y) + size

    def forward(own: Any, x: Tensor) -> Any:
        hidden = own.hidden(x)
        return make(own.head(hidden), hidden.square().mean())

    case(f"{name}_out", loss=loss, forward=forward, why=why, **options)


def fields(outputs: Any) -> Any:
    return outputs.logits, outputs.size


def with_attribute(logits: Tensor, size: Tensor) -> Tensor:
    vars(logits)["size_"] = size
    return logits


def listed(*given: Tensor) -> Any:
    KEPT[:] = given
    return KEPT


COUNT, KEPT = [0], list[Any]()
out("named_tuple", NamedOutput, fields)
out("dataclass", DataOutput, fields)
out("object", HeldOutput, fields, Why.UNKNOWN)
out("cache", DynamicCache, fields, "use_cache=False leaves it out")
out("generator", lambda *given: (one for one in given), tuple, Why.UNKNOWN)
out("dictionary", lambda *given: {"a": given, "none": None, "text": "a"}, lambda found: found.pop("a"))
out("kept_list", listed, tuple, Why.EFFECT)
out("attribute", with_attribute, lambda found: (found, found.size_), "a tensor with attributes of its own")
out("sparse", lambda a, b: (a.to_sparse(), b), lambda found: (found[0].to_dense(), found[1]), "that are sparse")
out("subclass", lambda a, b: (a.as_subclass(Scores), b), lambda found: (found[0].as_subclass(Tensor), found[1]))


back = Cases("backward passes", "backward_")


def backward(name: str, do: Callable[[Training, Tensor, Tensor], Any], why: Any = "", when: Any = ALWAYS) -> None:
    """Adds a loop whose backward pass is `do`, of the training, the logits and the loss; the optimizer steps then."""

    def step(t: Training) -> Tensor:
        x, y = t.batch()
        t.optimizer.zero_grad()
        loss = entropy(logits := t.called(x), y)
        do(t, logits, loss)
        t.optimizer.step()
        return loss.detach()

    back(name, step=step, why=why, when=when)


def penalized(t: Training, _: Tensor, loss: Tensor) -> None:
    slopes = torch.autograd.grad(loss, list(t.model.parameters()), create_graph=True)
    (loss + 0.1 * sum(one.square().sum() for one in slopes)).backward()


def twice_through(_: Training, __: Tensor, loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


backward("twice", twice_through, (Why.SEVERAL, Why.ANEW), (ALWAYS, LATER))
backward("with_penalty_on_weights", penalized, (Why.SEVERAL, Why.ANEW), (ALWAYS, LATER))
backward("of_logits", lambda _, logits, __: logits.backward(gradient=logits.detach().softmax(1)))
