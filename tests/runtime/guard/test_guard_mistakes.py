"""Each mistake twice: PyTorch alone says nothing of it, or something else; the guard says what is wrong, and where."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from benches import step_of
from loops import FP16, Loop, Net, finish, images, loss_of, repeated, run, sgd

from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.guard.misuse import PolicyMisuseWarning
from amptune.runtime.tuned import Tuned


def backward_inside(tuned: Tuned, _: Any, optimizer: Any, x: Any) -> Any:
    with tuned.autocast():
        loss = tuned.model(x).float().square().mean()
        tuned.scaler.scale(loss).backward()
    finish(tuned, optimizer)


def leave_autocast_out(tuned: Tuned, _: Any, optimizer: Any, __: Any) -> None:
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
STEP, UNSCALE = "acts[word]()", "tuned.scaler.unscale_(optimizer)"
# What the loop does, the finding, some of its words, and what stands where the warning is.
MISTAKES = [
    ("backward scaler-step step update zero", "stepped-twice", "leave the other out", STEP, [FP16, BF16, FUSED]),
    ("unscaled-backward step step zero", "stepped-twice", "leave one of the two steps out", STEP, [BF16, Policy()]),
    ("unscaled-backward step zero", "stepped-without-scaler", "autocast fp16 without a loss", STEP, [FP16, FUSED]),
    ("backward step zero", "stepped-on-scaled-gradients", "call tuned.scaler.step(opt", STEP, [FP16, FUSED]),
    ("backward clip scaler-step update zero", "clipped-before-unscale", UNSCALE, "scaler.step", [FP16, FUSED]),
    ("backward clip unscale scaler-step update zero", "clipped-before-unscale", UNSCALE, UNSCALE, [FP16]),
    (
        backward_inside,
        "backward-inside-autocast",
        "leave the `with tuned.autocast():` block",
        "(loss).back",
        [FP16, BF16],
    ),
    (leave_autocast_out, "autocast-unused", "with tuned.autocast():", "# the mistake", [FP16, BF16]),
    (
        call_the_model_itself,
        "model-not-called",
        "call it",
        "# the mistake",
        [Policy(compile="default"), Policy(cuda_graphs=True)],
    ),
    (keep_an_optimizer, "optimizer-not-passed", "tuned.optimizer(", "# the mistake", [Policy(fused_optimizer=True)]),
]


def of_the_guard(said: list[Any]) -> list[Any]:
    """Without PyTorch's own deprecations, which its compiler meets."""
    return [one for one in said if one.category is PolicyMisuseWarning or "torch" not in one.filename]


@pytest.mark.parametrize(
    ("step", "code", "words", "line", "policy"), [(*one, policy) for *one, policies in MISTAKES for policy in policies]
)
def test_the_guard_says_once_what_pytorch_does_not(step: Any, code: str, words: str, line: str, policy: Policy) -> None:
    is_loop = step in (call_the_model_itself, keep_an_optimizer)
    loop: Loop = step if is_loop else repeated(step_of(step) if isinstance(step, str) else step)
    assert of_the_guard(run(loop, policy, guard=False)[1]) == []
    tuned, said = run(loop, policy)
    (warning,) = of_the_guard(said)
    (found,) = (one for one in tuned.findings if one.code != "cuda-graphs-without-effect")
    assert (found.code, words in str(found)) == (code, True)
    assert (warning.category, str(warning.message)) == (PolicyMisuseWarning, str(found))
    assert line in linecache.getline(warning.filename, warning.lineno)


def test_as_an_error_it_is_raised_at_the_users_call() -> None:
    with apply(BF16, Net()) as tuned, tuned.autocast():
        loss: Any = tuned.model(images()).sum()
        with pytest.raises(PolicyMisuseWarning, match=r"backward\(\) runs inside autocast"):
            loss.backward()
