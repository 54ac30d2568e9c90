"""Which axis of a batch holds the samples: told by the loader where it can be, asked for where it cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from amptune import Workload
from amptune.errors import TargetError


def batches(*shapes: tuple[tuple[int, ...], ...]) -> list[Any]:
    return [tuple(torch.zeros(shape) for shape in one) for one in shapes]


def axis_and_size(model: nn.Module, loader: Any, **told: Any) -> tuple[int, int]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    workload = Workload.from_loop(model, loader, lambda model, batch: model(batch).sum(), optimizer, **told)
    return workload.batch_dim, workload.batch_size


RECURRENT, PLAIN = nn.LSTM(4, 4), nn.Linear(4, 4)


@pytest.mark.parametrize(
    ("model", "loader", "told", "found"),
    [
        (PLAIN, batches(((20, 4), (20,)), ((20, 4), (20,)), ((7, 4), (7,))), {}, (0, 20)),
        (PLAIN, batches(((35, 20), (20,)), ((31, 20), (20,)), ((9, 20), (20,))), {}, (1, 20)),
        (PLAIN, batches(((35, 20),), ((31, 20),), ((9, 20),)), {}, (1, 20)),
        (RECURRENT, batches(((35, 20), (35, 20))), {"batch_dim": 1}, (1, 20)),
        (RECURRENT, batches(((35, 20), (35, 20))), {"batch_dim": 0}, (0, 35)),
        (RECURRENT, batches(((35, 20, 4), (20,))), {}, (1, 20)),
        (RECURRENT, DataLoader(batches(((35, 20),)), batch_size=16), {}, (0, 16)),  # type: ignore[arg-type]
    ],
)
def test_the_batch_size_lies_along_the_axis_of_samples(
    model: nn.Module, loader: Any, told: dict[str, int], found: tuple[int, int]
) -> None:
    assert axis_and_size(model, loader, **told) == found


@pytest.mark.parametrize(
    ("model", "loader"),
    [
        (RECURRENT, batches(((35, 20), (35, 20)))),  # either may be the samples
        (RECURRENT, batches(((35, 20, 8), (35, 35)))),  # a mask beside them
        (PLAIN, batches(((4, 3), (17, 5)))),  # images and boxes
        (PLAIN, batches(((35, 20),), ((31, 19),), ((9, 4),))),
    ],
)
def test_what_cannot_be_told_is_asked_for(model: nn.Module, loader: Any) -> None:
    with pytest.raises(TargetError, match=r"Workload\(batch_dim=1\).*batch_size="):
        axis_and_size(model, loader)
    assert axis_and_size(model, loader, batch_size=5)[1] == 5


def test_an_axis_that_no_tensor_has_tells_nothing() -> None:
    with pytest.raises(TargetError, match="no tensor of its batches has an axis 5"):
        axis_and_size(PLAIN, batches(((4, 3),)), batch_dim=5)
    with pytest.raises(TargetError, match="batch_dim must be an axis, 0 or 1 as a rule, not '1'"):
        axis_and_size(PLAIN, batches(((4, 3),)), batch_dim="1")


@pytest.mark.parametrize("wrong", [-1, 1.0, True, None])
def test_an_axis_is_a_number(wrong: Any) -> None:
    with pytest.raises(TargetError, match="batch_dim must be an axis"):
        Workload(model=lambda: PLAIN, batch=torch.zeros, optimizer=lambda m: m, loss=lambda m, b: m(b), batch_dim=wrong)
