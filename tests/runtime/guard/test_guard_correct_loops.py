"""Loops with nothing wrong in them, of every kind: the guard has nothing to say."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from loops import FP16, Loop, Net, codes, images, loss_of, run, sgd, train
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.checkpoint import checkpoint

from amptune.policy.settings import LossScale, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.tuned import Tuned

STEPS = 4
EVERYTHING = Policy(
    autocast="fp16", memory_format="channels_last", cudnn_benchmark=True, batch_size=4, fused_optimizer=True
)


def accumulation(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for i in range(3 * STEPS):
        tuned.scaler.scale(loss_of(tuned) / 3).backward()
        if i % 3 == 2:
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            optimizer.zero_grad()


def clipping_after_unscale(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(STEPS):
        tuned.scaler.scale(loss_of(tuned)).backward()
        tuned.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        nn.utils.clip_grad_value_(model.parameters(), 1.0)
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad(set_to_none=False)


def looking_at_the_norm_before_unscale(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    tuned.scaler.scale(loss_of(tuned)).backward()
    nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    tuned.scaler.step(optimizer)
    tuned.scaler.update()


def several_optimizers(tuned: Tuned, model: nn.Module) -> None:
    stem, head = model.get_submodule("stem"), model.get_submodule("head")
    optimizers = [torch.optim.SGD(stem.parameters(), lr=1e-3), torch.optim.Adam(head.parameters(), lr=1e-3)]
    for _ in range(STEPS):
        losses = [loss_of(tuned), loss_of(tuned)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        tuned.scaler.scale(losses[0]).backward(retain_graph=True)
        tuned.scaler.scale(losses[1]).backward()
        tuned.scaler.unscale_(optimizers[0])
        nn.utils.clip_grad_norm_(stem.parameters(), 1.0)
        for optimizer in optimizers:
            tuned.scaler.step(optimizer)
        tuned.scaler.update()


def a_second_loss_that_needs_no_scale(tuned: Tuned, model: nn.Module) -> None:
    """In FP32, for a part of the model with an optimizer of its own; it comes first."""
    stem, head = model.get_submodule("stem"), model.get_submodule("head")
    plain, scaled = torch.optim.SGD(head.parameters(), lr=1e-3), torch.optim.SGD(stem.parameters(), lr=1e-3)
    for _ in range(STEPS):
        head(torch.randn(4, 8)).square().mean().backward()
        plain.step()
        plain.zero_grad()
        tuned.scaler.scale(loss_of(tuned)).backward()
        plain.zero_grad()
        tuned.scaler.step(scaled)
        tuned.scaler.update()
        scaled.zero_grad()


def unscaled_by_hand(tuned: Tuned, model: nn.Module) -> None:
    optimizer, own = sgd(model.get_submodule("stem")), sgd(model.get_submodule("head"))
    for _ in range(STEPS):
        tuned.scaler.scale(loss_of(tuned)).backward()
        tuned.scaler.unscale_(own)
        own.step()
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad()
        own.zero_grad()


def another_model_beside(tuned: Tuned, model: nn.Module) -> None:
    """A GAN whose other half has no policy: backward twice, optimizers of its own, clipped and stepped as it likes."""
    critic = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    ours, theirs = sgd(model), sgd(critic)
    for _ in range(STEPS):
        with tuned.autocast():
            fake = tuned.model(tuned.batch(images()))
        critic(fake.detach().float()).mean().backward()
        critic(torch.randn(4, 2)).mean().backward()
        nn.utils.clip_grad_norm_(critic.parameters(), 1.0)
        theirs.step()
        tuned.scaler.scale(critic(fake.float()).mean()).backward()
        tuned.scaler.step(ours)
        tuned.scaler.update()
        ours.zero_grad()
        theirs.zero_grad()


def gradient_penalty(tuned: Tuned, model: nn.Module) -> None:
    """As PyTorch's AMP examples have it: the penalty's norm inside autocast, every backward outside."""
    optimizer = sgd(model)
    for _ in range(STEPS):
        loss = loss_of(tuned)
        scaled = torch.autograd.grad(tuned.scaler.scale(loss), list(model.parameters()), create_graph=True)
        with tuned.autocast():
            inverse = 1.0 / tuned.scaler.get_scale()
            penalty = torch.stack([(gradient * inverse).square().sum() for gradient in scaled]).sum().sqrt()
            inner = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
            loss = loss + penalty + 0 * inner[0].sum()
        tuned.scaler.scale(loss).backward()
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad()


def checkpointing(use_reentrant: bool) -> Loop:
    def activation_checkpointing(tuned: Tuned, model: nn.Module) -> None:
        optimizer = sgd(model)
        for _ in range(STEPS):
            with tuned.autocast():
                hidden = checkpoint(model.get_submodule("stem"), images().requires_grad_(), use_reentrant=use_reentrant)
                loss = model.get_submodule("head")(hidden.mean((2, 3))).float().square().mean()
            tuned.scaler.scale(loss).backward()
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            optimizer.zero_grad()

    return activation_checkpointing


def evaluation_between_steps(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for rows in (1, 2, 5, 7):
        train(tuned, optimizer)
        model.eval()
        with torch.no_grad(), tuned.autocast():
            for size in range(6, 20):
                tuned.model(images(rows, size))
        model.train()


def a_smaller_last_batch(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for rows in (4, 4, 1, 4, 4, 1):
        tuned.scaler.scale(loss_of(tuned, images(rows))).backward()
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad()


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


class Sharpness(torch.optim.Optimizer):
    """An optimizer that steps through another one of the same parameters, as SAM and Lookahead do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def an_optimizer_in_an_optimizer(tuned: Tuned, model: nn.Module) -> None:
    train(tuned, Sharpness(sgd(model)), steps=STEPS)


