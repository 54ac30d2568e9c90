"""A step of the user's own may have several optimizers, as a GAN's has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benches import CPU, workload_of
from torch import nn

import amptune
from amptune import Policy
from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.modules.inspection import inspect_model


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))


def optimizers_of(model: nn.Module) -> tuple[torch.optim.Optimizer, ...]:
    first, second = model.get_submodule("0"), model.get_submodule("1")
    return torch.optim.Adam(first.parameters()), torch.optim.SGD(second.parameters(), lr=1e-2)


def step(_: object, model: nn.Module, optimizers: Any, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(batch).square().mean()
    torch.autograd.backward(loss)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss


def of_two(**more: Any) -> amptune.Workload:
    return workload_of(net, **{"loss": None, "step": step, "optimizer": optimizers_of, **more})


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_step_gets_its_optimizers_as_they_were_returned_and_each_is_fused(kind: Callable[[Any], Any]) -> None:
    def looking(tuned: object, model: nn.Module, optimizers: Any, batch: torch.Tensor) -> torch.Tensor:
        assert type(optimizers) is kind
        assert [type(one) for one in optimizers] == [torch.optim.Adam, torch.optim.SGD]
        return step(tuned, model, optimizers, batch)

    bench = Bench(of_two(step=looking, optimizer=lambda model: kind(optimizers_of(model))), CPU)
    assert inspect_model(bench, "digest").fusable
    with bench.on_device(Policy(fused_optimizer=True)) as (_, stepper):
        stepper()
        assert [one.param_groups[0]["fused"] for one in stepper.optimizers] == [True, True]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"optimizer": lambda model: (*optimizers_of(model), optimizers_of(net())[1])}, "2 parameters, and none is"),
        ({"step": None, "loss": lambda model, x: model(x).mean()}, r"returned 2 optimizers, .* has one"),
        ({"optimizer": lambda _: (1,)}, r"optimizer\(model\) returned tuple of int, not a torch.optim.Optimizer, or a"),
        ({"optimizer": lambda _: []}, r"optimizer\(model\) returned list of nothing"),
        ({"optimizer": lambda _: None}, r"optimizer\(model\) returned NoneType"),
    ],
)
def test_what_is_not_the_models_optimizers_is_an_error(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(TargetError, match=words):
        inspect_model(Bench(of_two(**parts), CPU), "digest")
