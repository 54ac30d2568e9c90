"""What a loop of the user's sets or gives is kept, and what cannot be trained is told with its cause."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benches import CPU, QUICK, measured, workload_of
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.data import DataLoader, TensorDataset

from amptune import Policy, Workload
from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import failure_of
from amptune.measure.loop.input_checks import changing_shapes, require_sound_input
from amptune.measure.modules.inspection import inspect_model
from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK, HalfRule
from amptune.search.space.knobs import SEARCHED


class Frozen(nn.Module):
    """Its `train()` keeps BatchNorm in evaluation mode, as detectors with frozen statistics do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.body[1].eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.body(x)
        return found


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = Frozen(), nn.Sequential(nn.Linear(8, 2), nn.Dropout().eval())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.backbone(x))
        return found


@pytest.mark.parametrize("build", [Frozen, Around])
def test_modes_are_as_the_users_train_leaves_them(build: type[nn.Module]) -> None:
    bench = Bench(workload_of(build), CPU)
    norm = next(module for module in bench.model.modules() if isinstance(module, nn.BatchNorm1d))
    before = norm.running_mean.clone()  # type: ignore[union-attr]
    measured(bench)
    assert torch.equal(norm.running_mean, before)  # type: ignore[arg-type]
    modes = {type(module).__name__: module.training for module in bench.model.modules()}
    assert (modes["BatchNorm1d"], modes["Linear"], modes.get("Dropout", False)) == (False, True, False)


def labels_of(first: Any, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    count = next(first)
    labels = torch.randint(3, (n,))
    return torch.randn(n, 8), labels.fill_(-100) if count % 4 == 1 else labels


def test_batches_that_break_the_loss_by_themselves_are_named() -> None:
    from itertools import count

    first = count()
    workload = workload_of(
        lambda: nn.Linear(8, 3),
        batch=lambda n: labels_of(first, n),
        loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
    )
    bench = Bench(workload, CPU)
    failure = bench.measure(STOCK, QUICK)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.in_batches) == ("nonfinite", True)
    assert "8 of 32 batches, the first of them number" in failure.message


class Sharpness(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "this needs a closure"
        return super().step(closure)


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sharpness])
def test_an_optimizer_that_runs_the_model_is_refused_before_time_is_spent(kind: Any) -> None:
    workload = workload_of(lambda: nn.Linear(8, 2), optimizer=lambda model: kind(model.parameters(), lr=0.1))
    with pytest.raises(TargetError, match="write the step as step"):
        inspect_model(Bench(workload, CPU), "")


def test_errors_of_the_update_are_told_from_those_of_the_model() -> None:
    weight = torch.zeros(2, requires_grad=True)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD([weight], 0.1)
    torch.autograd.backward(scaler.scale(weight.sum()))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError) as twice:
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError) as of_the_model:
        nn.Linear(2, 2)(torch.zeros(3))

    def closure() -> float:
        nn.Linear(2, 2)(torch.zeros(3))
        return 0.0

    with pytest.raises(RuntimeError) as within:
        torch.optim.LBFGS([weight]).step(closure)  # type: ignore[no-untyped-call]
    assert failure_of(twice.value).in_update
    assert not failure_of(of_the_model.value).in_update
    assert not failure_of(within.value).in_update


def test_half_precision_is_not_searched_for_a_model_in_float64() -> None:
    workload = workload_of(lambda: nn.Linear(8, 2).double(), batch=lambda n: torch.randn(n, 8, dtype=torch.float64))
    subject = inspect_model(Bench(workload, CPU), "")
    assert not subject.castable
    assert [finding.code for finding in subject.noticed] == ["float64"]
    assert [dtype for dtype in ("off", "bf16", "fp16") if SEARCHED["autocast"].matters(dtype, subject)] == ["off"]


def test_sparse_embeddings_are_neither_run_in_half_nor_fused() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(30, 8, sparse=True), nn.Linear(8, 2))

    workload = workload_of(build, batch=lambda n: torch.randint(30, (n, 4)))
    bench = Bench(workload, CPU)
    subject = inspect_model(bench, "")
    assert [module.path for module in subject.modules if not module.in_half] == ["0"]
    assert not subject.fusable
    outcome = bench.measure(Policy(autocast="bf16", half_modules=(HalfRule(path="0"),)), QUICK)
    assert isinstance(outcome, Failure)
    assert "sparse gradients" in outcome.message


def test_many_shapes_are_told_and_those_of_every_epoch_are_not() -> None:
    changing = workload_of(lambda: nn.Linear(8, 2), batch=lambda n: torch.randn(n, int(torch.randint(2, 20, ())), 8))
    (finding,) = changing_shapes(Bench(changing, CPU))
    assert finding.code == "changing-shapes"
    assert finding.figures["shapes"] > 2
    assert not list(changing_shapes(Bench(workload_of(lambda: nn.Linear(8, 2)), CPU)))


def test_no_batch_is_larger_than_the_data() -> None:
    data = TensorDataset(torch.randn(100, 8), torch.randint(4, (100,)))
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(data, batch_size=8, shuffle=True, drop_last=True)
    workload = Workload.from_loop(model, loader, nn.CrossEntropyLoss(), optimizer)
    assert require_sound_input(Bench(workload, CPU)).samples == 100
    assert require_sound_input(Bench(workload_of(lambda: nn.Linear(8, 2)), CPU)).samples is None
