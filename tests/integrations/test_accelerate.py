from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from training import POLICY, Net, batches, net, same_weights, train_plainly

from amptune.errors import PolicyApplyError
from amptune.policy.settings import LossScale, Policy

pytest.importorskip("accelerate", reason="accelerate is not installed")

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs, DynamoBackend, GradScalerKwargs

from amptune.runtime.integrations.accelerate import accelerator_kwargs, apply_before_prepare


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps one state for the whole process."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def accelerator(policy: Policy, **more: Any) -> Any:
    return Accelerator(cpu=True, **{**accelerator_kwargs(policy), **more})


def train(policy: Policy, model: Net) -> list[float]:
    runs_on = accelerator(policy)
    tuned = apply_before_prepare(policy, model, runs_on)
    optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    prepared, optimizer = runs_on.prepare(model, optimizer)
    losses = []
    for x, y in batches():
        with runs_on.autocast():
            loss = nn.functional.cross_entropy(prepared(tuned.batch(x)), y)
        runs_on.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    tuned.undo()
    return losses


@pytest.mark.parametrize("policy", [POLICY, replace(POLICY, fused_optimizer=True), Policy()], ids=str)
def test_it_trains_as_the_plain_loop_does(policy: Policy) -> None:
    model, twin = net(), net()
    assert train(policy, model) == train_plainly(policy, twin, batches())
    assert same_weights(model, twin)
    assert model.head_dtypes == {torch.float32}
    assert type(model.head) is nn.Linear


def test_an_accelerator_is_built_as_the_policy_says() -> None:
    policy = Policy(autocast="fp16", accumulate=4, compile="reduce-overhead", loss_scale=LossScale(init=256))
    kwargs = accelerator_kwargs(policy)
    dynamo = kwargs.pop("dynamo_plugin")
    assert (dynamo.backend, dynamo.mode) == (DynamoBackend.INDUCTOR, "reduce-overhead")
    assert kwargs == {
        "mixed_precision": "fp16",
        "gradient_accumulation_steps": 4,
        "kwargs_handlers": [GradScalerKwargs(init_scale=256, growth_interval=2000)],
    }
    assert accelerator_kwargs(Policy()) == {"mixed_precision": "no", "gradient_accumulation_steps": 1}


def test_the_users_handlers_stay_beside_the_policys() -> None:
    policy = Policy(autocast="fp16", loss_scale=LossScale(init=256))
    ddp, scaling = DistributedDataParallelKwargs(find_unused_parameters=True), GradScalerKwargs(backoff_factor=0.25)
    own = [AutocastKwargs(cache_enabled=False), ddp, scaling]
    kwargs = accelerator_kwargs(policy, kwargs_handlers=own, log_with="all")
    assert kwargs["log_with"] == "all"
    assert kwargs["kwargs_handlers"] == [
        AutocastKwargs(cache_enabled=False),
        ddp,
        GradScalerKwargs(init_scale=256, growth_interval=2000, backoff_factor=0.25),
    ]
    assert scaling == GradScalerKwargs(backoff_factor=0.25)  # the user's own is left alone
    assert accelerator_kwargs(POLICY, kwargs_handlers=own)["kwargs_handlers"] == own
    assert accelerator_kwargs(policy, kwargs_handlers=[ddp])["kwargs_handlers"] == [ddp, GradScalerKwargs(256)]
    built = accelerator(POLICY, **accelerator_kwargs(POLICY, kwargs_handlers=own))
    assert built.ddp_handler is ddp
    assert built.autocast_handler.cache_enabled is False


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (AutocastKwargs(enabled=False), "AutocastKwargs.enabled: False in kwargs_handlers, True in the policy"),
        (GradScalerKwargs(enabled=False), "GradScalerKwargs.enabled: False in kwargs_handlers, True in the policy"),
        (GradScalerKwargs(init_scale=1024), "GradScalerKwargs.init_scale: 1024 in kwargs_handlers, 256 in the policy"),
        ("bf16", "mixed_precision: 'bf16' in accelerator_kwargs(…), 'fp16' from the policy"),
    ],
)
def test_what_contradicts_the_policy_is_an_error(given: Any, says: str) -> None:
    more: dict[str, Any] = {"mixed_precision": given} if given == "bf16" else {"kwargs_handlers": [given]}
    with pytest.raises(PolicyApplyError, match=re.escape(says)):
        accelerator_kwargs(Policy(autocast="fp16", loss_scale=LossScale(init=256)), **more)


def test_an_accelerator_that_departs_from_the_policy_or_that_prepared_the_model_is_an_error() -> None:
    with pytest.raises(PolicyApplyError, match=r"(?s)autocast: off here, bf16 in .*compile: off here, default in the"):
        apply_before_prepare(replace(POLICY, compile="default"), net(), accelerator(Policy()))
    AcceleratorState._reset_state(reset_partial_state=True)
    runs_on = accelerator(POLICY)
    with pytest.raises(PolicyApplyError, match=r"this Net went through accelerator\.prepare\(\) already"):
        apply_before_prepare(POLICY, runs_on.prepare(net()), runs_on)


def test_half_weights_and_static_scales_are_refused_as_its_scaler_knows_neither() -> None:
    half = "^Accelerate scales the loss beside its own autocast alone, not for half weights"
    with pytest.raises(PolicyApplyError, match=half):
        accelerator_kwargs("apex:O2")
    with pytest.raises(PolicyApplyError, match=half):
        apply_before_prepare("apex:O3", net(), Accelerator(cpu=True))
    with pytest.raises(PolicyApplyError, match=r"^Accelerate makes its own loss scaler, whose scale cannot be static"):
        accelerator_kwargs(Policy(autocast="fp16", loss_scale=LossScale(init=128, static=True)))
    assert accelerator_kwargs("apex:O1")["mixed_precision"] == "fp16"
