"""Each mistake twice: PyTorch alone says nothing of it, or something else; the guard says what is wrong, and where."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass

import pytest
import torch
from loops import FP16, Loop, Net, codes, images, line_of_the_mistake, loss_of, run, sgd, train
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from amptune.policy.settings import LossScale, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.guard.misuse import PolicyMisuseWarning
from amptune.runtime.tuned import Tuned


def step_again(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(3):
        tuned.scaler.scale(loss_of(tuned)).backward()
        tuned.scaler.step(optimizer)
        optimizer.step()  # the mistake
        tuned.scaler.update()
        optimizer.zero_grad()


def step_before(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(3):
        tuned.scaler.scale(loss_of(tuned)).backward()
        optimizer.step()
        tuned.scaler.step(optimizer)  # the mistake
        tuned.scaler.update()
        optimizer.zero_grad()


def step_twice(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(3):
        loss_of(tuned).backward()
        optimizer.step()
        optimizer.step()  # the mistake
        optimizer.zero_grad()


def step_without_scaler(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(3):
        loss_of(tuned).backward()
        optimizer.step()  # the mistake
        optimizer.zero_grad()


def step_on_scaled_gradients(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(3):
        tuned.scaler.scale(loss_of(tuned)).backward()
        optimizer.step()  # the mistake
        optimizer.zero_grad()


def clip_norm_too_early(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(3):
        tuned.scaler.scale(loss_of(tuned)).backward()
        clip_grad_norm_(model.parameters(), 1.0)  # the mistake
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad()


def clip_values_too_early(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    tuned.scaler.scale(loss_of(tuned)).backward()
    clip_grad_value_(model.parameters(), 1.0)  # the mistake
    tuned.scaler.step(optimizer)
    tuned.scaler.update()


def backward_inside(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(3):
        with tuned.autocast():
            loss = tuned.model(tuned.batch(images())).float().square().mean()
            tuned.scaler.scale(loss).backward()  # the mistake
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad()


def step_inside(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(3):
        tuned.scaler.scale(loss_of(tuned)).backward()
        with tuned.autocast():
            tuned.scaler.step(optimizer)  # the mistake
        tuned.scaler.update()
        optimizer.zero_grad()


def leave_the_scaler_out(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    train(tuned, optimizer, steps=30)  # the watch is over by then
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # the mistake
    torch.save(checkpoint, io.BytesIO())
    train(tuned, optimizer)


def leave_the_scaler_out_at_the_end(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    train(tuned, optimizer)
    torch.save({"optimizer": optimizer.state_dict()}, io.BytesIO())  # the mistake


def resume_without_the_scaler(tuned: Tuned, model: nn.Module) -> None:
    optimizer = tuned.optimizer(sgd(model))
    optimizer.load_state_dict(sgd(model).state_dict())  # the mistake
    train(tuned, optimizer, steps=2)


def overflow_for_ever(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(30):
        tuned.scaler.scale(loss_of(tuned) * float("inf")).backward()
        tuned.scaler.step(optimizer)
        tuned.scaler.update()  # the mistake
        optimizer.zero_grad()


def overflow_in_the_forward(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    train(tuned, optimizer, steps=2)
    tuned.scaler.scale(loss_of(tuned, images() * 1e6)).backward()
    tuned.scaler.step(optimizer)
    tuned.scaler.update()  # the mistake


def other_format(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(3):
        with tuned.autocast():
            loss = tuned.model(images()).square().mean()  # the mistake
        loss.backward()
        optimizer.step()


def other_format_than_pytorch_s_own(tuned: Tuned, _: nn.Module) -> None:
    tuned.model(images().to(memory_format=torch.channels_last)).sum().backward()  # the mistake


def other_batch_size(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for _ in range(5):
        with tuned.autocast():
            loss = tuned.model(tuned.batch(images(rows=4))).square().mean()  # the mistake
        loss.backward()
        optimizer.step()


def a_shape_each(tuned: Tuned, model: nn.Module) -> None:
    optimizer = sgd(model)
    for i in range(10):
        with tuned.autocast():
            loss = model(tuned.batch(images(size=6 + i))).square().mean()  # the mistake
        loss.backward()
        optimizer.step()


def another_models_parameters(tuned: Tuned, model: nn.Module) -> None:
    optimizer = tuned.optimizer(sgd(copy.deepcopy(model)))
    for _ in range(3):
        loss_of(tuned).backward()
        optimizer.step()  # the mistake
        optimizer.zero_grad()


def step_without_masters(tuned: Tuned, model: nn.Module) -> None:
    optimizer, own_scaler = sgd(model), torch.amp.GradScaler("cpu")
    for _ in range(3):
        own_scaler.scale(loss_of(tuned)).backward()
        own_scaler.step(optimizer)  # the mistake
        own_scaler.update()
        optimizer.zero_grad()


@dataclass(frozen=True)
class Mistake:
    loop: Loop
    code: str
    words: str
    policy: Policy = FP16
    asked: bool = False  # found with guard=True alone


O2 = Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True)
CHANNELS_LAST = Policy(memory_format="channels_last")
MISTAKES = [
    Mistake(step_again, "stepped-twice", "every update is taken twice"),
    Mistake(step_again, "stepped-twice", "leave the other out", Policy(autocast="bf16")),
    Mistake(step_again, "stepped-twice", "leave the other out", Policy(autocast="fp16", fused_optimizer=True)),
    Mistake(step_before, "stepped-twice", "already applied", Policy(autocast="bf16")),
    Mistake(step_twice, "stepped-twice", "leave one of the two steps out", Policy(autocast="bf16")),
    Mistake(step_twice, "stepped-twice", "leave one of the two steps out", Policy()),
    Mistake(step_without_scaler, "stepped-without-scaler", "tuned.scaler.scale(loss).backward()"),
    Mistake(step_on_scaled_gradients, "stepped-on-scaled-gradients", "call tuned.scaler.step(optimizer)"),
    Mistake(clip_norm_too_early, "clipped-before-unscale", "tuned.scaler.unscale_(optimizer)"),
    Mistake(clip_values_too_early, "clipped-before-unscale", "tuned.scaler.unscale_(optimizer)"),
    Mistake(backward_inside, "backward-inside-autocast", "leave the `with tuned.autocast():` block"),
    Mistake(step_inside, "stepped-inside-autocast", "leave the `with tuned.autocast():` block"),
    Mistake(step_inside, "stepped-inside-autocast", "casts of the old weights", Policy(autocast="bf16")),
    Mistake(leave_the_scaler_out, "scaler-not-saved", "save tuned.scaler.state_dict() too", asked=True),
    Mistake(leave_the_scaler_out_at_the_end, "scaler-not-saved", "save tuned.scaler.state_dict() too", asked=True),
    Mistake(resume_without_the_scaler, "scaler-not-restored", "call tuned.scaler.load_state_dict() too", asked=True),
    Mistake(overflow_for_ever, "loss-scale-collapsed", "`amptune diagnose` names the modules"),
    Mistake(overflow_in_the_forward, "batch-norm-poisoned", "statistics of stem.1 are not finite"),
    Mistake(other_format, "batch-not-in-memory-format", "tuned.batch(x)", CHANNELS_LAST, asked=True),
    Mistake(other_format_than_pytorch_s_own, "batch-not-in-memory-format", "contiguous", Policy(), asked=True),
    Mistake(other_batch_size, "batch-size-differs", "have 4 rows", Policy(batch_size=8), asked=True),
    Mistake(a_shape_each, "shapes-keep-changing", "8 different shapes", Policy(cudnn_benchmark=True), asked=True),
    Mistake(step_without_masters, "stepped-without-masters", "optimizer = tuned.optimizer(optimizer)", O2),
    Mistake(another_models_parameters, "optimizer-of-other-parameters", "tuned.model.parameters()"),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.loop.__name__}-{mistake.policy}")
def test_the_guard_says_what_pytorch_does_not(mistake: Mistake) -> None:
    _, said_by_pytorch = run(mistake.loop, mistake.policy, guard=False)
    assert said_by_pytorch == []

    assert codes(run(mistake.loop, mistake.policy)[0]) == ([] if mistake.asked else [mistake.code])
    tuned, said = run(mistake.loop, mistake.policy, guard=True)
    (found,) = tuned.findings
    assert found.code == mistake.code
    line = line_of_the_mistake(mistake.loop)
    assert found.figures["where"] == f"{__file__}:{line}"
    assert f"{__file__}:{line}" in str(found)
    assert mistake.words in str(found)
    (warning,) = said
    assert warning.category is PolicyMisuseWarning
    assert (warning.filename, warning.lineno, str(warning.message)) == (__file__, line, str(found))


def test_a_step_past_the_scaler_raises_elsewhere_and_of_something_else_with_pytorch_alone() -> None:
    def loop(tuned: Tuned, model: nn.Module) -> None:
        optimizer = sgd(model)
        tuned.scaler.scale(loss_of(tuned)).backward()
        optimizer.step()  # the mistake
        with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
            tuned.scaler.update()

    assert run(loop, FP16, guard=False)[1] == []
    tuned, said = run(loop, FP16, guard=True)
    assert (codes(tuned), said[0].lineno) == (["stepped-on-scaled-gradients"], line_of_the_mistake(loop))


def test_another_models_parameters_raise_of_something_else_under_a_scaler() -> None:
    def loop(tuned: Tuned, model: nn.Module) -> None:
        optimizer = sgd(copy.deepcopy(model))
        tuned.scaler.scale(loss_of(tuned)).backward()
        with pytest.raises(AssertionError, match="No inf checks were recorded for this optimizer"):
            tuned.scaler.step(optimizer)  # the mistake

    assert run(loop, FP16, guard=False)[1] == []
    tuned, said = run(loop, FP16, guard=True)
    assert (codes(tuned), said[0].lineno) == (["optimizer-of-other-parameters"], line_of_the_mistake(loop))


def test_a_mistake_is_said_once_for_each_place() -> None:
    def loop(tuned: Tuned, model: nn.Module) -> None:
        optimizer = sgd(model)
        for _ in range(3):
            with tuned.autocast():
                tuned.model(images()).sum().backward()
                tuned.model(images()).sum().backward()
            optimizer.step()

    tuned, said = run(loop, Policy(autocast="bf16"), guard=True)
    assert codes(tuned) == ["backward-inside-autocast"] * 2
    assert len(said) == len({one.lineno for one in said}) == 2


def test_as_an_error_it_is_raised_at_the_users_call() -> None:
    with apply(Policy(autocast="bf16"), Net(), guard=True) as tuned, tuned.autocast():
        loss = tuned.model(images()).sum()
        with pytest.raises(PolicyMisuseWarning, match=r"backward\(\) at .* runs inside autocast"):
            loss.backward()


def test_undo_is_whole_where_it_warns_as_an_error() -> None:
    model = Net()
    tuned = apply(FP16, model, guard=True)
    optimizer = sgd(model)
    train(tuned, optimizer)
    optimizer.state_dict()
    with pytest.raises(PolicyMisuseWarning, match="left the loss scaler out"):  # warnings are errors in tests
        tuned.undo()
    assert not model._forward_pre_hooks
    with tuned.autocast():
        assert not torch.is_autocast_enabled("cpu")
    apply(FP16, model).undo()  # it is free for another policy


def test_a_scale_that_begins_below_one_has_not_collapsed() -> None:
    policy = Policy(autocast="fp16", loss_scale=LossScale(init=0.5))
    tuned, said = run(lambda tuned, model: train(tuned, sgd(model), steps=3), policy, guard=True)
    assert (codes(tuned), said) == ([], [])


def test_what_shows_late_is_noticed_after_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amptune.runtime.guard.guard.UPDATES_BETWEEN_LOOKS", 10)

    def loop(tuned: Tuned, model: nn.Module) -> None:
        train(tuned, sgd(model), steps=30)
        overflow_in_the_forward(tuned, model)
        train(tuned, sgd(model), steps=10)

    tuned, _ = run(loop, FP16, guard=True)
    assert codes(tuned) == ["batch-norm-poisoned"]
