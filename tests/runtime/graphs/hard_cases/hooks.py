"""Hooks on modules, weights and saved tensors, and modes of PyTorch that see each operation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .case import EVENT_AT, LATER, Cases, Training, Why, fading

case = Cases("hooks")
REMOVED_AT = 12


def halve(*given: Any) -> Any:
    """Halves the last that a hook is given: outputs, inputs, or gradients."""
    last = given[-1]
    return tuple(one if one is None else one * 0.5 for one in last) if isinstance(last, tuple) else last * 0.5


def halve_gradients(_: nn.Module, gradients: Any, __: Any = None) -> Any:
    return None if any(one is None for one in gradients) else halve(gradients)


def halve_linear(module: nn.Module, _: Any, output: Any) -> Any:
    return output * 0.5 if isinstance(module, nn.Linear) else output


def fader() -> Callable[..., Tensor]:
    """Returns a hook that does something else with each call."""
    calls: list[int] = []

    def fade(*given: Any) -> Tensor:
        calls.append(1)
        faded: Tensor = given[-1] * fading(len(calls))
        return faded

    return fade


# --- there from the beginning, of the model's own package or on weights, and coming and going -------------------------

HOOKS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda model: model.body.register_forward_hook(halve),
    "forward_pre": lambda model: model.body.register_forward_pre_hook(halve),
    "backward": lambda model: model.head.register_full_backward_hook(halve_gradients),
    "weight": lambda model: model.body.weight.register_hook(halve),
    "global_forward": lambda _: torch_module.register_module_forward_hook(halve_linear),
    "global_backward": lambda _: torch_module.register_module_full_backward_hook(halve_gradients),
}


def comes_and_goes(register: Callable[[Any], Any]) -> Callable[[Training], None]:
    def event(t: Training) -> None:
        if t.number < REMOVED_AT:
            t.kept["handle"] = register(t.model)
        else:
            t.kept.pop("handle").remove()

    return event


for name, register in HOOKS.items():
    is_global = name.startswith("global")
    if not is_global:
        case(f"{name}_hook", build=register, why=Why.HOOK if name == "weight" else "")
    case(
        f"{name}_hook_comes_and_goes",
        event=comes_and_goes(register),
        at=(EVENT_AT, REMOVED_AT),
        why=Why.DIFFERS if is_global else "",
    )
case("counting_hook", build=lambda own: own.body.register_forward_hook(fader()), why=Why.EFFECT)
case("hook_on_what_is_called", event=lambda t: t.called.register_forward_hook(halve))


case(
    "hook_on_hidden",
    build=lambda own: setattr(own, "fader", fader()),
    forward=lambda own, x: own.head(hooked(own.hidden(x), own.fader)),
    why=Why.EFFECT,
)


def hooked(hidden: Tensor, hook: Any) -> Tensor:
    hidden.register_hook(hook)
    return hidden


def captured_features(t: Training, x: Tensor, y: Tensor) -> Tensor:
    found = t.once("found", dict)
    t.once("handle", lambda: t.model.body.register_forward_hook(lambda _, __, output: found.update(body=output)))
    loss = nn.functional.cross_entropy(t.called(x), y)
    return loss + found["body"].square().mean()


case("captured_features_in_loss", loss=captured_features, why=Why.EFFECT)


# --- hooks of autograd ---------------------------------------------------------------------------------------------


@case.step()
def optimizer_in_hooks(t: Training) -> Tensor:
    """Updates each weight as soon as its gradient is there."""

    def update_one(weight: Any) -> None:
        weight.data.sub_(weight.grad, alpha=0.05)
        weight.grad = None

    t.once("all", lambda: [one.register_post_accumulate_grad_hook(update_one) for one in t.model.parameters()])
    loss = t.loss()
    loss.backward()
    return loss.detach()


# --- modes, and hooks on saved tensors, around steps or inside -------------------------------------------------------


class HalvesAbove(TorchFunctionMode):
    def __torch_function__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.tanh else result


class HalvesBeneath(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 0.5 if func is torch.ops.aten.tanh.default else result


def within(t: Training, *, mode: Callable[[], AbstractContextManager[Any]]) -> Tensor:
    with mode():
        return t.plain()


case("function_mode", step=partial(within, mode=HalvesAbove), when=LATER, why=Why.DIFFERS)
case("dispatch_mode", step=partial(within, mode=HalvesBeneath), when=LATER)
