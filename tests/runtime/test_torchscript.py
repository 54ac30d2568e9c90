"""Models with parts that are TorchScript: scripted and traced modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amptune.errors import PolicyApplyError
from amptune.policy.settings import Fp32Rule, LossScale, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.module_precision import has_forward

# TorchScript is deprecated by torch itself, from 2.10 on.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.links = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for link in self.links:
            x = link(x)
        return x


def images() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def model_of(make: Any) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(make(Chain()), nn.Conv2d(4, 4, 1))


def trained(model: nn.Module, policy: Policy) -> list[float]:
    """Returns the losses of three steps; the policy is undone, and the weights are in FP32 and their own layout."""
    before = {name: (tensor.dtype, tensor.stride()) for name, tensor in model.state_dict().items()}
    with apply(policy, model, protect_batch_norm=True) as tuned:
        optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train = tuned.training_step(lambda one, x: one(x).float().square().mean(), optimizer)
        losses = [float(train(images())) for _ in range(3)]
    assert {name: (tensor.dtype, tensor.stride()) for name, tensor in model.state_dict().items()} == before
    return losses


POLICIES = [
    Policy(memory_format="channels_last"),
    Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="1"),)),
    Policy(autocast="fp16", loss_scale=LossScale(init=2.0**8)),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_scripted_module_trains_as_the_module_it_was_made_from(policy: Policy) -> None:
    expected = pytest.approx(trained(model_of(nn.Sequential), policy), rel=1e-3)
    assert trained(model_of(torch.jit.script), policy) == expected


def test_scripted_modules_run_their_lists_do_not_and_their_weights_are_not_held_in_half() -> None:
    model = model_of(torch.jit.script)
    running = [path for path, module in model.named_modules() if has_forward(module)]
    assert running == ["", "0", "0.links.0", "0.links.1", "1"]
    with pytest.raises(PolicyApplyError, match=r"0\.links\.0 is a TorchScript module, whose checkpoints cannot"):
        apply(Policy(weights="half"), model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
