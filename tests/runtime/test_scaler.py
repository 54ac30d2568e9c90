from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from amptune.policy.settings import LossScale, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.scaler import scaler_for

FP16, BF16 = Policy(autocast="fp16"), Policy(autocast="bf16")


def scaled(**how: Any) -> Policy:
    return replace(FP16, loss_scale=LossScale(**how))


def updated(scaler: Any, *, overflows: bool = False) -> float:
    """The scale after one more step."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler.scale(parameter * (torch.inf if overflows else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    return float(scaler.get_scale())


def used_scaler(policy: Policy) -> Any:
    scaler = scaler_for(policy, "cpu")
    updated(scaler)
    return scaler


O3 = Policy(weights="half")
O2 = Policy(weights="half", master_weights=True)


@pytest.mark.parametrize(
    ("policy", "enabled"),
    [
        (Policy(), False),
        (BF16, False),
        (FP16, True),
        (O2, True),
        (O3, False),
        (replace(O3, loss_scale=LossScale(init=128, static=True)), True),
        (replace(O2, loss_scale=LossScale(init=1, static=True)), False),
    ],
    ids=str,
)
def test_the_loss_is_scaled_in_fp16_and_with_half_weights_where_something_of_it_is_kept(
    policy: Policy, enabled: bool
) -> None:
    scaler = scaler_for(policy, "cpu")
    assert scaler.is_enabled() is enabled
    if not enabled:
        scaler.load_state_dict(used_scaler(FP16).state_dict())
        assert scaler.state_dict() == {}


def test_fp16_scales_as_gradscaler_does_unless_the_policy_says_how() -> None:
    assert scaler_for(FP16, "cpu").state_dict() == torch.amp.GradScaler("cpu").state_dict()
    scaler = scaler_for(scaled(init=64, growth_interval=7), "cpu")
    assert (scaler.get_scale(), scaler.get_growth_interval()) == (64, 7)


def test_a_scaler_takes_the_empty_state_of_a_run_that_scaled_nothing(caplog: pytest.LogCaptureFixture) -> None:
    scaler = used_scaler(scaled(init=64))
    before = scaler.state_dict()
    with warnings.catch_warnings(), caplog.at_level(logging.INFO, logger="amptune"):
        warnings.simplefilter("error")
        scaler.load_state_dict(used_scaler(BF16).state_dict())
    assert scaler.state_dict() == before
    assert "loss scaling starts anew at 64" in caplog.text


def test_a_scale_grows_to_its_maximum_and_no_further_and_none_above_is_loaded() -> None:
    policy = scaled(init=64, growth_interval=1, max=200)
    scaler = scaler_for(policy, "cpu")
    assert [updated(scaler) for _ in range(3)] == [128, 200, 200]
    assert updated(scaler, overflows=True) == 100
    assert updated(copy.deepcopy(scaler)) == 200
    state = scaler.state_dict()
    plain, other = torch.amp.GradScaler("cpu"), scaler_for(policy, "cpu")
    plain.load_state_dict(state)
    other.load_state_dict(plain.state_dict())
    assert other.state_dict() == plain.state_dict() == state
    scaler.load_state_dict(used_scaler(FP16).state_dict())
    assert scaler.get_scale() == 200


def test_a_static_scale_stays_whatever_overflows_or_is_loaded() -> None:
    scaler = scaler_for(scaled(init=128, static=True), "cpu")
    assert [updated(scaler, overflows=overflows) for overflows in (False, True, False)] == [128, 128, 128]
    scaler.load_state_dict(used_scaler(FP16).state_dict())
    assert [updated(scaler), updated(scaler, overflows=True)] == [128, 128]
    moving = scaler_for(scaled(growth_interval=1), "cpu")  # which its state does not stop
    moving.load_state_dict({**scaler.state_dict(), "growth_interval": 1})
    assert [updated(moving, overflows=overflows) for overflows in (True, False)] == [64, 128]


@pytest.mark.parametrize("make", [used_scaler, lambda policy: scaler_for(policy, "cpu")])
def test_a_scaler_takes_what_apex_saved(make: Callable[[Policy], Any]) -> None:
    scaler = make(FP16)
    scaler.load_state_dict({"loss_scaler0": {"loss_scale": 1024.0, "unskipped": 12}})
    fresh = scaler_for(FP16, "cpu").state_dict()
    assert scaler.state_dict() == {**fresh, "scale": 1024.0, "_growth_tracker": 12}


def test_gradients_in_half_are_unscaled_where_the_weights_are() -> None:
    model = nn.Linear(2, 1)
    with apply(replace(O3, loss_scale=LossScale(init=128, static=True)), model) as tuned:
        optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        tuned.scaler.scale(tuned.model(torch.ones(1, 2)).sum()).backward()
        tuned.scaler.unscale_(optimizer)
        assert model.weight.grad is not None
        assert model.weight.grad.dtype is torch.float16
        assert model.weight.grad.tolist() == [[1.0, 1.0]]
