"""Each mistake twice: PyTorch alone says nothing of it, or something else; the guard says what is wrong, and where."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
from benches import step_of
from loops import FP16, Loop, Net, finish, images, repeated, run

from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.guard.misuse import PolicyMisuseWarning
from amptune.runtime.tuned import Tuned


def backward_inside(tuned: Tuned, _: Any, optimizer: Any, x: Any) -> Any:
    with tuned.autocast():
        loss = tuned.model(x).float().square().mean()
        tuned.scaler.scale(loss).backward()
    finish(tuned, optimizer)


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
]


@pytest.mark.parametrize(
    ("step", "code", "words", "line", "policy"), [(*one, policy) for *one, policies in MISTAKES for policy in policies]
)
def test_the_guard_says_once_what_pytorch_does_not(step: Any, code: str, words: str, line: str, policy: Policy) -> None:
    loop: Loop = repeated(step_of(step) if isinstance(step, str) else step)
    assert run(loop, policy, guard=False)[1] == []
    tuned, (warning,) = run(loop, policy)
    (found,) = tuned.findings
    assert (found.code, words in str(found)) == (code, True)
    assert (warning.category, str(warning.message)) == (PolicyMisuseWarning, str(found))
    assert line in linecache.getline(warning.filename, warning.lineno)


def test_as_an_error_it_is_raised_at_the_users_call() -> None:
    with apply(BF16, Net()) as tuned, tuned.autocast():
        loss: Any = tuned.model(images()).sum()
        with pytest.raises(PolicyMisuseWarning, match=r"backward\(\) runs inside autocast"):
            loss.backward()