def a_scaler_of_ones_own(tuned: Tuned, model: nn.Module) -> None:
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu")
    for _ in range(STEPS):
        scaler.scale(loss_of(tuned)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def gradients_set_by_hand(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(STEPS):
        gradients = torch.autograd.grad(tuned.scaler.scale(loss_of(tuned)), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        tuned.scaler.step(optimizer)
        tuned.scaler.update()


def a_learning_rate_schedule(tuned: Tuned, model: nn.Module) -> None:
    optimizer = tuned.optimizer(sgd(model))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(STEPS):
        train(tuned, optimizer)
        schedule.step()


def whole_checkpoints(tuned: Tuned, model: nn.Module) -> None:
    optimizer = tuned.optimizer(sgd(model))
    train(tuned, optimizer)
    saved = {"scaler": tuned.scaler.state_dict(), "optimizer": optimizer.state_dict(), "model": model.state_dict()}
    torch.save(saved, io.BytesIO())
    train(tuned, optimizer)
    optimizer.load_state_dict(saved["optimizer"])
    tuned.scaler.load_state_dict(saved["scaler"])
    train(tuned, optimizer)
    torch.save(model.state_dict(), io.BytesIO())  # for inference: no optimizer, no scaler


def a_resumed_run(tuned: Tuned, model: nn.Module) -> None:
    optimizer = tuned.optimizer(sgd(model))
    tuned.scaler.load_state_dict({})  # saved under bf16
    optimizer.load_state_dict(tuned.optimizer(sgd(model)).state_dict())
    train(tuned, optimizer, steps=2)


def a_moving_average(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    average = copy.deepcopy(model)
    for _ in range(STEPS):
        train(tuned, optimizer)
        with torch.no_grad():
            average(images(1, 9))


def a_backward_that_raised(tuned: Tuned, model: nn.Module) -> None:
    """As one that ran out of memory."""
    optimizer, head = sgd(model), model.get_submodule("head")
    loss = loss_of(tuned)
    loss.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        tuned.scaler.scale(loss).backward()
    optimizer.zero_grad()
    train(tuned, optimizer)
    head(torch.ones(1, 8)).sum().backward()
    nn.utils.clip_grad_norm_(head.parameters(), 1.0)


def zeros_left_of_a_scaled_loss(tuned: Tuned, model: nn.Module) -> None:
    """As in a GAN within one model: a scaled backward runs through parameters of the other optimizer."""
    stem, head = model.get_submodule("stem"), nn.ModuleList([model.get_submodule("head")])
    scaled, plain = sgd(stem), sgd(head)
    for _ in range(STEPS):
        tuned.scaler.scale(loss_of(tuned)).backward()
        tuned.scaler.step(scaled)
        tuned.scaler.update()
        plain.zero_grad(set_to_none=False)
        loss: Any = model.get_parameter("head.weight").sum()  # which leaves the bias alone
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        plain.step()
        model.zero_grad()


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another without hooks of its own, as accelerate has one."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


class OwnScaler(torch.amp.GradScaler):
    """A scaler that steps by itself, as Composer's does."""

    def step(self, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> Any:
        self.unscale_(optimizer)
        return optimizer.step()


def a_scaler_with_a_step_of_its_own(tuned: Tuned, model: nn.Module) -> None:
    optimizer, scaler = sgd(model), OwnScaler("cpu")
    for _ in range(STEPS):
        scaler.scale(loss_of(tuned)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def unscaled_by_the_scale(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(STEPS):
        tuned.scaler.scale(loss_of(tuned)).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.div_(tuned.scaler.get_scale())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def clipped_at_a_scaled_limit(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(STEPS):
        tuned.scaler.scale(loss_of(tuned)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), tuned.scaler.get_scale())
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad()


def the_norm_alone_by_an_infinite_limit(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(STEPS):
        tuned.scaler.scale(loss_of(tuned)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad()


def gradients_set_by_hand_in_every_second_step(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(STEPS):
        train(tuned, optimizer)
        gradients = torch.autograd.grad(tuned.scaler.scale(loss_of(tuned)), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.grad = gradient
        tuned.scaler.step(optimizer)
        tuned.scaler.update()


def an_optimizer_in_each_backward(tuned: Tuned, model: nn.Module) -> None:
    """Each parameter is stepped as soon as its gradient is there, which saves the gradients' memory."""
    optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}

    def step(parameter: torch.Tensor) -> None:
        optimizer = optimizers[parameter]  # type: ignore[index]
        tuned.scaler.unscale_(optimizer)
        optimizer.step()
        parameter.grad = None

    hooks: list[Any] = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]  # type: ignore[no-untyped-call]
    for _ in range(25):
        tuned.scaler.scale(loss_of(tuned)).backward()
        if tuned.scaler.is_enabled():
            tuned.scaler.update()
    for hook in hooks:
        hook.remove()


def an_optimizer_without_hooks(tuned: Tuned, model: nn.Module) -> None:
    optimizer = Wrapper(sgd(model))
    for _ in range(STEPS):
        tuned.scaler.scale(loss_of(tuned)).backward()
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        model.zero_grad()


def a_distributed_checkpoint(tuned: Tuned, model: nn.Module) -> None:
    """It is loaded into the states there are, and makes an optimizer's by a step of nothing."""
    optimizer = tuned.optimizer(sgd(model))
    get_state_dict(model, optimizer)
    tuned.scaler.load_state_dict(tuned.scaler.state_dict())
    train(tuned, optimizer, steps=2)


def plain(tuned: Tuned, model: nn.Module) -> None:
    train(tuned, tuned.optimizer(sgd(model)), steps=25)


LOOPS: list[Loop] = [
    plain,
    accumulation,
    clipping_after_unscale,
    looking_at_the_norm_before_unscale,
    several_optimizers,
    a_second_loss_that_needs_no_scale,
    unscaled_by_hand,
    another_model_beside,
    gradient_penalty,
    checkpointing(use_reentrant=True),
    checkpointing(use_reentrant=False),
    evaluation_between_steps,
    a_smaller_last_batch,
    an_optimizer_in_an_optimizer,
    a_scaler_of_ones_own,
    gradients_set_by_hand,
    a_learning_rate_schedule,
    whole_checkpoints,
    a_resumed_run,
    a_moving_average,
    a_backward_that_raised,
    zeros_left_of_a_scaled_loss,
    a_scaler_with_a_step_of_its_own,
    unscaled_by_the_scale,
    clipped_at_a_scaled_limit,
    the_norm_alone_by_an_infinite_limit,
    gradients_set_by_hand_in_every_second_step,
    an_optimizer_in_each_backward,
    an_optimizer_without_hooks,
    a_distributed_checkpoint,
]


@pytest.mark.parametrize(
    "policy", [FP16, Policy(autocast="bf16"), Policy(), Policy(autocast="fp16", fused_optimizer=True)], ids=str
)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
@pytest.mark.parametrize("guard", [None, True])
def test_a_correct_loop_raises_no_alarm(loop: Loop, policy: Policy, guard: bool | None) -> None:
    tuned, said = run(loop, policy, guard=guard)
    assert (codes(tuned), said) == ([], [])


@pytest.mark.parametrize(
    "loop", [plain, a_smaller_last_batch, evaluation_between_steps], ids=lambda loop: loop.__name__
)
def test_batches_as_the_policy_has_them_raise_no_alarm(loop: Loop) -> None:
    tuned, said = run(loop, EVERYTHING, guard=True)
    assert (codes(tuned), said) == ([], [])


@pytest.mark.parametrize("policy", [Policy(), Policy(autocast="bf16")], ids=str)
def test_closures_raise_no_alarm(policy: Policy) -> None:
    tuned, said = run(lbfgs, policy, guard=True)
    assert (codes(tuned), said) == ([], [])


def test_whatever_steps_can_be_stepped_by_a_scaler_that_is_off() -> None:
    class Anything:
        def step(self) -> None:
            pass

    def loop(tuned: Tuned, _: nn.Module) -> None:
        optimizer: Any = Anything()
        tuned.scaler.step(optimizer)

    tuned, said = run(loop, Policy(autocast="bf16"), guard=True)
    assert (codes(tuned), said) == ([], [])


def test_a_static_scale_of_one_needs_no_scaler() -> None:
    policy = Policy(autocast="fp16", loss_scale=LossScale(init=1, static=True))
    tuned, said = run(plain, policy)
    assert (codes(tuned), said) == ([], [])


def test_a_scale_that_settles_by_skipping_steps_raises_no_alarm() -> None:
    policy = Policy(autocast="fp16", loss_scale=LossScale(init=2.0**40))

    def loop(tuned: Tuned, model: nn.Module) -> None:
        train(tuned, sgd(model), steps=60)
        assert 1 < tuned.scaler.get_scale() < 2.0**40

    tuned, said = run(loop, policy, guard=True)
    assert (codes(tuned), said) == ([], [])


def on(batches: list[torch.Tensor]) -> Loop:
    def loop(_: Tuned, model: nn.Module) -> None:
        for batch in batches:
            model(batch).square().mean().backward()

    return loop


@pytest.mark.parametrize(
    ("batches", "policy"),
    [
        ([images(16)] * 5, Policy(batch_size=8)),  # two views of each sample
        ([images(rows) for rows in (3, 5, 2, 6)], Policy(batch_size=7)),  # packed: as many rows as there are
        ([images(size=size) for size in (6, 7, 8) * 4], Policy(cudnn_benchmark=True)),  # three sizes
        ([images(size=9)[..., 1:7, 1:7]] * 3, Policy()),  # a crop
    ],
    ids=["views", "packed", "sizes", "crop"],
)
def test_unusual_batches_raise_no_alarm(batches: list[torch.Tensor], policy: Policy) -> None:
    tuned, said = run(on(batches), policy, guard=True)
    assert (codes(tuned), said) == ([], [])


@pytest.mark.parametrize(
    ("batches", "policy"),
    [
        ([images(3)] * 5, Policy(batch_size=8)),  # a size that somebody chose, or edges of a graph
        ([images(size=6 + size) for size in range(8)] * 2, Policy(cudnn_benchmark=True)),  # a fixed set of sizes
        ([images().to(memory_format=torch.channels_last)] * 3, Policy()),  # as decoders of images give them
    ],
    ids=["size", "shapes", "format"],
)
def test_without_being_asked_nothing_is_said_of_batches_that_may_be_meant(
    batches: list[torch.Tensor], policy: Policy
) -> None:
    assert run(on(batches), policy)[1] == []
    assert len(run(on(batches), policy, guard=True)[1]) == 1


def test_a_batch_size_that_was_asked_for_is_believed() -> None:
    def loop(tuned: Tuned, model: nn.Module) -> None:
        rows = tuned.batch_size // 2  # whatever that is good for
        on([images(rows)] * 5)(tuned, model)

    tuned, _ = run(loop, Policy(batch_size=10), guard=True)
    assert codes(tuned) == []


def test_several_policies_at_once_watch_their_own_models() -> None:
    with (
        apply(FP16, Net(), guard=True) as one,
        apply(Policy(autocast="bf16"), Net(), guard=True) as two,
        apply(Policy(), Net(), guard=True) as three,
    ):
        optimizers = [sgd(tuned.model) for tuned in (one, two, three)]
        for _ in range(STEPS):
            for tuned, optimizer in zip((one, two, three), optimizers, strict=True):
                train(tuned, optimizer)
        assert [codes(tuned) for tuned in (one, two, three)] == [[], [], []]
