"""Where a model is, though it was looked up before: models are moved, and their modules replaced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from amptune.runtime.model_device import ModelDevice


def net() -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 2))


def to_meta(model: nn.Sequential) -> None:
    model.to("meta")


def replace_the_first_layer(model: nn.Sequential) -> None:
    inner = model[1]
    assert isinstance(inner, nn.Sequential)
    inner[0] = nn.Linear(2, 2, device="meta")


def replace_what_holds_it(model: nn.Sequential) -> None:
    model[1] = nn.Sequential(nn.Linear(2, 2, device="meta"))


def replace_the_parameter(model: nn.Sequential) -> None:
    model.get_submodule("1.0").weight = nn.Parameter(torch.empty(2, 2, device="meta"))


def remove_it(model: nn.Sequential) -> None:
    first = model.get_submodule("1.0")
    del first.weight
    first.register_parameter("bias", nn.Parameter(torch.empty(2, device="meta")))


@pytest.mark.parametrize(
    "change", [to_meta, replace_the_first_layer, replace_what_holds_it, replace_the_parameter, remove_it]
)
def test_a_model_is_found_where_it_is_now(change: Callable[[nn.Sequential], None]) -> None:
    model = net()
    where = ModelDevice(model)
    assert [where.device_type, where.device_type] == ["cpu", "cpu"]
    change(model)
    assert [where.device_type, where.device_type] == ["meta", "meta"]


def test_without_parameters_it_is_where_its_buffers_are_and_without_these_on_the_cpu() -> None:
    model = nn.BatchNorm1d(2, affine=False, device="meta")
    assert ModelDevice(model).device_type == "meta"
    assert ModelDevice(nn.ReLU()).device_type == "cpu"
