"""Long training in the user's loop, in this process; and a fault that it sees and the numerics gate does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benches import CPU, workload_of
from simulated.recorded import H200
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from amptune import Workload
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import NonFiniteError
from amptune.measure.loop.long_training import train_long
from amptune.measure.numerics.long_comparison import CurvePair
from amptune.measure.numerics.parity import judge
from amptune.measure.numerics.reference import make_reference
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.gate.judgement import judged
from amptune.search.gate.long_look import LongLook

BF16 = amp_recipe("bf16")
ENOUGH_S = 1000.0


def squares(model: nn.Module, batch: Tensor) -> Any:
    return (model(batch).float() - torch.sin(batch[:, :1] - batch.mean(1, keepdim=True))).square().mean()


def workload(**parts: Any) -> Workload:
    adam = lambda model: torch.optim.Adam(model.parameters(), lr=0.01)  # noqa: E731
    given: dict[str, Any] = {"model": network(), "loss": squares, "optimizer": adam, "batch_size": 8} | parts
    return workload_of(given.pop("model"), **given)


def network(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


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
    model = network(lambda: nn.Dropout(0.5))
    bench = Bench(workload(loss=noting, model=model, **(parts if loader else {})), CPU)
    drawn = []
    for policy, seed in ((STOCK, 0), (BF16, 0), (BF16, 1)):
        seen.clear()
        losses(bench, policy, seed=seed, steps=12)
        drawn.append(seen[-12:])
    assert drawn[0] == drawn[1] != drawn[2]
    assert losses(bench, steps=12)[:5] == losses(bench, steps=5)
    assert len(set(drawn[0])) == 12


def test_training_ends_when_its_time_is_over_but_takes_a_step() -> None:
    assert len(train_long(Bench(workload(), CPU), STOCK, 10**9, 0, 0.0).losses) == 1


def test_a_loss_that_is_not_finite_ends_training_soon() -> None:
    steps: list[int] = []

    def breaking(model: nn.Module, batch: Tensor) -> Any:
        steps.append(0)
        return squares(model, batch) * (math.inf if len(steps) > 100 else 1.0)

    with pytest.raises(NonFiniteError, match="the loss is inf at step"):
        losses(Bench(workload(loss=breaking), CPU), steps=10**6)
    assert len(steps) < 300


def test_the_curve_ends_with_what_evaluate_gives_and_the_buffers() -> None:
    model = network(lambda: nn.BatchNorm1d(8))
    curve = train_long(Bench(workload(model=model, evaluate=lambda _: 0.75), CPU), BF16, 4, 0, ENOUGH_S)
    assert curve.evaluated == 0.75
    assert set(curve.buffers) == {"0.running_mean", "0.running_var"}


class Scaled(nn.Module):
    """Divides by the average size of what it saw, kept in half: from 0.25 on, an addition of 0.001 is rounded away."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        half = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
        average = self.average.to(half)
        average = average + (0.001 * (x.square().mean() - average)).to(half)
        self.average.copy_(average.detach())
        return x / (1.0 + self.average)


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "steps", "agrees"), [((Scaled,), 1000, False), ((), 200, True)])
def test_the_long_look_finds_what_the_gate_passes(layers: Any, steps: int, agrees: bool) -> None:
    bench = Bench(workload(model=network(*layers)), CPU)
    judgement = judged(BF16, judge(bench, BF16, make_reference(bench, STOCK, ENOUGH_S)))
    assert judgement.passes
    assert judgement.used < 0.2
    runs = {one: [train_long(bench, one, steps, seed, ENOUGH_S) for seed in range(3)] for one in (STOCK, BF16)}
    pairs = tuple(CurvePair(seed=i, fp32=runs[STOCK][i], policy=runs[BF16][i]) for i in range(3))
    look = LongLook(policy=BF16, fp32=STOCK, name="", hardware=H200, steps=steps, seeds=3, pairs=pairs)
    assert look.agreement == ("met" if agrees else "missed")
    named = "does not train like FP32: the buffer 0.average ends 45% off FP32's"
    assert str(look.findings[0]).startswith(named) != agrees
