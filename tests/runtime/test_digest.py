from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from amptune.policy.settings import Fp32Rule, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.digest import model_digest


def net(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU())


def test_the_digest_is_the_same_under_a_policy_on_a_copy_and_in_another_dtype() -> None:
    model = net()
    digest = model_digest(model)
    assert digest.startswith("sha256:")
    policy = Policy(autocast="bf16", memory_format="channels_last", fp32_modules=(Fp32Rule(type="BatchNorm2d"),))
    with apply(policy, model):
        assert model_digest(model) == digest
    assert model_digest(copy.deepcopy(model)) == digest
    assert model_digest(net().double()) == digest


@pytest.mark.parametrize(
    "other",
    [
        net(16),
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU()),
        nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
    ],
)
def test_another_architecture_has_another_digest(other: nn.Module) -> None:
    assert model_digest(other) != model_digest(net())


def test_a_cache_that_grows_while_a_model_runs_does_not_count() -> None:
    model = net()
    digest = model_digest(model)
    model.register_buffer("cache", torch.zeros(9), persistent=False)
    assert model_digest(model) == digest
