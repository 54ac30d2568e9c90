"""Loops with nothing wrong in them, of every kind: the guard has nothing to say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import FP16, Loop, Net, codes, finish, images, loss_of, repeated, run, sgd, train
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.checkpoint import checkpoint

from amptune.policy.settings import LossScale, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.tuned import Tuned

STEPS = 4


def parts(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model.get_submodule("stem"), model.get_submodule("head")


def scaled_backward(tuned: Tuned) -> None:
    tuned.scaler.scale(loss_of(tuned)).backward()


def plain(tuned: Tuned, model: nn.Module) -> None:
    train(tuned, tuned.optimizer(sgd(model)), steps=25)


@repeated
def written_to_while_scaled(tuned: Tuned, optimizer: Any) -> None:
    """By an average over micro-batches, by a mask, and by asking for the norm alone."""
    for _ in range(16):
        scaled_backward(tuned)
    clip_grad_norm_(tuned.model.parameters(), float("inf"))
    gradients: list[Any] = [parameter.grad for parameter in tuned.model.parameters()]
    for gradient in gradients:
        gradient /= 16
    parts(tuned.model)[0].zero_grad(set_to_none=False)
    finish(tuned, optimizer)


@repeated
def clipping_after_unscale(tuned: Tuned, optimizer: Any) -> None:
    scaled_backward(tuned)
    tuned.scaler.unscale_(optimizer)
    clip_grad_norm_(tuned.model.parameters(), 1e-6)
    clip_grad_value_(tuned.model.parameters(), 1e-9)
    finish(tuned, optimizer)


@repeated
def unscaled_by_the_scale(tuned: Tuned, optimizer: Any) -> None:
    scaled_backward(tuned)
    gradients: list[Any] = [parameter.grad for parameter in tuned.model.parameters()]
    for gradient in gradients:
        gradient /= tuned.scaler.get_scale()
    clip_grad_norm_(tuned.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def several_optimizers(tuned: Tuned, model: nn.Module) -> None:
    optimizers = [tuned.optimizer(sgd(part)) for part in parts(model)]
    for _ in range(STEPS):
        scaled_backward(tuned)
        parts(model)[1].zero_grad(set_to_none=False)
        tuned.scaler.unscale_(optimizers[0])
        clip_grad_norm_(parts(model)[0].parameters(), 1e-6)
        finish(tuned, *optimizers)


def a_second_loss_that_needs_no_scale(tuned: Tuned, model: nn.Module) -> None:
    """In FP32, for a part of the model with an optimizer of its own; it comes first, after an evaluation."""
    scaled, own = (tuned.optimizer(sgd(part)) for part in parts(model))
    own = Counting(own)
    for _ in range(STEPS):
        loss_of(tuned)
        parts(model)[1](torch.randn(4, 8)).square().mean().backward()
        own.step()
        scaled_backward(tuned)
        own.zero_grad()
        finish(tuned, scaled)


def another_model_beside(tuned: Tuned, model: nn.Module) -> None:
    """A GAN whose other half has no policy: backward twice, optimizers of its own, clipped and stepped as it likes."""
    critic = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    ours, theirs = tuned.optimizer(sgd(model)), sgd(critic)
    for _ in range(STEPS):
        with tuned.autocast():
            fake = tuned.model(tuned.batch(images()))
        critic(fake.detach().float()).mean().backward()
        critic(torch.randn(4, 2)).mean().backward()
        clip_grad_norm_(critic.parameters(), 1e-6)
        theirs.step()
        tuned.scaler.scale(critic(fake.float()).mean()).backward()
        finish(tuned, ours)
        theirs.zero_grad()


@repeated
def gradient_penalty(tuned: Tuned, optimizer: Any) -> None:
    """As PyTorch's AMP examples have it: the penalty's norm inside autocast, every backward outside."""
    loss = loss_of(tuned)
    scaled = torch.autograd.grad(tuned.scaler.scale(loss), list(tuned.model.parameters()), create_graph=True)
    with tuned.autocast():
        inverse = 1.0 / tuned.scaler.get_scale()
        penalty = torch.stack([(gradient * inverse).square().sum() for gradient in scaled]).sum().sqrt()
        inner = torch.autograd.grad(loss, list(tuned.model.parameters()), create_graph=True)
        loss = loss + penalty + 0 * inner[0].sum()
    tuned.scaler.scale(loss).backward()
    finish(tuned, optimizer)


def checkpointing(use_reentrant: bool) -> Loop:
    def activation_checkpointing(tuned: Tuned, model: nn.Module) -> None:
        optimizer, (stem, head) = tuned.optimizer(sgd(model)), parts(model)
        for _ in range(STEPS):
            with tuned.autocast():
                hidden = checkpoint(stem, images().requires_grad_(), use_reentrant=use_reentrant)
                loss = head(hidden.mean((2, 3))).float().square().mean()
            tuned.scaler.scale(loss).backward()
            finish(tuned, optimizer)

    return activation_checkpointing


class Sharpness(torch.optim.Optimizer):
    """An optimizer that steps through another one of the same parameters, as SAM and Lookahead do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class Counting(torch.optim.SGD):
    """A subclass whose step goes on to that of its class, as many have one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, lr=1e-3)

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Anything:
    """Whatever a scaler that is off can step."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.step, self.zero_grad = inner.step, inner.zero_grad


