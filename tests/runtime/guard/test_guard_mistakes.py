"""Each mistake twice: PyTorch alone says nothing of it, or something else; the guard says what is wrong, and where."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loops import FP16, Loop, Net, finish, images, line_of_the_mistake, loss_of, repeated, run, sgd
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


@repeated
def leave_autocast_out(tuned: Tuned, optimizer: Any) -> None:
    tuned.autocast()
    with torch.no_grad(), tuned.autocast():
        tuned.model(images())
    tuned.scaler.scale(tuned.model(tuned.batch(images())).square().mean()).backward()
    tuned.scaler.step(optimizer)  # the mistake
    tuned.scaler.update()
    optimizer.zero_grad()


def call_the_model_itself(tuned: Tuned, model: Any) -> None:
    optimizer = tuned.optimizer(sgd(tuned.model))
    for _ in range(4):
        model(images()).square().mean().backward()
        optimizer.step()  # the mistake
        optimizer.zero_grad()
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            tuned.model(images())


def keep_an_optimizer(tuned: Tuned, model: Any) -> None:
    tuned.optimizer(sgd(model.stem))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        loss_of(tuned).backward()
        optimizer.step()  # the mistake
        optimizer.zero_grad()


BF16, FUSED = Policy(autocast="bf16"), Policy(autocast="fp16", fused_optimizer=True)
MISTAKES = [
    (step_again, "stepped-twice", "leave the other out", [FP16, BF16, FUSED]),
    (step_twice, "stepped-twice", "leave one of the two steps out", [BF16, Policy()]),
    (step_without_scaler, "stepped-without-scaler", "under autocast fp16 without a loss scaler", [FP16, FUSED]),
    (step_on_scaled_gradients, "stepped-on-scaled-gradients", "call tuned.scaler.step(optimizer)", [FP16, FUSED]),
    (clip_norm_too_early, "clipped-before-unscale", "tuned.scaler.unscale_(optimizer)", [FP16, FUSED]),
    (clip_values_too_early, "clipped-before-unscale", "tuned.scaler.unscale_(optimizer)", [FP16]),
    (leave_autocast_out, "autocast-unused", "with tuned.autocast():", [FP16, BF16]),
    (call_the_model_itself, "model-not-called", "call it", [Policy(compile="default"), Policy(cuda_graphs=True)]),
    (keep_an_optimizer, "optimizer-not-passed", "tuned.optimizer(", [Policy(fused_optimizer=True)]),
    (backward_inside, "backward-inside-autocast", "leave the `with tuned.autocast():` block", [FP16, BF16]),
]


def of_the_guard(said: list[Any]) -> list[Any]:
    """Without PyTorch's own deprecations, which its compiler meets."""
    return [one for one in said if one.category is PolicyMisuseWarning or "torch" not in one.filename]


@pytest.mark.parametrize(
    ("loop", "code", "words", "policy"), [(*one, policy) for *one, policies in MISTAKES for policy in policies]
)
def test_the_guard_says_once_what_pytorch_does_not(loop: Loop, code: str, words: str, policy: Policy) -> None:
    assert of_the_guard(run(loop, policy, guard=False)[1]) == []
    tuned, said = run(loop, policy)
    (warning,) = of_the_guard(said)
    (found,) = (one for one in tuned.findings if one.code != "cuda-graphs-without-effect")
    assert (found.code, words in str(found)) == (code, True)
    assert str(warning.message) == str(found)
    assert (warning.filename, warning.lineno) == (__file__, line_of_the_mistake(loop))


def test_as_an_error_it_is_raised_at_the_users_call() -> None:
    with apply(BF16, Net()) as tuned, tuned.autocast():
        loss: Any = tuned.model(images()).sum()
        with pytest.raises(PolicyMisuseWarning, match=r"backward\(\) runs inside autocast"):
            loss.backward()
