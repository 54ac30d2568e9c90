"""Long training in the user's loop, in this process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from benches import CPU, workload_of
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import NonFiniteError
from amptune.measure.loop.long_training import train_long
from amptune.policy.settings import STOCK, Policy, amp_recipe

BF16 = amp_recipe("bf16")
ENOUGH_S = 1000.0


def squares(model: nn.Module, batch: Tensor) -> Any:
    return (model(batch).float() - torch.sin(batch)).square().mean()


def bench_of(**parts: Any) -> Bench:
    model = lambda: nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8))  # noqa: E731
    usual: dict[str, Any] = {"loss": squares, "batch_size": 8}
    return Bench(workload_of(model, **usual | parts), CPU)


def losses(bench: Bench, policy: Policy = STOCK, *, seed: int = 0, steps: int = 20) -> tuple[float, ...]:
    return train_long(bench, policy, steps, seed, ENOUGH_S).losses


@pytest.mark.parametrize("loader", [False, True])
def test_every_policy_trains_on_the_same_batches_of_its_seed_and_shuffles_each_epoch(*, loader: bool) -> None:
    """Also behind dropout, which draws from the same generator: each step is seeded by itself."""
    seen: list[float] = []

    def noting(model: nn.Module, batch: Tensor) -> Any:
        batch = batch[0] if loader else batch
        seen.append(float(batch.sum()))
        return squares(model, batch)

    data = TensorDataset(torch.randn(32, 8))
    parts = {"loader": lambda n: DataLoader(data, n, shuffle=True), "batch": lambda n: [torch.randn(n, 8)]}
    bench = bench_of(loss=noting, **(parts if loader else {}))
    drawn = []
    for policy, seed in ((STOCK, 0), (BF16, 0), (BF16, 1)):
        seen.clear()
        losses(bench, policy, seed=seed, steps=12)
        drawn.append(seen[-12:])
    assert drawn[0] == drawn[1] != drawn[2]
    assert losses(bench, steps=12)[:5] == losses(bench, steps=5)
    assert len(set(drawn[0])) == 12


def test_training_ends_when_its_time_is_over_but_takes_a_step() -> None:
    assert len(train_long(bench_of(), STOCK, 10**9, 0, 0.0).losses) == 1


def test_a_loss_that_is_not_finite_ends_training_soon() -> None:
    steps: list[int] = []

    def breaking(model: nn.Module, batch: Tensor) -> Any:
        steps.append(0)
        return squares(model, batch) * (math.inf if len(steps) > 100 else 1.0)

    with pytest.raises(NonFiniteError, match="the loss is inf at step"):
        losses(bench_of(loss=breaking), steps=10**6)
    assert len(steps) < 300


def test_the_curve_ends_with_what_evaluate_gives_and_the_buffers() -> None:
    curve = train_long(bench_of(evaluate=lambda _: 0.75), BF16, 4, 0, ENOUGH_S)
    assert curve.evaluated == 0.75
    assert set(curve.buffers) == {"0.running_mean", "0.running_var"}
