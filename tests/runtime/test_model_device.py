"""Where a model is, though it was looked up before: models are moved, and their modules replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from amptune.runtime.model_device import ModelDevice


def remove_the_parameter(model: Any) -> None:
    del model[1][0].weight
    model[1][0].register_parameter("bias", nn.Parameter(torch.empty(2, device="meta")))


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.to("meta"),
        lambda model: model[1].__setitem__(0, nn.Linear(2, 2, device="meta")),
        remove_the_parameter,
    ],
)
def test_a_model_is_found_where_it_is_now(change: Callable[[nn.Sequential], None]) -> None:
    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2))
    where = ModelDevice(model)
    assert [where.device_type, where.device_type] == ["cpu", "cpu"]
    change(model)
    assert [where.device_type, where.device_type] == ["meta", "meta"]
    assert ModelDevice(nn.BatchNorm1d(2, affine=False, device="meta")).device_type == "meta"
    assert ModelDevice(nn.ReLU()).device_type == "cpu"
