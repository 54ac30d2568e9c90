from __future__ import annotations

import torch
from torch import nn

from amptune.policy.settings import Fp32Rule, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.digest import model_digest


def net(width: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.BatchNorm2d(width), nn.ReLU())


def test_the_digest_is_the_same_under_a_policy_in_another_dtype_and_with_a_cache() -> None:
    model = net()
    digest = model_digest(model)
    assert digest.startswith("sha256:")
    policy = Policy(autocast="bf16", memory_format="channels_last", fp32_modules=(Fp32Rule(type="BatchNorm2d"),))
    with apply(policy, model):
        assert model_digest(model) == digest
    assert model_digest(net().double()) == digest
    model.register_buffer("cache", torch.zeros(9), persistent=False)  # which grows while a model runs
    assert model_digest(model) == digest


def test_another_architecture_has_another_digest() -> None:
    conv, norm, relu = net()
    others = [net(16), nn.Sequential(conv, norm, nn.GELU()), nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm, relu)]
    assert len({model_digest(one) for one in (net(), *others)}) == 4
