"""Cases with hooks on modules, weights and saved tensors, and with modes of PyTorch that see each operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu, saved_tensors_hooks
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from graph_models.case import (
    EVENT_AT,
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
    update,
)

HOOKS = "hooks"
REMOVED_AT = 24


def _halved(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    return output * 0.5


def _halved_input(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(one * 0.5 for one in args)


def _halved_gradient(_: nn.Module, gradients: Any, __: Any) -> Any:
    return tuple(None if one is None else one * 0.5 for one in gradients)


# --- hooks that are there from the beginning -----------------------------------------------------------------------


@model_case(HOOKS)
class ForwardHook(Net):
    def build(self) -> None:
        self.body.register_forward_hook(_halved)


add(HOOKS, "forward_pre_hook", build=lambda net: net.body.register_forward_pre_hook(_halved_input))


@model_case(HOOKS)
class BackwardHook(Net):
    def build(self) -> None:
        self.body.register_full_backward_hook(_halved_gradient)
        self.head.register_full_backward_hook(_halved_gradient)


@model_case(HOOKS)
class BackwardPreHook(Net):
    def build(self) -> None:
        self.head.register_full_backward_pre_hook(lambda _, gradients: _halved_gradient(self, gradients, None))


add(HOOKS, "hook_on_weight", build=lambda net: net.body.weight.register_hook(lambda gradient: gradient * 0.5))


def _fading_more() -> Callable[..., Tensor]:
    calls: list[int] = []

    def fade(*given: Any) -> Tensor:
        calls.append(1)
        faded: Tensor = given[-1] * fading(len(calls))
        return faded

    return fade


# Its hook does something else with each call.
add(HOOKS, "counting_hook", build=lambda net: net.body.register_forward_hook(_fading_more()))
add(HOOKS, "counting_hook_on_weight", build=lambda net: net.body.weight.register_hook(_fading_more()))


@model_case(HOOKS)
class HookOnHidden(Net):
    """A hook on a tensor inside, which changes its gradient from the host."""

    def build(self) -> None:
        self.calls = [0]

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        hidden.register_hook(self.faded)
        return self.head(hidden)

    def faded(self, gradient: Tensor) -> Tensor:
        self.calls[0] += 1
        return gradient * fading(self.calls[0])


# --- hooks that only capture ---------------------------------------------------------------------------------------


def _capturing(training: Training, *, detached: bool) -> dict[str, Tensor]:
    def register() -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}

        def capture(_: nn.Module, __: Any, output: Tensor) -> None:
            found["body"] = output.detach() if detached else output

        training.model.body.register_forward_hook(capture)
        return found

    found: dict[str, Tensor] = training.once("found", register)
    return found


@loss_case(HOOKS)
def captured_features_in_loss(training: Training, x: Tensor, y: Tensor) -> Tensor:
    found = _capturing(training, detached=False)
    loss = loss_of(training.called(x), y)
    return loss + found["body"].square().mean()


@step_case(HOOKS)
def captured_statistics(training: Training) -> Tensor:
    found = _capturing(training, detached=True)
    loss = plain_step(training)
    return torch.stack([loss, found["body"].mean()])


@step_case(HOOKS)
def captured_later(training: Training) -> Tensor:
    found = {} if training.number < EVENT_AT else _capturing(training, detached=True)
    loss = plain_step(training)
    return torch.stack([loss, found["body"].mean() if "body" in found else torch.zeros_like(loss)])


@step_case(HOOKS)
def captured_gradients(training: Training) -> Tensor:
    def register() -> list[Tensor]:
        found: list[Tensor] = []
        training.model.body.register_full_backward_hook(lambda _, __, gradients: found.append(gradients[0]))
        return found

    found = training.once("found", register)
    found.clear()
    loss = plain_step(training)
    return torch.stack([loss, found[0].mean()])


# --- hooks that come and go ----------------------------------------------------------------------------------------


def _or_removed(training: Training, register: Any) -> None:
    """Registers at the first event, removes at the second."""
    if training.number < REMOVED_AT:
        training.kept["handle"] = register()
    else:
        training.kept.pop("handle").remove()


@event_case(HOOKS, at=(EVENT_AT, REMOVED_AT))
def forward_hook_comes_and_goes(training: Training) -> None:
    _or_removed(training, lambda: training.model.body.register_forward_hook(_halved))


@event_case(HOOKS, at=(EVENT_AT, REMOVED_AT))
def hook_on_weight_comes_and_goes(training: Training) -> None:
    _or_removed(training, lambda: training.model.body.weight.register_hook(lambda gradient: gradient * 0.5))


@event_case(HOOKS, at=(EVENT_AT, REMOVED_AT))
def backward_hook_comes_and_goes(training: Training) -> None:
    _or_removed(training, lambda: training.model.head.register_full_backward_hook(_halved_gradient))


def _halved_by_body(module: nn.Module, _: Any, output: Any) -> Any:
    return output * 0.5 if isinstance(module, nn.Linear) else output


@event_case(HOOKS, at=(EVENT_AT, REMOVED_AT))
def global_hook_comes_and_goes(training: Training) -> None:
    _or_removed(training, lambda: torch_module.register_module_forward_hook(_halved_by_body))


@event_case(HOOKS, at=(EVENT_AT, REMOVED_AT))
def global_backward_hook_comes_and_goes(training: Training) -> None:
    def halved_if_any(module: nn.Module, gradients: Any, others: Any) -> Any:
        return None if any(one is None for one in gradients) else _halved_gradient(module, gradients, others)

    _or_removed(training, lambda: torch_module.register_module_full_backward_hook(halved_if_any))


add(HOOKS, "first_hook_removed", model=ForwardHook, event=lambda t: t.model.body._forward_hooks.clear())
# Registered on the wrapper, not on the model.
add(HOOKS, "hook_on_what_is_called", event=lambda t: t.called.register_forward_hook(_halved))


@event_case(HOOKS)
def hook_with_keywords_on_model(training: Training) -> None:
    def halved(_: nn.Module, __: Any, ___: Any, output: Tensor) -> Tensor:
        return output * 0.5

    training.model.register_forward_hook(halved, with_kwargs=True, always_call=True)


# --- hooks of autograd ---------------------------------------------------------------------------------------------


@step_case(HOOKS)
def optimizer_in_hooks(training: Training) -> Tensor:
    """Updates each weight as soon as its gradient is there."""

    def register() -> bool:
        for weight in training.model.parameters():
            optimizer = torch.optim.SGD([weight], lr=0.05, momentum=0.9)

            def update_one(weight: Tensor, optimizer: torch.optim.SGD = optimizer) -> None:
                optimizer.step()
                weight.grad = None

            weight.register_post_accumulate_grad_hook(update_one)
        return True

    training.once("registered", register)
    x, y = training.batch()
    loss = loss_of(training.called(x), y)
    loss.backward()
    return loss.detach()


@event_case(HOOKS)
def post_accumulate_hook_later(training: Training) -> None:
    def clamp(weight: Tensor) -> None:
        assert weight.grad is not None  # noqa: S101
        weight.grad.clamp_(-0.01, 0.01)

    training.model.body.weight.register_post_accumulate_grad_hook(clamp)


@event_case(HOOKS)
def hook_on_accumulation(training: Training) -> None:
    """A hook on the node that accumulates gradients, as DDP has them."""
    node = training.model.body.weight.view_as(training.model.body.weight).grad_fn.next_functions[0][0]
    training.kept["node"] = node
    node.register_prehook(lambda gradients: (gradients[0] * 0.5,))


@step_case(HOOKS)
def multi_gradient_hook(training: Training) -> Tensor:
    found: list[Tensor] = []
    handle = register_multi_grad_hook(
        list(training.model.parameters()), lambda gradients: found.append(torch.stack([g.norm() for g in gradients]))
    )
    loss = plain_step(training)
    handle.remove()
    return torch.cat([loss.reshape(1), found[0]])


@step_case(HOOKS)
def saved_tensors_packed_later(training: Training) -> Tensor:
    if training.number < EVENT_AT:
        return plain_step(training)
    with saved_tensors_hooks(lambda one: one.half() if one.is_floating_point() else one, lambda one: _wide(one)):
        return plain_step(training)


def _wide(one: Tensor) -> Tensor:
    return one.float() if one.is_floating_point() else one


@model_case(HOOKS)
class SavesOnHost(Net):
    """Keeps what its backward pass needs on the CPU."""

    def forward(self, x: Tensor) -> Any:
        with save_on_cpu(pin_memory=x.is_cuda):
            hidden = self.hidden(x)
        return self.head(hidden)


@model_case(HOOKS)
class PacksInside(Net):
    def build(self) -> None:
        self.packed: list[int] = []

    def forward(self, x: Tensor) -> Any:
        with saved_tensors_hooks(self.pack, lambda one: one):
            hidden = torch.sin(self.body(x))
        return self.head(hidden)

    def pack(self, one: Tensor) -> Tensor:
        self.packed.append(1)
        return one * 0.99


# --- modes ---------------------------------------------------------------------------------------------------------


class _Halving(TorchFunctionMode):
    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.tanh else result


@step_case(HOOKS)
def function_mode_later(training: Training) -> Tensor:
    if training.number < EVENT_AT:
        return plain_step(training)
    with _Halving():
        return plain_step(training)


class _HalvingBeneath(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.ops.aten.tanh.default else result


@step_case(HOOKS)
def dispatch_mode_later(training: Training) -> Tensor:
    if training.number < EVENT_AT:
        return plain_step(training)
    with _HalvingBeneath():
        return plain_step(training)


@step_case(HOOKS)
def operations_counted(training: Training) -> Tensor:
    if training.number % 8 != 7:
        return plain_step(training)
    with FlopCounterMode(display=False) as counter:
        loss = plain_step(training)
    return torch.stack([loss, torch.full_like(loss, counter.get_total_flops())])


@step_case(HOOKS)
def hook_in_loop_raises_once(training: Training) -> Tensor:
    """A backward pass that a hook ends half way; the loop goes on with the next batch."""
    x, y = training.batch()
    logits = training.called(x)
    if training.number == EVENT_AT:

        def refuse(_: Tensor) -> None:
            raise ValueError("refused")

        logits.register_hook(refuse)
    try:
        return update(training, loss_of(logits, y))
    except ValueError:
        return torch.full((), -1.0)


@step_case(HOOKS)
def weight_hook_raises_once(training: Training) -> Tensor:
    """A hook ends the backward pass when some weights have their gradients."""

    def refuse(_: Tensor) -> None:
        raise ValueError("refused")

    handle = training.model.body.weight.register_hook(refuse) if training.number == EVENT_AT else None
    try:
        return plain_step(training)
    except ValueError:
        return torch.full((), -1.0)
    finally:
        if handle is not None:
            handle.remove()
