"""Long training in the user's loop, in this process; and two faults that it sees and the numerics gate does not."""

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

BF16, FP16 = amp_recipe("bf16"), amp_recipe("fp16")
ENOUGH_S = 1000.0


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = (model(batch).float() - torch.sin(batch[:, :1] - batch.mean(1, keepdim=True))).square().mean()
    return loss


def workload(**parts: Any) -> Workload:
    adam = lambda model: torch.optim.Adam(model.parameters(), lr=0.01)  # noqa: E731
    given: dict[str, Any] = {"model": network(), "loss": squares, "optimizer": adam, "batch_size": 8} | parts
    return workload_of(given.pop("model"), **given)


def network(*layers: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(layer() for layer in layers), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def losses(bench: Bench, policy: Policy = STOCK, *, seed: int = 0, steps: int = 20) -> tuple[float, ...]:
    return train_long(bench, policy, steps, seed, ENOUGH_S).losses


@pytest.mark.slow
def test_a_seed_gives_the_same_training_and_another_one_other_data() -> None:
    bench = Bench(workload(), CPU)
    assert losses(bench) == losses(bench)
    assert losses(bench) != losses(bench, seed=1)
    assert losses(bench)[:5] == losses(bench, steps=5)


@pytest.mark.parametrize("loader", [False, True])
def test_every_policy_trains_on_the_same_batches_of_its_seed_and_shuffles_each_epoch(*, loader: bool) -> None:
    """Also behind dropout, which draws from the same generator: each step is seeded by itself."""
    seen: list[float] = []

    def noting(model: nn.Module, batch: Tensor) -> Tensor:
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
    assert len(set(drawn[0])) == 12


def test_training_ends_when_its_time_is_over_but_takes_a_step() -> None:
    assert len(train_long(Bench(workload(), CPU), STOCK, 10**9, 0, 0.0).losses) == 1


def test_a_loss_that_is_not_finite_ends_training_soon() -> None:
    steps: list[int] = []

    def breaking(model: nn.Module, batch: Tensor) -> Tensor:
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


# --- what the gate does not see ---------------------------------------------------------------------------------------


def in_half(x: Tensor) -> Tensor:
    """What user code does with `.half()`: inside autocast the result is half."""
    return x.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else x


class Centred(nn.Module):
    """Subtracts each row's mean, in half: a row that lies far from 0 loses all its digits."""

    def forward(self, x: Tensor) -> Tensor:
        x = in_half(x)
        return x - x.mean(1, keepdim=True)


def one_batch_in_forty_lies_far_from_zero(n: int) -> Tensor:
    return torch.randn(n, 8) + (1000.0 if torch.rand(()) < 1 / 40 else 0.0)


def epochs_of_forty(n: int) -> list[Tensor]:
    far = int(torch.randint(40, ()))
    return [torch.randn(n, 8) + (1000.0 if i == far else 0.0) for i in range(40)]


class Scaled(nn.Module):
    """Divides by the average size of what it saw, kept in half: from 0.25 on, an addition of 0.001 is rounded away."""

    average: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        average = in_half(self.average)
        average = average + in_half(0.001 * (x.square().mean() - average))
        self.average.copy_(average.detach())
        return x / (1.0 + self.average)


RARE = workload(model=network(Centred), batch=one_batch_in_forty_lies_far_from_zero, loader=epochs_of_forty)
LATE = workload(model=network(Scaled))


def looked_at(work: Workload, policy: Policy, steps: int) -> LongLook:
    bench = Bench(work, CPU)
    runs = {one: [train_long(bench, one, steps, seed, ENOUGH_S) for seed in range(3)] for one in (STOCK, policy)}
    pairs = (CurvePair(seed=i, fp32=runs[STOCK][i], policy=runs[policy][i]) for i in range(3))
    return LongLook(policy=policy, fp32=STOCK, name="", hardware=H200, steps=steps, seeds=3, pairs=tuple(pairs))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "steps", "named"),
    [
        pytest.param(RARE, 600, "loss in all 600 steps is", id="in one batch of forty"),
        pytest.param(LATE, 1000, "the buffer 0.average ends 45% off FP32's", id="after hundreds of steps"),
    ],
)
def test_the_long_look_finds_what_the_gate_passes(work: Workload, steps: int, named: str) -> None:
    bench = Bench(work, CPU)
    judgement = judged(BF16, judge(bench, BF16, make_reference(bench, STOCK, ENOUGH_S)))
    assert judgement.passes
    assert judgement.used < 0.2
    look = looked_at(work, BF16, steps)
    assert look.agreement == "missed"
    assert str(look.findings[0]).startswith(f"does not train like FP32: {named}")


@pytest.mark.slow
@pytest.mark.parametrize("policy", [BF16, FP16], ids=str)
def test_a_healthy_model_trains_like_fp32(policy: Policy) -> None:
    look = looked_at(workload(), policy, 200)
    assert look.agreement == "met", look.findings[0]
