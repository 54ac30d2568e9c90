"""A step of the user's own runs under the guard before the budget is spent on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from benches import CPU, workload_of
from torch import nn

from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.loop.step_mistakes import mistakes_in_step, mistakes_under
from amptune.policy.settings import STOCK, amp_recipe
from amptune.runtime.tuned import Tuned

Step = Callable[[Tuned, nn.Module, torch.optim.Optimizer, torch.Tensor], torch.Tensor]


def bench_of(step: Step | None, **more: Any) -> Bench:
    parts: dict[str, Any] = {} if step is None else {"loss": None, "step": step}
    return Bench(workload_of(lambda: nn.Linear(8, 2), **parts, **more), CPU)


def forward(tuned: Tuned, model: nn.Module, batch: torch.Tensor) -> Any:
    with tuned.autocast():
        return model(batch).float().square().mean()


def finish(tuned: Tuned, optimizer: torch.optim.Optimizer) -> None:
    tuned.scaler.step(optimizer)
    tuned.scaler.update()
    optimizer.zero_grad()


def correct(tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss = forward(tuned, model, batch)
    tuned.scaler.scale(loss).backward()
    tuned.scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    finish(tuned, optimizer)
    return loss  # type: ignore[no-any-return]


def scaler_and_optimizer(
    tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    loss = forward(tuned, model, batch)
    tuned.scaler.scale(loss).backward()
    tuned.scaler.step(optimizer)
    optimizer.step()
    tuned.scaler.update()
    optimizer.zero_grad()
    return loss  # type: ignore[no-any-return]


def scaler_twice(tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss = forward(tuned, model, batch)
    tuned.scaler.scale(loss).backward()
    tuned.scaler.step(optimizer)
    finish(tuned, optimizer)
    return loss  # type: ignore[no-any-return]


def optimizer_twice(
    tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    loss = forward(tuned, model, batch)
    loss.backward()
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    return loss  # type: ignore[no-any-return]


def only_in_fp32(tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    if tuned.policy != STOCK:
        raise NotImplementedError("\"some_op\" not implemented for 'BFloat16'")
    return optimizer_twice(tuned, model, optimizer, batch)


@pytest.mark.parametrize("step", [scaler_and_optimizer, scaler_twice, optimizer_twice, only_in_fp32])
def test_gradients_that_are_applied_twice_are_an_error(step: Step) -> None:
    with pytest.raises(TargetError, match=r"step\(…\): the optimizer steps again on"):
        mistakes_in_step(bench_of(step))


def accumulating(tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    for part in batch.chunk(2):
        loss = forward(tuned, model, part)
        tuned.scaler.scale(loss).backward()
    tuned.scaler.step(optimizer)
    tuned.scaler.update()
    optimizer.zero_grad(set_to_none=False)
    return loss  # type: ignore[no-any-return]


def with_gradients_of_its_own(
    tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    """One backward, then a step along gradients that the loop makes itself."""
    loss = forward(tuned, model, batch)
    loss.backward()
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.01)
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)  # type: ignore[union-attr]
    optimizer.step()
    optimizer.zero_grad()
    return loss  # type: ignore[no-any-return]


@pytest.mark.parametrize("step", [None, correct, accumulating, with_gradients_of_its_own])
def test_a_correct_step_passes_and_leaves_no_trace(step: Step | None) -> None:
    bench = bench_of(step)
    initial = {name: value.clone() for name, value in bench.model.state_dict().items()}
    assert mistakes_in_step(bench) == ()
    with bench.on_device(STOCK) as (tuned, _):
        assert tuned.guard is None
        assert all(torch.equal(value, initial[name]) for name, value in bench.model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in bench.model.modules())


def clipping_scaled(
    tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    loss = forward(tuned, model, batch)
    tuned.scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    finish(tuned, optimizer)
    return loss  # type: ignore[no-any-return]


def without_scaler(
    tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    loss = forward(tuned, model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss  # type: ignore[no-any-return]


def backward_inside(
    tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
) -> torch.Tensor:
    with tuned.autocast():
        loss: torch.Tensor = model(batch).float().square().mean()
        tuned.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch has not typed it
    finish(tuned, optimizer)
    return loss


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (clipping_scaled, "clipped-before-unscale"),
        (without_scaler, "stepped-without-scaler"),
        (backward_inside, "backward-inside-autocast"),
    ],
)
def test_what_harms_training_under_autocast_is_a_finding(step: Step, code: str) -> None:
    assert code in {finding.code for finding in mistakes_under(amp_recipe("fp16"), bench_of(step))}
    assert mistakes_under(STOCK, bench_of(step)) == ()


def test_a_step_that_leaves_the_policys_autocast_out_is_told_so() -> None:
    def plain(_: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has not typed it
        optimizer.step()
        return loss

    (finding,) = mistakes_in_step(bench_of(plain))
    assert finding.code == "autocast-unused"
    assert "run the forward pass and the loss in `with tuned.autocast():`" in str(finding)


@pytest.mark.parametrize("error", [RuntimeError("no such luck"), SystemExit("no such luck")])
def test_a_step_that_raises_is_left_to_its_trial(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    def raising(*_: Any) -> torch.Tensor:
        raise error

    assert mistakes_in_step(bench_of(raising)) == ()
    assert "no such luck" in capsys.readouterr().out
