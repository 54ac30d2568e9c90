from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from amptune.policy.settings import LossScale, Policy
from amptune.runtime.loss_scaling import scaler_for


def used_scaler(policy: Policy) -> Any:
    """A scaler after one optimizer step on the CPU."""
    scaler = scaler_for(policy, "cpu")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler


@pytest.mark.parametrize("policy", [Policy(), Policy(autocast="bf16")], ids=str)
def test_only_fp16_scales_the_loss(policy: Policy) -> None:
    scaler = scaler_for(policy, "cpu")
    loss = torch.ones(1)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert not scaler.is_enabled()
    assert scaler.scale(loss) is loss
    assert scaler.state_dict() == {}


def test_fp16_scales_as_gradscaler_does_unless_the_policy_says_how() -> None:
    default = torch.amp.GradScaler("cpu")
    assert scaler_for(Policy(autocast="fp16"), "cpu").state_dict() == default.state_dict()
    scaler = scaler_for(Policy(autocast="fp16", loss_scale=LossScale(init=64, growth_interval=7)), "cpu")
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (64, 7)


def test_a_scaler_takes_the_empty_state_of_a_run_that_scaled_nothing(caplog: pytest.LogCaptureFixture) -> None:
    scaler = used_scaler(Policy(autocast="fp16", loss_scale=LossScale(init=64)))
    before = scaler.state_dict()
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, logger="amptune"):
        warnings.simplefilter("error")
        scaler.load_state_dict(used_scaler(Policy(autocast="bf16")).state_dict())
    assert scaler.state_dict() == before
    assert "loss scaling starts anew at 64" in caplog.text


def test_a_disabled_scaler_takes_the_state_of_one_that_scales() -> None:
    scaler = scaler_for(Policy(autocast="bf16"), "cpu")
    scaler.load_state_dict(used_scaler(Policy(autocast="fp16")).state_dict())
    assert scaler.state_dict() == {}


def test_a_full_state_is_loaded() -> None:
    saved = used_scaler(Policy(autocast="fp16", loss_scale=LossScale(init=64))).state_dict()
    scaler = scaler_for(Policy(autocast="fp16"), "cpu")
    scaler.load_state_dict(saved)
    assert scaler.state_dict() == saved
