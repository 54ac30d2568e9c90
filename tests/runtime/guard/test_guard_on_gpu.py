"""Autograd runs the hooks of a GPU's tensors in a thread of its own: what they see, and the line they find."""

from __future__ import annotations

import pytest
import torch
from loops import FP16, Net, codes, images, line_of_the_mistake, run, sgd
from torch import nn

from amptune.policy.settings import Policy
from amptune.runtime.tuned import Tuned

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def backward_inside(tuned: Tuned, model: nn.Module) -> None:
    model.cuda()
    with tuned.autocast():
        tuned.model(images().cuda()).sum().backward()  # the mistake


def clip_too_early(tuned: Tuned, model: nn.Module) -> None:
    model.cuda()
    with tuned.autocast():
        loss = tuned.model(images().cuda()).sum()
    tuned.scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the mistake


def test_a_backward_inside_autocast_is_found_at_the_users_line() -> None:
    tuned, said = run(backward_inside, Policy(autocast="bf16"), guard=True)
    assert codes(tuned) == ["backward-inside-autocast"]
    assert (said[0].filename, said[0].lineno) == (__file__, line_of_the_mistake(backward_inside))


def test_scaled_gradients_are_known() -> None:
    tuned, said = run(clip_too_early, FP16, guard=True)
    assert codes(tuned) == ["clipped-before-unscale"]
    assert said[0].lineno == line_of_the_mistake(clip_too_early)


@pytest.mark.parametrize("fused", [False, True])
def test_a_correct_loop_raises_no_alarm_and_keeps_its_statistics(fused: bool) -> None:
    def loop(tuned: Tuned, model: nn.Module) -> None:
        model.cuda()
        optimizer = tuned.optimizer(sgd(model))
        for factor in (1.0, 1e6, *[1.0] * 23):
            with tuned.autocast():
                loss = tuned.model(tuned.batch(images().cuda() * factor)).float().square().mean()
            tuned.scaler.scale(loss).backward()
            tuned.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            optimizer.zero_grad()
        assert all(buffer.isfinite().all() for buffer in model.buffers())

    policy = Policy(autocast="fp16", memory_format="channels_last", fused_optimizer=fused)
    tuned, said = run(loop, policy, Net(), guard=True, protect_batch_norm=True)
    assert (codes(tuned), said) == ([], [])
