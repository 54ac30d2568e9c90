"""Sparse and nested tensors in batches, buffers and gradients: drawn, restored, judged."""

from __future__ import annotations

import math

import pytest
import torch
from benches import CPU, measured, workload_of
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


class Graph(nn.Module):
    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.register_buffer("adjacency", adjacency(layout))
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.outer(self.get_buffer("adjacency") @ self.inner(x).relu().float())
        return out


def judged(workload: Workload) -> list[str]:
    """Measures the workload twice, alike, and returns the parameters whose gradients are compared with FP32's."""
    bench = Bench(workload, CPU)
    assert measured(bench).losses == measured(bench).losses
    parity = judge(bench, STOCK, make_reference(bench, STOCK, math.inf))
    return [one.name for one in parity.gradients]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_sparse_buffer_is_part_of_a_model_and_named_if_it_breaks(layout: torch.layout) -> None:
    workload = workload_of(lambda: Graph(layout), batch=lambda _: torch.randn(NODES, 8), batch_size=NODES)
    assert "inner.weight" in judged(workload)
    model = Graph(layout)
    assert list(nonfinite_in(model)) == []
    model.get_buffer("adjacency").values()[0] = math.nan
    assert list(nonfinite_in(model)) == ["adjacency"]


def test_a_batch_may_hold_a_sparse_matrix() -> None:
    def batch(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(NODES, 8), adjacency(torch.sparse_csr, int(torch.randint(1000, ())))

    workload = workload_of(
        nn.Linear(8, 2),
        batch=batch,
        loss=lambda model, batch: (batch[1] @ model(batch[0]).float()).square().mean(),
        batch_size=NODES,
    )
    assert judged(workload) == ["weight", "bias"]


def test_a_batch_may_be_nested() -> None:
    def batch(n: int) -> torch.Tensor:
        rows = [torch.randn(int(torch.randint(2, 6, ())), 8) for _ in range(n)]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)

    workload = workload_of(
        nn.Linear(8, 2),
        batch=batch,
        loss=lambda model, batch: model(batch).to_padded_tensor(0.0).float().square().mean(),
    )
    assert judged(workload) == ["weight", "bias"]


def test_sparse_gradients_have_a_norm() -> None:
    def norm(*, sparse: bool) -> object:
        model = lambda: nn.Sequential(nn.Embedding(50, 8, sparse=sparse), nn.Flatten(), nn.Linear(40, 2))  # noqa: E731
        bench = Bench(workload_of(model, batch=lambda n: torch.zeros(n, 5, dtype=torch.long)), CPU)
        with bench.on_device(STOCK) as (_, stepper):
            return stepper.first_step()

    assert norm(sparse=True) == pytest.approx(norm(sparse=False))
