"""A step of the user's own runs under the guard before the budget is spent on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benches import CPU, Step, step_of, workload_of
from torch import nn

from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.loop.step_mistakes import mistakes_in_step, mistakes_under
from amptune.policy.settings import STOCK, amp_recipe
from amptune.runtime.tuned import Tuned


def bench_of(step: Step | None) -> Bench:
    parts: dict[str, Any] = {} if step is None else {"loss": None, "step": step}
    return Bench(workload_of(lambda: nn.Linear(8, 2), **parts), CPU)


def only_in_fp32(tuned: Tuned, *rest: Any) -> torch.Tensor:
    if tuned.policy != STOCK:
        raise NotImplementedError("\"some_op\" not implemented for 'BFloat16'")
    return step_of("unscaled-backward step step zero")(tuned, *rest)


@pytest.mark.parametrize("step", [step_of("backward scaler-step step update zero"), only_in_fp32])
def test_gradients_that_are_applied_twice_are_an_error(step: Step) -> None:
    with pytest.raises(TargetError, match=r"step\(…\): the optimizer steps again on"):
        mistakes_in_step(bench_of(step))


@pytest.mark.parametrize(
    "step",
    [
        None,
        step_of("backward unscale clip scaler-step update zero"),
        step_of("unscaled-backward step own-gradients step own-gradients step zero"),
    ],
)
def test_a_correct_step_passes_and_leaves_no_trace(step: Step | None) -> None:
    bench = bench_of(step)
    initial = {name: value.clone() for name, value in bench.model.state_dict().items()}
    assert mistakes_in_step(bench) == ()
    with bench.on_device(STOCK) as (tuned, _):
        assert tuned.guard is None
        assert all(torch.equal(value, initial[name]) for name, value in bench.model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in bench.model.modules())


@pytest.mark.parametrize(
    ("step", "code"),
    [
        (step_of("backward clip scaler-step update zero"), "clipped-before-unscale"),
        (step_of("unscaled-backward step zero"), "stepped-without-scaler"),
    ],
)
def test_what_harms_training_under_autocast_is_a_finding(step: Step, code: str) -> None:
    assert code in {finding.code for finding in mistakes_under(amp_recipe("fp16"), bench_of(step))}
    assert mistakes_under(STOCK, bench_of(step)) == ()


def test_a_step_that_leaves_the_policys_autocast_out_is_told_so() -> None:
    def plain(_: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(batch).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        return loss

    (finding,) = mistakes_in_step(bench_of(plain))
    assert finding.code == "autocast-unused"


@pytest.mark.parametrize("error", [RuntimeError("no such luck"), SystemExit("no such luck")])
def test_a_step_that_raises_is_left_to_its_trial(error: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    def raising(*_: Any) -> torch.Tensor:
        raise error

    assert mistakes_in_step(bench_of(raising)) == ()
    assert "no such luck" in capsys.readouterr().out
