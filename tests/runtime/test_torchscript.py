"""Models with parts that are TorchScript: scripted and traced modules."""

from __future__ import annotations

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
        torch.manual_seed(0)
        self.links = nn.ModuleList([nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for link in self.links:
            x = link(x)
        return x


def images() -> torch.Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def model_of(module: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(module, nn.Conv2d(4, 4, 1))


def scripted() -> nn.Module:
    module: nn.Module = torch.jit.script(Chain())
    return model_of(module)


def trained(model: nn.Module, policy: Policy) -> list[float]:
    """Returns the losses of three steps; the policy is undone, and the weights are in FP32 and their own layout."""
    before = {name: (tensor.dtype, tensor.stride()) for name, tensor in model.state_dict().items()}
    losses = []
    with apply(policy, model, protect_batch_norm=True) as tuned:
        optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            with tuned.autocast():
                loss = tuned.model(tuned.batch(images())).float().square().mean()
            tuned.scaler.scale(loss).backward()
            tuned.step(optimizer)
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    assert {name: (tensor.dtype, tensor.stride()) for name, tensor in model.state_dict().items()} == before
    return losses


POLICIES = [
    Policy(memory_format="channels_last"),
    Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="1"),)),
    Policy(autocast="fp16", loss_scale=LossScale(init=2.0**8)),
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_scripted_module_trains_as_the_module_it_was_made_from_and_a_traced_one_trains(policy: Policy) -> None:
    assert trained(scripted(), policy) == pytest.approx(trained(model_of(Chain()), policy), rel=1e-3)
    module: nn.Module = torch.jit.trace(Chain().eval(), images()).train()  # type: ignore[no-untyped-call]
    losses = trained(model_of(module), policy)
    assert losses == sorted(losses, reverse=True)


def test_scripted_modules_run_and_their_lists_do_not() -> None:
    model = scripted()
    assert [path for path, module in model.named_modules() if has_forward(module)] == [
        "", "0", "0.links.0", "0.links.1", "1",
    ]  # fmt: skip


def test_weights_of_a_scripted_module_are_not_held_in_half() -> None:
    model = scripted()
    with pytest.raises(PolicyApplyError, match=r"0\.links\.0 is a TorchScript module, whose checkpoints cannot"):
        apply(Policy(weights="half"), model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
