"""FP32 islands on a GPU: backward passes run in a thread of their own there, and TF32 is another time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benches import Called, workload_of
from test_fp32_islands import place_of
from torch import nn

from amptune.measure.bench.bench import Bench
from amptune.measure.modules.fp32_islands import TF32_SINCE, find_islands
from amptune.policy.settings import STOCK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WIDTH = 2048


def multiplied(own: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", enabled=False):
        return x.float() @ own.weight  # type: ignore[no-any-return]


def convolved(own: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cuda", enabled=False):
        return own.convolution(x.float()[:, None])[:, 0]  # type: ignore[no-any-return]


def test_both_passes_of_an_island_are_found_and_tf32_makes_products_faster() -> None:
    product = Called(multiplied, weight=nn.Parameter(torch.eye(WIDTH)))
    convolution = Called(convolved, convolution=nn.Conv1d(1, 1, 3, padding=1))
    linears = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(linears[0], nn.Sequential(nn.Sequential(product, convolution)), linears[1])
    bench = Bench(workload_of(model, (WIDTH,), batch_size=WIDTH), torch.device("cuda"))
    found = {island.module: island for island in find_islands(bench, STOCK, "bf16")}
    assert set(found) == {"1.0.0", "1.0.1.convolution"}
    island = found["1.0.0"]
    assert island.where == place_of(multiplied, "@")
    if torch.cuda.get_device_capability() >= TF32_SINCE:
        assert island.tf32_ms is not None
        assert island.tf32_ms < island.ms / 2
    else:
        assert island.tf32_ms is None


def test_a_model_without_islands_has_none_on_a_gpu() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Softmax(-1), nn.Linear(64, 64))
    bench = Bench(workload_of(model, (64,)), torch.device("cuda"))
    assert find_islands(bench, STOCK, "bf16") == ()
