"""A step of the user's own may have several optimizers, as a GAN's has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benches import CPU, measured, workload_of
from torch import nn

import amptune
from amptune import Policy
from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.modules.inspection import inspect_model
from amptune.policy.settings import amp_recipe
from amptune.runtime.tuned import Tuned

Optimizers = tuple[torch.optim.Optimizer, torch.optim.Optimizer]


def net() -> nn.Module:
    return nn.ModuleDict({"generator": nn.Linear(8, 8), "critic": nn.Linear(8, 1)})


def optimizers_of(model: nn.Module) -> Optimizers:
    generator, critic = model.get_submodule("generator"), model.get_submodule("critic")
    return torch.optim.Adam(generator.parameters(), lr=1e-3), torch.optim.SGD(critic.parameters(), lr=1e-2)


def step(tuned: Tuned, model: Any, optimizers: Optimizers, batch: torch.Tensor) -> Any:
    loss = torch.zeros(())
    for optimizer, sign in zip(optimizers, (-1.0, 1.0), strict=True):
        model.zero_grad()
        with tuned.autocast():
            fake, real = (model["critic"](x) for x in (model["generator"](batch.neg()), tuned.batch(batch)))
            loss = sign * (fake.sigmoid() - real.sigmoid()).mean()
        torch.autograd.backward(tuned.scaler.scale(loss))
        tuned.scaler.step(optimizer)
    tuned.scaler.update()
    return loss


def gan(**more: Any) -> amptune.Workload:
    return workload_of(net, **{"loss": None, "step": step, "optimizer": optimizers_of, **more})


def test_a_step_with_two_optimizers_is_measured_and_trains_both_parts() -> None:
    bench = Bench(gan(), CPU)
    initial = {name: value.clone() for name, value in bench.model.state_dict().items()}
    assert measured(bench, amp_recipe("fp16")).samples_per_step == 4
    assert all(not torch.equal(value, initial[name]) for name, value in bench.model.state_dict().items())


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_step_gets_its_optimizers_as_they_were_returned_and_each_is_fused(kind: Callable[[Any], Any]) -> None:
    def looking(tuned: Tuned, model: nn.Module, optimizers: Any, batch: torch.Tensor) -> Any:
        assert type(optimizers) is kind
        assert [type(one) for one in optimizers] == [torch.optim.Adam, torch.optim.SGD]
        return step(tuned, model, optimizers, batch)

    bench = Bench(gan(step=looking, optimizer=lambda model: kind(optimizers_of(model))), CPU)
    assert inspect_model(bench, "digest").fusable
    with bench.on_device(Policy(fused_optimizer=True)) as (_, stepper):
        stepper()
        assert [one.param_groups[0]["fused"] for one in stepper.optimizers] == [True, True]


def with_foreign(model: nn.Module) -> Optimizers:
    return optimizers_of(model)[0], optimizers_of(net())[1]


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"optimizer": with_foreign}, "holds 2 parameters, and none is the model's"),
        (
            {"step": None, "loss": lambda model, x: model["critic"](x).mean()},
            r"returned 2 optimizers, .* has one",
        ),
        ({"optimizer": lambda _: (1,)}, r"optimizer\(model\) returned tuple of int, not a torch.optim.Optimizer, or a"),
        ({"optimizer": lambda _: []}, r"optimizer\(model\) returned list of nothing"),
        ({"optimizer": lambda _: None}, r"optimizer\(model\) returned NoneType"),
    ],
)
def test_what_is_not_the_models_optimizers_is_an_error(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(TargetError, match=words):
        inspect_model(Bench(gan(**parts), CPU), "digest")
