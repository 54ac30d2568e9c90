"""A workload of any model, and one measurement of it on a bench."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from amptune import Policy, Workload
from amptune.measure.bench.bench import Bench
from amptune.measure.results.outcome import Effort, Measurement
from amptune.policy.settings import STOCK

QUICK = Effort(warmup_s=0.05, measure_s=0.01, min_steps=2)
CPU = torch.device("cpu")


def workload_of(model: nn.Module | Callable[[], nn.Module], shape: tuple[int, ...] = (8,), **more: object) -> Workload:
    parts: dict[str, object] = {
        "model": (lambda: model) if isinstance(model, nn.Module) else model,
        "batch": lambda n: torch.randn(n, *shape),
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "batch_size": 4,
    }
    return Workload(**{**parts, **more})  # type: ignore[arg-type]  # parts by name


def require_lstm_in_bf16(device: torch.device = CPU) -> None:
    """Skips the test where a CPU has no LSTM in bf16, as one without AVX-512 has none."""
    try:
        with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
            nn.LSTM(2, 2, device=device)(torch.ones(1, 1, 2, device=device))
    except RuntimeError as error:
        pytest.skip(str(error))


def measured(bench: Bench, policy: Policy = STOCK) -> Measurement:
    outcome = bench.measure(policy, QUICK)
    assert isinstance(outcome, Measurement), outcome
    return outcome
