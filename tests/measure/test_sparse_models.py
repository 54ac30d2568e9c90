"""Sparse and nested tensors in batches, buffers and gradients: drawn, restored, judged."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from benches import CPU, Called, measured, workload_of
from torch import nn

from amptune.measure.bench.bench import Bench
from amptune.measure.bench.step import nonfinite_in
from amptune.measure.numerics.parity import judge
from amptune.measure.numerics.reference import make_reference
from amptune.policy.settings import STOCK
from amptune.workload.workload import Workload

# What torch says of its sparse and nested tensors, at the first of each.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Sparse :UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]

NODES = 16
LAYOUTS = (torch.sparse_coo, torch.sparse_csr)


def adjacency(layout: torch.layout, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    dense = torch.rand(NODES, NODES, generator=generator) * (torch.rand(NODES, NODES, generator=generator) > 0.7)
    return dense.to_sparse(layout=layout)


def aggregated(own: Any, x: torch.Tensor) -> torch.Tensor:
    return own.get_buffer("adjacency") @ x.relu().float()  # type: ignore[no-any-return]


def graph(layout: torch.layout) -> nn.Module:
    aggregating = Called(aggregated)
    aggregating.register_buffer("adjacency", adjacency(layout))
    return nn.Sequential(nn.Linear(8, 8), aggregating, nn.Linear(8, 2))


def judged(workload: Workload) -> list[str]:
    """Measures the workload twice, alike, and returns the parameters whose gradients are compared with FP32's."""
    bench = Bench(workload, CPU)
    assert measured(bench).losses == measured(bench).losses
    parity = judge(bench, STOCK, make_reference(bench, STOCK, math.inf))
    return [one.name for one in parity.gradients]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_sparse_buffer_is_part_of_a_model_and_named_if_it_breaks(layout: torch.layout) -> None:
    workload = workload_of(lambda: graph(layout), batch=lambda _: torch.randn(NODES, 8), batch_size=NODES)
    assert "0.weight" in judged(workload)
    model = graph(layout)
    assert list(nonfinite_in(model)) == []
    model.get_buffer("1.adjacency").values()[0] = math.nan
    assert list(nonfinite_in(model)) == ["1.adjacency"]


def with_a_sparse_matrix(n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(n, 8), adjacency(torch.sparse_csr, int(torch.randint(1000, ())))


def nested(n: int) -> tuple[torch.Tensor, ...]:
    rows = [torch.randn(int(torch.randint(2, 6, ())), 8) for _ in range(n)]
    return (torch.nested.nested_tensor(rows, layout=torch.jagged),)


@pytest.mark.parametrize("batch", [with_a_sparse_matrix, nested])
def test_a_batch_may_hold_a_sparse_or_a_nested_tensor(batch: Any) -> None:
    def loss(model: nn.Module, parts: tuple[Any, ...]) -> torch.Tensor:
        out = model(parts[0])
        found = parts[1] @ out.float() if len(parts) > 1 else out.to_padded_tensor(0.0).float()
        return found.square().mean()  # type: ignore[no-any-return]

    workload = workload_of(nn.Linear(8, 2), batch=batch, loss=loss, batch_size=NODES)
    assert judged(workload) == ["weight", "bias"]
