"""Loops with nothing wrong in them, of every kind: the guard has nothing to say."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benches import step_of
from loops import FP16, Loop, Net, codes, finish, images, loss_of, repeated, run, sgd, train
from torch import nn
from torch.nn.utils import clip_grad_norm_

from amptune.policy.settings import LossScale, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.tuned import Tuned

STEPS = 4


def parts(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    return model.get_submodule("stem"), model.get_submodule("head")


def scaled_backward(tuned: Tuned, factor: Any = 1.0) -> list[Any]:
    """The gradients."""
    tuned.scaler.scale(loss_of(tuned) * factor).backward()
    return [parameter.grad for parameter in tuned.model.parameters()]


def plain(tuned: Tuned, model: nn.Module) -> None:
    train(tuned, tuned.optimizer(sgd(model)), steps=25)


def written_to_while_scaled(tuned: Tuned, _: Any, optimizer: Any, __: Any) -> None:
    """By an average over micro-batches, by a mask, and by asking for the norm alone."""
    for _step in range(16):
        gradients = scaled_backward(tuned)
    clip_grad_norm_(tuned.model.parameters(), float("inf"))
    for gradient in gradients:
        gradient /= 16
    parts(tuned.model)[0].zero_grad(set_to_none=False)
    finish(tuned, optimizer)


def unscaled_by_the_scale(tuned: Tuned, _: Any, optimizer: Any, __: Any) -> None:
    for gradient in scaled_backward(tuned):
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


def a_scaler_of_ones_own(tuned: Tuned, model: nn.Module) -> None:
    """Which steps by itself, or has the optimizer unscale if that is fused."""
    optimizer, scaler = tuned.optimizer(sgd(model)), torch.amp.GradScaler("cpu")
    for step in range(2 * STEPS):
        scaler.scale(loss_of(tuned)).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            optimizer.step()
        else:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


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


def an_overflow_that_is_mended(tuned: Tuned, model: nn.Module) -> None:
    optimizer = tuned.optimizer(sgd(model))
    for factor in (1.0, float("inf"), 1.0):
        for gradient in scaled_backward(tuned, factor):
            gradient.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
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

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(tuned)
        loss.backward()
        return loss.detach()

    for _ in range(STEPS):
        tuned.scaler.step(optimizer, closure)
        tuned.scaler.update()


BF16, FUSED = Policy(autocast="bf16"), Policy(autocast="fp16", fused_optimizer=True)
LOOPS: list[Loop] = [
    *(plain, several_optimizers, a_second_loss_that_needs_no_scale, under(Sharpness), under(Counting)),
    *(a_scaler_of_ones_own, a_backward_that_raised, an_overflow_that_is_mended, an_autocast_of_ones_own),
    *map(repeated, (written_to_while_scaled, unscaled_by_the_scale)),
    repeated(step_of("first second unscale clip scaler-step update zero")),
    repeated(step_of("backward scaler-step update own-gradients scaler-step update zero")),
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
