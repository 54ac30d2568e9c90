"""Sparse and nested tensors in batches and buffers: drawn, restored, judged."""

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


def adjacency(layout: torch.layout) -> torch.Tensor:
    return (torch.rand(NODES, NODES) * (torch.rand(NODES, NODES) > 0.7)).to_sparse(layout=layout)


def judged(workload: Workload) -> list[str]:
    """Measures the workload twice, alike, and returns the parameters whose gradients are compared with FP32's."""
    bench = Bench(workload, CPU)
    assert measured(bench).losses == measured(bench).losses
    parity = judge(bench, STOCK, make_reference(bench, STOCK, math.inf))
    return [one.name for one in parity.gradients]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
def test_a_sparse_buffer_is_part_of_a_model_and_named_if_it_breaks(layout: torch.layout) -> None:
    def graph() -> nn.Module:
        aggregating = Called(lambda own, x: own.get_buffer("adjacency") @ x.relu().float())
        aggregating.register_buffer("adjacency", adjacency(layout))
        return nn.Sequential(nn.Linear(8, 8), aggregating, nn.Linear(8, 2))

    assert "0.weight" in judged(workload_of(graph, batch=lambda _: torch.randn(NODES, 8), batch_size=NODES))
    model = graph()
    assert list(nonfinite_in(model)) == []
    model.get_buffer("1.adjacency").values()[0] = math.nan
    assert list(nonfinite_in(model)) == ["1.adjacency"]


def nested(n: int) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.randn(2 + i % 4, 8) for i in range(n)], layout=torch.jagged)


@pytest.mark.parametrize("batch", [lambda n: (torch.randn(n, 8), adjacency(torch.sparse_csr)), lambda n: (nested(n),)])
def test_a_batch_may_hold_a_sparse_or_a_nested_tensor(batch: Any) -> None:
    def loss(model: nn.Module, parts: tuple[Any, ...]) -> torch.Tensor:
        out = model(parts[0])
        found = parts[1] @ out.float() if len(parts) > 1 else out.to_padded_tensor(0.0).float()
        return found.square().mean()  # type: ignore[no-any-return]

    assert judged(workload_of(nn.Linear(8, 2), batch=batch, loss=loss, batch_size=NODES)) == ["weight", "bias"]
