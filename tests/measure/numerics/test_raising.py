"""Models that raise under autocast and train well in FP32: refused, with the module and the line named, and cured."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amptune import Workload
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import failure_of
from amptune.measure.modules.inspection import inspect_model
from amptune.measure.numerics import parity as parity_of_policies
from amptune.measure.numerics.parity import judge
from amptune.measure.numerics.reference import make_reference
from amptune.measure.numerics.traces import trace_step
from amptune.measure.results.half_effects import ModuleTrace
from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import Parity, Reference
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.gate.judge import Judge
from amptune.search.gate.repair import cure_of
from amptune.search.plan.budget import Budget

WIDTH = 16


class Odd(nn.Module):
    """A product, and what the user's own code does with it."""

    def __init__(self, then: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.product, self.then = nn.Linear(WIDTH, WIDTH), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(x, self.product(x))


def checked(x: Tensor, y: Tensor) -> Tensor:
    y = 3e4 * y * 3.0
    if not torch.isfinite(y).all():
        raise ValueError("the activations are not finite")
    return x + y / 1e5


def masked(x: Tensor, y: Tensor) -> Tensor:
    return x + y.masked_fill(y < -3, -1e9).clamp(-3, 3)


def scattered(x: Tensor, y: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    out[torch.arange(len(x))] = y
    return x + out


def ended(x: Tensor, y: Tensor) -> Tensor:
    if y.dtype != torch.float32:
        sys.exit("this code is written for float32")
    return x + y


@dataclass
class Here:
    """Judges in this process."""

    bench: Bench
    reference: Reference | None = None

    def judge(self, policy: Policy, fp32: Policy, seconds: float, limit_s: float) -> Parity:  # noqa: ARG002
        self.reference = self.reference or make_reference(self.bench, fp32, 2.0)
        return judge(self.bench, policy, self.reference)

    def trace(self, policy: Policy, fp32: Policy, limit_s: float) -> tuple[ModuleTrace, ...] | Failure:  # noqa: ARG002
        try:
            return trace_step(self.bench, policy, fp32)
        except BaseException as error:  # noqa: BLE001  # as in a worker process
            return failure_of(error)


@pytest.mark.parametrize(
    ("then", "dtype"), [(checked, "fp16"), (masked, "fp16"), (scattered, "bf16"), (scattered, "fp16"), (ended, "bf16")]
)
def test_what_raises_under_autocast_alone_is_refused_by_name_and_cured(then: Any, dtype: Any) -> None:
    workload = Workload(
        model=lambda: nn.Sequential(nn.Linear(8, WIDTH), Odd(then), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)),
        batch=lambda n: torch.randn(n, 8),
        loss=lambda model, batch: (model(batch).float() - batch[:, :1].sin()).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        batch_size=32,
    )
    here: Any = Here(Bench(workload, torch.device("cpu")))
    gatekeeper = Judge(here, STOCK, Budget(seconds=3600), lambda _: None)
    judgement = gatekeeper.judgement_of(amp_recipe(dtype))
    assert judgement is not None
    (why,) = judgement.shortcomings
    assert (why.code, why.module) == ("breaks", "1")
    assert f"{__file__}:" in why.message
    cure = cure_of(gatekeeper, judgement.policy, inspect_model(here.bench, ""), gatekeeper.traces_of(judgement.policy))
    assert cure is not None
    assert cure.modules == ("1.product",)


# --- the gate's own faults --------------------------------------------------------------------------------------------

OVERWRITTEN = "accessing tensor output of CUDAGraphs that has been overwritten by a subsequent run"


class GraphOutput(Tensor):
    """A result in a CUDA graph's memory: the graph's next run writes there, and whoever reads it then gets an error."""

    runs = 0
    run = 0

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one for one in (args[0] if isinstance(args[0], list) else args) if isinstance(one, GraphOutput)]
        if any(one.run != cls.runs for one in given):
            raise RuntimeError(OVERWRITTEN)
        result = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if not isinstance(result, GraphOutput):
            return result
        result.run = given[0].run
        return result.as_subclass(Tensor) if func is Tensor.clone else result


class Recorded(nn.Module):
    """A model that gives its loss, as those of transformers do; under autocast it is replayed as a CUDA graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (self.layers(x).float() - x[:, :1].sin()).square().mean()
        if not torch.is_autocast_enabled("cpu"):
            return loss
        GraphOutput.runs += 1
        output = loss.as_subclass(GraphOutput)
        output.run = GraphOutput.runs
        return output


def recorded() -> Here:
    workload = Workload(
        model=Recorded,
        batch=lambda n: torch.randn(n, 8),
        loss=lambda model, batch: model(batch),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
        batch_size=32,
    )
    return Here(Bench(workload, torch.device("cpu")))


def judged_alone(dtype: Any = "bf16") -> Judge:
    here: Any = recorded()
    gatekeeper = Judge(here, STOCK, Budget(seconds=3600), lambda _: None)
    gatekeeper.judgement_of(amp_recipe(dtype))
    return gatekeeper


def test_a_result_in_a_graphs_memory_is_not_read_after_the_next_run() -> None:
    output = Recorded()(torch.randn(4, 8))
    with torch.autocast("cpu"):
        first, _ = (Recorded()(torch.randn(4, 8)).detach() for _ in range(2))
    with pytest.raises(RuntimeError, match=OVERWRITTEN):
        torch.stack([output.detach(), first])
    assert judged_alone().judgements.passes(amp_recipe("bf16"))


def test_what_breaks_in_the_gates_own_procedure_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_of_policies, "compare", partial(int, "no number"))
    gatekeeper = judged_alone()
    assert not gatekeeper.judgements.bars(amp_recipe("bf16"))
    because = gatekeeper.judgements.unjudged_because(amp_recipe("bf16"))
    assert because is not None
    assert str(because).startswith("crash: the numerics check itself broke: error: ")
    assert not gatekeeper.judgements.is_open(amp_recipe("bf16"))


def test_what_breaks_in_a_hook_of_the_gate_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its innermost frame is the gate's; the user's `optimizer.step` stands further out."""
    here: Any = recorded()
    here.judge(amp_recipe("bf16"), STOCK, 1.0, 1.0)  # makes the reference
    monkeypatch.setattr("amptune.measure.numerics.sketches._numbers", partial(int, "no number"))
    gatekeeper = Judge(here, STOCK, Budget(seconds=3600), lambda _: None)
    gatekeeper.judgement_of(amp_recipe("bf16"))
    assert not gatekeeper.judgements.bars(amp_recipe("bf16"))
    assert gatekeeper.judgements.unjudged_because(amp_recipe("bf16")) is not None