def under(wrapper: Any) -> Loop:
    return lambda tuned, model: train(tuned, wrapper(tuned.optimizer(sgd(model))), steps=STEPS)


class OwnScaler(torch.amp.GradScaler):
    """A scaler that steps by itself, as Composer's does."""

    def step(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> Any:
        self.unscale_(optimizer)
        return optimizer.step()


def with_scaler(kind: type[torch.amp.GradScaler]) -> Loop:
    def a_scaler_of_ones_own(tuned: Tuned, model: nn.Module) -> None:
        optimizer, scaler = tuned.optimizer(sgd(model)), kind("cpu")
        for _ in range(STEPS):
            scaler.scale(loss_of(tuned)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    return a_scaler_of_ones_own


def gradients_set_by_hand(tuned: Tuned, model: nn.Module) -> None:
    optimizer = tuned.optimizer(sgd(model))
    for step in range(2 * STEPS):
        if step % 2:
            train(tuned, optimizer)
        gradients = torch.autograd.grad(tuned.scaler.scale(loss_of(tuned)), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        tuned.scaler.step(optimizer)
        tuned.scaler.update()


def a_backward_that_raised(tuned: Tuned, model: nn.Module) -> None:
    optimizer, bias, loss = tuned.optimizer(sgd(model)), model.get_parameter("head.bias"), loss_of(tuned)
    loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tuned.scaler.scale(loss).backward()
    optimizer.zero_grad()
    scaled = tuned.scaler.scale(loss_of(tuned))
    bias.sum().backward()  # type: ignore[no-untyped-call]
    tuned.optimizer(torch.optim.SGD([bias], lr=1e-3)).step()
    scaled.backward()
    finish(tuned, optimizer)


def an_optimizer_in_each_backward(tuned: Tuned, model: nn.Module) -> None:
    """Each parameter is stepped as soon as its gradient is there, which saves the gradients' memory."""
    optimizers = {p: tuned.optimizer(torch.optim.SGD([p], lr=1e-3)) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizer = optimizers[parameter]  # type: ignore[index]
        tuned.scaler.unscale_(optimizer)
        optimizer.step()
        parameter.grad = None

    hooks: list[Any] = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]  # type: ignore[no-untyped-call]
    for _ in range(25):
        scaled_backward(tuned)
        if tuned.scaler.is_enabled():
            tuned.scaler.update()
    for hook in hooks:
        hook.remove()


def an_overflow_that_is_mended(tuned: Tuned, model: nn.Module) -> None:
    optimizer, bias = tuned.optimizer(sgd(model)), model.get_parameter("head.bias")
    for factor in (1.0, float("inf"), 1.0):
        tuned.scaler.scale(loss_of(tuned) + factor * bias.sum()).backward()
        gradients: list[Any] = [parameter.grad for parameter in model.parameters()]
        for gradient in gradients:
            gradient.nan_to_num_(posinf=0.0, neginf=0.0)
        finish(tuned, optimizer)


def an_autocast_of_ones_own(tuned: Tuned, model: nn.Module) -> None:
    """As frameworks have it."""
    optimizer, dtype = tuned.optimizer(sgd(model)), {"fp16": torch.float16}.get(tuned.policy.autocast, torch.bfloat16)
    for _ in range(STEPS):
        with torch.autocast("cpu", dtype, enabled=tuned.policy.autocast != "off"):
            loss = tuned.model(images()).float().square().mean()
        tuned.scaler.scale(loss).backward()
        finish(tuned, optimizer)


def lbfgs(tuned: Tuned, model: nn.Module) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(tuned)
        loss.backward()
        return loss.detach()  # type: ignore[no-any-return]

    for _ in range(STEPS):
        tuned.scaler.step(optimizer, closure)
        tuned.scaler.update()


BF16, FUSED = Policy(autocast="bf16"), Policy(autocast="fp16", fused_optimizer=True)
LOOPS: list[Loop] = [
    *(plain, written_to_while_scaled, clipping_after_unscale),
    *(unscaled_by_the_scale, several_optimizers),
    *(a_second_loss_that_needs_no_scale, another_model_beside, gradient_penalty),
    *(checkpointing(use_reentrant=True), checkpointing(use_reentrant=False)),
    *(under(Sharpness), under(Counting), with_scaler(torch.amp.GradScaler), with_scaler(OwnScaler)),
    *(gradients_set_by_hand, a_backward_that_raised),
    *(an_optimizer_in_each_backward, an_overflow_that_is_mended, an_autocast_of_ones_own),
]
CASES = [(loop, policy) for loop in LOOPS for policy in (FP16, BF16, Policy(), FUSED)]
CASES += [(loop, policy) for loop in (lbfgs, under(Anything)) for policy in (BF16, Policy())]
CASES += [
    (plain, Policy(autocast="fp16", loss_scale=LossScale(init=1, static=True))),
    (lambda tuned, model: train(tuned, sgd(model), 20), Policy(autocast="fp16", loss_scale=LossScale(init=2.0**40))),
]


@pytest.mark.parametrize(("loop", "policy"), CASES, ids=lambda one: getattr(one, "__name__", None) or str(one))
def test_a_correct_loop_raises_no_alarm(loop: Loop, policy: Policy) -> None:
    tuned, said = run(loop, policy)
    assert (codes(tuned), said) == ([], [])


def test_several_policies_at_once_watch_their_own_models() -> None:
    with apply(FP16, Net()) as one, apply(BF16, Net()) as two, apply(Policy(), Net()) as three:
        optimizers = [sgd(tuned.model) for tuned in (one, two, three)]
        for _ in range(STEPS):
            for tuned, optimizer in zip((one, two, three), optimizers, strict=True):
                train(tuned, optimizer)
        assert [codes(tuned) for tuned in (one, two, three)] == [[], [], []]


def test_an_optimizer_that_steps_through_another_is_passed_for_both() -> None:
    with apply(Policy(fused_optimizer=True), Net()) as tuned:
        train(tuned, tuned.optimizer(Sharpness(sgd(tuned.model))), STEPS)
        assert codes(tuned) == ["optimizer-not-fused"]


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("policy", [Policy(compile="default"), Policy(cuda_graphs=True), Policy(cuda_graphs="step")])
def test_what_the_policy_compiles_may_be_called_by_another_or_in_a_recorded_step(policy: Policy) -> None:
    """DistributedDataParallel calls it as a Sequential does."""
    with apply(policy, Net()) as tuned, torch.compiler.set_stance("force_eager"):
        around = None if policy.cuda_graphs == "step" else nn.Sequential(tuned.model)
        step = tuned.training_step(lambda model, x: model(x).square().mean(), sgd(tuned.model), model=around)
        for _ in range(STEPS):
            step(images())
        assert "model-not-called" not in codes(tuned)
