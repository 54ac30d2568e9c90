"""Wrong inputs are told before the budget is spent on them."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from benches import CPU, step_of, workload_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from amptune import Workload
from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.loop.input_checks import require_sound_input
from amptune.measure.modules.inspection import inspect_model


def check(workload: Workload) -> None:
    bench = Bench(workload, CPU)
    require_sound_input(bench)
    inspect_model(bench, "digest")


def of(**more: Any) -> Workload:
    return workload_of(lambda: nn.Linear(8, 2), **more)


@pytest.mark.parametrize("rows", [64, 33])
def test_a_batch_of_another_number_of_samples_is_an_error(rows: int) -> None:
    with pytest.raises(TargetError, match=rf"batch\(32\) returns {rows} samples.* would count 32.*batch_size={rows}"):
        check(of(batch=lambda _: torch.randn(rows, 8), batch_size=32))


@pytest.mark.parametrize(
    "batch",
    [
        lambda n: torch.randn(5 * n, 8),  # tokens of n texts, packed
        lambda n: torch.randn(6, n, 8),  # time first
        lambda _: (torch.randn(40, 8), torch.zeros(7)),  # a graph: nodes and edges
    ],
)
def test_what_holds_n_samples_in_another_way_passes(batch: Any) -> None:
    check(of(batch=batch, loss=lambda model, x: model(x[0] if isinstance(x, tuple) else x).square().mean()))


def test_an_optimizer_or_a_loss_of_another_model_is_an_error() -> None:
    other = nn.Linear(8, 2)
    with pytest.raises(TargetError, match="holds 2 parameters, and none is the model's"):
        check(of(optimizer=lambda _: torch.optim.SGD(other.parameters(), lr=0.1)))
    with pytest.raises(TargetError, match="no gradient reaches the optimizer's parameters"):
        check(of(loss=lambda _, batch: other(batch).square().mean()))


def test_a_step_that_never_steps_is_an_error_and_one_that_accumulates_or_has_an_own_optimizer_is_not() -> None:
    calls = count(1)

    def accumulating(*given: Any) -> torch.Tensor:
        return step_of("backward" if next(calls) % 4 else "backward scaler-step zero")(*given)

    def with_its_own(tuned: Any, model: Any, _: Any, batch: Any) -> torch.Tensor:
        return step_of("backward step zero")(tuned, model, torch.optim.SGD(model.parameters(), lr=0.1), batch)

    check(of(loss=None, step=accumulating))
    check(of(loss=None, step=with_its_own))
    with pytest.raises(TargetError, match="neither did the optimizer step nor a weight change"):
        check(of(loss=None, step=step_of("backward")))


def test_a_loader_is_asked_for_a_batch() -> None:
    check(of(loader=lambda n: DataLoader(TensorDataset(torch.randn(32, 8)), n)))
    with pytest.raises(TargetError, match=r"loader\(4\) yields no batch: is its dataset empty"):
        check(of(loader=lambda n: DataLoader([], n)))  # type: ignore[arg-type]  # a list is a dataset
