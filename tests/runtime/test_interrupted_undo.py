"""Ctrl-C anywhere in `undo`: another call finishes it, and everything is as it was before the policy."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from test_apply_and_undo import state_of
from torch import nn

import amptune
from amptune.policy.settings import Fp32Rule, HalfRule, LossScale, Policy
from amptune.runtime.tuned import Tuned

POLICIES = [
    Policy(weights="half", master_weights=True, fp32_modules=(Fp32Rule(path="1"),), loss_scale=LossScale(init=8)),
    Policy(weights="half", memory_format="channels_last", checkpoint=("0",)),
    Policy(autocast="bf16", fp32_math="ieee", cudnn_benchmark=True, half_modules=(HalfRule(path="2"),)),
]


def trained(policy: Policy) -> tuple[nn.Module, Tuned, list[Any]]:
    """A model after a step under the policy, with gradients of a second one; and the state that it had before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.GroupNorm(1, 2))
    before = state_of(model, values=False)
    tuned = amptune.apply(policy, model)
    optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for _ in range(2):
        optimizer.zero_grad()
        with tuned.autocast():
            loss: Any = tuned.model(torch.rand(3, 2, 4, 4)).square().mean()
        tuned.scaler.scale(loss).backward()
        tuned.step(optimizer)
    return model, tuned, before


def interrupted(tuned: Tuned, after: int) -> bool:
    """Whether `undo` was interrupted before the line of amptune's with this number."""
    left = after

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        if "/amptune/" not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    former = sys.gettrace()
    try:
        sys.settrace(trace)
        tuned.undo()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(former)
    return False


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_an_undo_after_one_that_was_interrupted_goes_on(policy: Policy) -> None:
    model, tuned, _ = trained(policy)
    tuned.undo()
    values = [(one.detach().clone(), one.grad) for one in model.parameters()]
    after, went_on = 0, True
    while went_on:
        model, tuned, before = trained(policy)
        went_on = interrupted(tuned, after)
        tuned.undo()
        assert state_of(model, values=False) == before, after
        for one, (value, gradient) in zip(model.parameters(), values, strict=True):
            assert torch.equal(one, value)
            assert gradient is not None
            assert one.grad is not None
            assert torch.equal(one.grad, gradient)
        assert (tuned.model is model, tuned.guard) == (True, None)
        after += 3
    assert after > 20
