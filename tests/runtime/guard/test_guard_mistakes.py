"""Each mistake twice: PyTorch alone says nothing of it, or something else; the guard says what is wrong, and where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from loops import FP16, Loop, Net, codes, finish, images, line_of_the_mistake, loss_of, repeated, run, sgd
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.guard.misuse import PolicyMisuseWarning
from amptune.runtime.tuned import Tuned


@repeated
def step_again(tuned: Tuned, optimizer: Any) -> None:
    tuned.scaler.scale(loss_of(tuned)).backward()
    tuned.scaler.step(optimizer)
    optimizer.step()  # the mistake
    tuned.scaler.update()
    optimizer.zero_grad()


@repeated
def step_before(tuned: Tuned, optimizer: Any) -> None:
    loss_of(tuned).backward()
    optimizer.step()
    tuned.scaler.step(optimizer)  # the mistake
    optimizer.zero_grad()


@repeated
def step_twice(tuned: Tuned, optimizer: Any) -> None:
    loss_of(tuned).backward()
    optimizer.step()
    optimizer.step()  # the mistake
    optimizer.zero_grad()


@repeated
def step_without_scaler(tuned: Tuned, optimizer: Any) -> None:
    loss_of(tuned).backward()
    optimizer.step()  # the mistake
    optimizer.zero_grad()


@repeated
def step_on_scaled_gradients(tuned: Tuned, optimizer: Any) -> None:
    tuned.scaler.scale(loss_of(tuned)).backward()
    optimizer.step()  # the mistake
    optimizer.zero_grad()


@repeated
def clip_norm_too_early(tuned: Tuned, optimizer: Any) -> None:
    tuned.scaler.scale(loss_of(tuned)).backward()
    clip_grad_norm_(tuned.model.parameters(), 1.0)
    tuned.scaler.step(optimizer)  # the mistake
    tuned.scaler.update()
    optimizer.zero_grad()


@repeated
def clip_values_too_early(tuned: Tuned, optimizer: Any) -> None:
    for _ in range(2):
        tuned.scaler.scale(loss_of(tuned)).backward()
    clip_grad_value_(tuned.model.parameters(), 1.0)
    tuned.scaler.unscale_(optimizer)  # the mistake
    finish(tuned, optimizer)


@repeated
def backward_inside(tuned: Tuned, optimizer: Any) -> None:
    with tuned.autocast():
        loss = tuned.model(tuned.batch(images())).float().square().mean()
        tuned.scaler.scale(loss).backward()  # the mistake
    finish(tuned, optimizer)


@dataclass(frozen=True)
class Mistake:
    loop: Loop
    code: str
    words: str
    policy: Policy = FP16


BF16, FUSED = Policy(autocast="bf16"), Policy(autocast="fp16", fused_optimizer=True)
MISTAKES = [
    Mistake(step_again, "stepped-twice", "every update is taken twice"),
    Mistake(step_again, "stepped-twice", "leave the other out", BF16),
    Mistake(step_again, "stepped-twice", "leave the other out", FUSED),
    Mistake(step_before, "stepped-twice", "already applied", BF16),
    Mistake(step_twice, "stepped-twice", "leave one of the two steps out", BF16),
    Mistake(step_twice, "stepped-twice", "leave one of the two steps out", Policy()),
    Mistake(step_without_scaler, "stepped-without-scaler", "under autocast fp16 without a loss scaler"),
    Mistake(step_without_scaler, "stepped-without-scaler", "under autocast fp16 without a loss scaler", FUSED),
    Mistake(step_on_scaled_gradients, "stepped-on-scaled-gradients", "call tuned.scaler.step(optimizer)"),
    Mistake(clip_norm_too_early, "clipped-before-unscale", "tuned.scaler.unscale_(optimizer)"),
    Mistake(clip_norm_too_early, "clipped-before-unscale", "tuned.scaler.unscale_(optimizer)", FUSED),
    Mistake(clip_values_too_early, "clipped-before-unscale", "tuned.scaler.unscale_(optimizer)"),
    Mistake(backward_inside, "backward-inside-autocast", "leave the `with tuned.autocast():` block"),
    Mistake(backward_inside, "backward-inside-autocast", "leave the `with tuned.autocast():` block", BF16),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: f"{mistake.loop.__name__}-{mistake.policy}")
def test_the_guard_says_once_what_pytorch_does_not(mistake: Mistake) -> None:
    assert run(mistake.loop, mistake.policy, guard=False)[1] == []
    tuned, (warning,) = run(mistake.loop, mistake.policy)
    (found,) = tuned.findings
    assert found.code == mistake.code
    assert mistake.words in str(found)
    assert (warning.category, str(warning.message)) == (PolicyMisuseWarning, str(found))
    assert (warning.filename, warning.lineno) == (__file__, line_of_the_mistake(mistake.loop))


def test_a_step_past_the_scaler_raises_elsewhere_and_of_something_else_with_pytorch_alone() -> None:
    def loop(tuned: Tuned, model: nn.Module) -> None:
        optimizer = sgd(model)
        tuned.scaler.scale(loss_of(tuned)).backward()
        optimizer.step()  # the mistake
        with pytest.raises(AssertionError, match="No inf checks were recorded prior to update"):
            tuned.scaler.update()

    tuned, said = run(loop, FP16)
    assert (codes(tuned), said[0].lineno) == (["stepped-on-scaled-gradients"], line_of_the_mistake(loop))


def test_as_an_error_it_is_raised_at_the_users_call() -> None:
    with apply(BF16, Net()) as tuned, tuned.autocast():
        loss: Any = tuned.model(images()).sum()
        with pytest.raises(PolicyMisuseWarning, match=r"backward\(\) runs inside autocast"):
            loss.backward()
