"""Autograd runs the hooks of a GPU's tensors in a thread of its own: what they see."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from loops import FP16, codes, finish, images, run, sgd
from torch import nn

from amptune.policy.settings import Policy
from amptune.runtime.tuned import Tuned

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("mistake", ["backward-inside-autocast", "clipped-before-unscale", None])
def test_mistakes_are_found_and_correct_loops_raise_no_alarm(mistake: str | None, fused: bool) -> None:
    def loop(tuned: Tuned, model: nn.Module) -> None:
        model.cuda()
        optimizer = tuned.optimizer(sgd(model))
        for factor in (1.0, 1e6, *[1.0] * 23):
            with tuned.autocast():
                loss: Any = tuned.model(tuned.batch(images().cuda() * factor)).float().square().mean()
            with tuned.autocast() if mistake == "backward-inside-autocast" else nullcontext():
                tuned.scaler.scale(loss).backward()
            if mistake != "clipped-before-unscale":
                tuned.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            finish(tuned, optimizer)
        assert all(buffer.isfinite().all() for buffer in model.buffers())

    policy = Policy(autocast=FP16.autocast, memory_format="channels_last", fused_optimizer=fused)
    tuned, said = run(loop, policy, protect_batch_norm=True)
    assert codes(tuned) == [] if mistake is None else [mistake]
    assert len(said) == len(codes(tuned))
