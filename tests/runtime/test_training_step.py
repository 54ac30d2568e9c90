"""`tuned.training_step`: the README's loop in one call, to the last bit."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from training import Batch, Net, batches, net, same_weights

from amptune.errors import PolicyApplyError
from amptune.policy.settings import LossScale, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.tuned import Tuned

POLICIES = [
    Policy(),
    Policy(autocast="bf16", accumulate=3),
    Policy(autocast="fp16", loss_scale=LossScale(growth_interval=3)),
    Policy(autocast="fp16", loss_scale=LossScale(init=2.0**40), accumulate=2, fused_optimizer=True),
    Policy(weights="half", master_weights=True),
]


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def built(tuned: Tuned, model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = tuned.optimizer(torch.optim.AdamW(model.parameters(), lr=0.05))
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)


Trained = tuple[list[torch.Tensor], Net, Any]


def written_out(policy: Policy, data: Sequence[Batch], clip: float | None) -> Trained:
    model, losses = net(), []
    with apply(policy, model) as tuned:
        optimizer, schedule = built(tuned, model)
        for i, batch in enumerate(data):
            with tuned.autocast():
                loss = loss_of(tuned.model, tuned.batch(batch))
                part = loss / tuned.accumulate
            tuned.scaler.scale(part).backward()
            if (i + 1) % tuned.accumulate == 0:
                if clip is not None:
                    tuned.scaler.unscale_(optimizer)
                    nn.utils.clip_grad_norm_(model.parameters(), clip)
                tuned.scaler.step(optimizer)
                tuned.scaler.update()
                optimizer.zero_grad()
                schedule.step()
            losses.append(loss.detach())
        return losses, model, (optimizer.state_dict(), tuned.scaler.state_dict())


def in_one_call(policy: Policy, data: Sequence[Batch], clip: float | None) -> Trained:
    model, losses = net(), []
    with apply(policy, model) as tuned:
        optimizer, schedule = built(tuned, model)
        train = tuned.training_step(loss_of, optimizer, clip)
        assert not train.has_updated
        for i, batch in enumerate(data):
            losses.append(train(batch))
            assert not losses[-1].requires_grad
            assert train.has_updated == ((i + 1) % policy.accumulate == 0)
            assert train.has_updated == all(weight.grad is None for weight in model.parameters())
            if train.has_updated:
                schedule.step()
        return losses, model, (optimizer.state_dict(), tuned.scaler.state_dict())


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")  # the first steps overflow
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_one_call_is_the_readmes_loop_to_the_last_bit(policy: Policy, clip: float | None) -> None:
    data = batches(12)
    expected, plain, states = written_out(policy, data, clip)
    losses, model, own_states = in_one_call(policy, data, clip)
    assert all(map(torch.equal, losses, expected))
    assert same_weights(model, plain)
    torch.testing.assert_close(own_states, states, rtol=0, atol=0, equal_nan=True)


def test_a_batch_whose_loss_raises_is_no_micro_batch_and_several_optimizers_are_refused() -> None:
    model = net()
    first, second = batches(2)
    with apply(Policy(accumulate=2), model) as tuned:
        train = tuned.training_step(loss_of, torch.optim.SGD(model.parameters(), lr=0.1))
        train(first)
        with pytest.raises(RuntimeError):
            train((first[0][:, :3], first[1]))
        train(second)
        assert train.has_updated
        several: Any = [torch.optim.SGD(model.parameters(), lr=0.1)] * 2
        with pytest.raises(PolicyApplyError, match=r"one built torch\.optim\.Optimizer, not list"):
            tuned.training_step(loss_of, several)


class Parallel(DistributedDataParallel):
    """Without a process group; counts the passes without an exchange."""

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)
        self.model, self.alone = model, 0

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)

    def no_sync(self) -> Any:
        self.alone += 1
        return nullcontext()


def test_ranks_exchange_gradients_once_a_step() -> None:
    model, plain = net(), net()
    for of in (model, plain):
        with apply(Policy(accumulate=3), of) as tuned:
            parallel = Parallel(tuned.model)
            optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
            train = tuned.training_step(loss_of, optimizer, model=parallel if of is model else None)
            for batch in batches(6):
                train(batch)
            assert parallel.alone == (4 if of is model else 0)
    assert same_weights(model, plain)
