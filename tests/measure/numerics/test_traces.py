"""Where numbers go wrong in one step, in models whose faults are known."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from benches import CPU, Called, Checkpointed
from benches import workload_of as any_workload
from torch import nn

from amptune import Workload
from amptune.measure.bench.bench import Bench
from amptune.measure.numerics.traces import trace_step
from amptune.measure.results.half_effects import ModuleTrace, Reach, suspects
from amptune.policy.settings import STOCK, Policy, amp_recipe

BF16, FP16 = amp_recipe("bf16"), amp_recipe("fp16")
workload_of = partial(any_workload, loss=lambda model, batch: model(batch).float().square().mean())


def traced(workload: Workload, policy: Policy) -> dict[str, ModuleTrace]:
    return {trace.path: trace for trace in trace_step(Bench(workload, CPU), policy, STOCK)}


def largest(reach: Reach | None) -> tuple[float, float]:
    """(under the policy, in FP32)."""
    assert reach is not None
    return reach.largest, reach.largest_fp32


def test_the_first_module_that_breaks_the_forward_pass_is_named() -> None:
    """In fp16, and none in bf16. Modules are in the order in which their calls end, so it is the innermost."""
    loud = Called(lambda _, x: x * 1e5 / 1e5)
    workload = workload_of(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Tanh(), loud), nn.Linear(8, 2)))
    traces = traced(workload, FP16)
    assert [path for path, trace in traces.items() if trace.breaks_forward] == ["1.1", "1", ""]
    assert suspects(list(traces.values()))[0] == "1.1"
    broken = traces["1.1"].outputs
    assert broken is not None
    assert (broken.error, math.isfinite(broken.largest_fp32)) == (math.inf, True)
    assert not any(one.breaks_forward or one.breaks_backward for one in traced(workload, BF16).values())


def test_the_module_that_breaks_the_backward_pass_is_named() -> None:
    """A square root has an infinite slope at what is 0 in half and not in FP32. None behind or in front is named."""
    root = Called(lambda _, x: torch.sqrt(x.abs() * 1e-9))
    traces = traced(workload_of(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), root, nn.Linear(8, 2))), FP16)
    assert [trace.path for trace in traces.values() if trace.breaks_backward] == ["2"]
    assert not any(trace.breaks_forward for trace in traces.values())
    assert suspects(list(traces.values()))[0] == "2"
    first = traces["0"]
    assert first.weights is not None
    assert first.gradients_in is not None
    assert (first.weights.broken, first.gradients_in.broken) == (True, True)


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([factor]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def once(model: Callable[[], nn.Module], *values: float) -> Workload:
    """One batch, and a loss in which each output counts for 1/4."""
    return workload_of(
        model,
        batch=lambda _: torch.tensor([values]).T,
        loss=lambda model, x: model(x).float().sum() / 4,
        batch_size=1,
    )


def test_magnitudes_are_those_at_each_place_gradients_without_the_loss_scale() -> None:
    traces = traced(once(lambda: nn.Sequential(Times(-3.0), Times(0.5)), 1.0, -7.0), FP16)
    first, second = traces["0"], traces["1"]
    assert (first.type, second.type, traces[""].type) == ("Times", "Times", "Sequential")
    assert largest(first.inputs) == (7, 7)
    assert first.gradients_out is None  # data need no gradient
    assert largest(first.outputs) == largest(second.inputs) == (21, 21)
    assert largest(second.outputs) == (10.5, 10.5)
    assert largest(second.gradients_in) == (0.25, 0.25)
    assert largest(second.gradients_out) == largest(first.gradients_in) == (0.125, 0.125)
    assert largest(second.weights) == (21 / 4 - 3 / 4, 21 / 4 - 3 / 4)
    assert largest(first.weights) == (6 / 8, 6 / 8)


def test_the_error_is_relative_to_fp32() -> None:
    off = Called(lambda _, x: x * (1.25 if torch.is_autocast_enabled("cpu") else 1.0))
    traces = traced(once(lambda: nn.Sequential(Times(2.0), off, Times(1.0)), 1.0, 2.0), BF16)
    errors = {path: trace.outputs.error for path, trace in traces.items() if trace.outputs is not None}
    assert errors == pytest.approx({"0": 0, "1": 0.25, "2": 0.25, "": 0.25})
    assert traces["1"].adds == pytest.approx(25)
    assert traces["2"].adds < 1
    assert suspects(list(traces.values()))[0] == "1"


def test_infinities_that_fp32_has_too_are_not_broken() -> None:
    mask = torch.ones(8, 8).triu(1).bool()
    masked = Called(lambda _, scores: scores.masked_fill(mask, -math.inf))
    layers = (nn.Linear(8, 8), masked, nn.Softmax(-1), nn.Dropout(0.5), nn.Linear(8, 2))  # and dropout is no error
    traces = traced(workload_of(nn.Sequential(*layers), (8, 8)), FP16)
    assert largest(traces["1"].outputs) == (math.inf, math.inf)
    assert not any(trace.breaks_forward or trace.breaks_backward for trace in traces.values())
    assert all(trace.outputs is not None and trace.outputs.error < 0.1 for trace in traces.values())


def test_a_module_called_several_times_is_looked_at_over_all_its_calls() -> None:
    times, smaller = Times(3.0), Called(lambda _, x: x / 1000)
    traces = traced(once(lambda: nn.Sequential(times, times, smaller, times, Times(1.0)), 1.0, 2.0), BF16)
    assert set(traces) == {"0", "2", "4", ""}
    assert largest(traces["0"].outputs)[1] == 18  # in the second call
    assert largest(traces["0"].inputs)[1] == 6


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_modules_are_in_the_order_of_the_forward_pass(reentrant: bool) -> None:
    model = lambda: Checkpointed(Times(1.0), Times(2.0), Times(3.0), reentrant=reentrant)  # noqa: E731
    traces = traced(once(model, 1.0, 2.0), BF16)
    assert list(traces) == ["0", "1", "2", ""]
    assert largest(traces["1"].weights)[1] == pytest.approx(3 * 3 / 4)


def test_nothing_is_left_on_the_model() -> None:
    bench = Bench(workload_of(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))), CPU)
    trace_step(bench, FP16, STOCK)
    assert not any(module._forward_hooks for module in bench.model.modules())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in bench.model.parameters())
    assert vars(bench.model.get_submodule("1"))["p"] == 0.5


def reach(largest: float, error: float = 0.0) -> Reach:
    return Reach(largest=largest, largest_fp32=1.0, error=error)


def trace_of(path: str, **places: Reach) -> ModuleTrace:
    everywhere = dict.fromkeys(("inputs", "outputs", "gradients_in", "gradients_out", "weights"), reach(1.0))
    return ModuleTrace(path=path, type="Linear", **{**everywhere, **places})


def test_what_breaks_comes_before_what_is_wrong_and_the_backward_pass_runs_backward() -> None:
    inf, nan, off = reach(math.inf, math.inf), reach(math.nan, math.inf), reach(1.0, 0.5)
    traces = [
        trace_of("passes an error on", inputs=off, outputs=off),
        trace_of("wrong", outputs=off),
        trace_of("back 1", weights=inf),
        trace_of("forward 1", outputs=inf),
        trace_of("forward 2", outputs=nan),
        trace_of("passes on", inputs=inf, outputs=inf),
        trace_of("back 2", gradients_out=nan),
        trace_of("", outputs=inf),
    ]
    assert suspects(traces)[:5] == ["forward 1", "forward 2", "back 2", "back 1", "wrong"]
    assert "" not in suspects(traces)
    assert [trace.adds for trace in traces[:2]] == [0, pytest.approx(50)]
