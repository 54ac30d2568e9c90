"""Models that raise under autocast and train well in FP32: refused, with the module and the line named, and cured."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from benches import CPU, Called
from benches import workload_of as any_workload
from torch import Tensor, nn

from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import failure_of
from amptune.measure.modules.inspection import inspect_model
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
BF16 = amp_recipe("bf16")
workload_of = partial(any_workload, batch_size=32, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01))


def of_sines(model: nn.Module, x: Tensor) -> Any:
    return (model(x).float() - x[:, :1].sin()).square().mean()


def checked(own: Any, x: Tensor) -> Any:
    y = 3e4 * own.product(x) * 3.0
    if not torch.isfinite(y).all():
        raise ValueError("the activations are not finite")
    return x + y / 1e5


def scattered(own: Any, x: Tensor) -> Tensor:
    out = torch.zeros(x.shape)
    out[torch.arange(len(x))] = own.product(x)
    return x + out


def ended(own: Any, x: Tensor) -> Any:
    y = own.product(x)
    if y.dtype != torch.float32:
        sys.exit("this code is written for float32")
    return x + y


@dataclass
class Here:
    """Judges in this process."""

    bench: Bench
    reference: Reference | None = None

    def judge(self, policy: Policy, fp32: Policy, *_: float) -> Parity:
        self.reference = self.reference or make_reference(self.bench, fp32, 2.0)
        return judge(self.bench, policy, self.reference)

    def trace(self, policy: Policy, fp32: Policy, _: float) -> tuple[ModuleTrace, ...] | Failure:
        try:
            return trace_step(self.bench, policy, fp32)
        except BaseException as error:  # noqa: BLE001  # as in a worker process
            return failure_of(error)


@pytest.mark.parametrize(("then", "dtype"), [(checked, "fp16"), (scattered, "bf16"), (ended, "bf16")])
def test_what_raises_under_autocast_alone_is_refused_by_name_and_cured(then: Any, dtype: Any) -> None:
    layers = (
        nn.Linear(8, WIDTH),
        Called(then, product=nn.Linear(WIDTH, WIDTH)),
        nn.Linear(WIDTH, WIDTH),
        nn.Linear(WIDTH, 1),
    )
    here = Here(Bench(workload_of(nn.Sequential(*layers), loss=of_sines), CPU))
    gatekeeper = gatekeeper_of(here)
    judgement = gatekeeper.judgement_of(amp_recipe(dtype))
    assert judgement is not None
    (why,) = judgement.shortcomings
    assert (why.code, why.module) == ("breaks", "1")
    assert f"{__file__}:" in why.message
    cure = cure_of(gatekeeper, judgement.policy, inspect_model(here.bench, ""), gatekeeper.traces_of(judgement.policy))
    assert cure is not None
    assert cure.modules == ("1.product",)


MEMORY = torch.zeros(())


def recorded_loss(model: nn.Module, x: Tensor) -> Any:
    """Gives its loss, under autocast in one place, as a CUDA graph does: the next run writes there."""
    loss = of_sines(model, x)
    if torch.is_autocast_enabled("cpu"):
        loss.data = MEMORY.copy_(loss.detach())
    return loss


def gatekeeper_of(here: Any) -> Judge:
    return Judge(here, STOCK, Budget(seconds=3600), lambda _: None)


def recorded() -> Here:
    layers = (nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1))
    return Here(Bench(workload_of(nn.Sequential(*layers), loss=recorded_loss), CPU))


def judged_alone(here: Here) -> Judge:
    gatekeeper = gatekeeper_of(here)
    gatekeeper.judgement_of(BF16)
    return gatekeeper


def test_a_result_in_a_graphs_memory_is_not_read_after_the_next_run() -> None:
    here = recorded()
    assert judged_alone(here).judgements.passes(BF16)
    losses = here.judge(BF16, STOCK, 1.0, 1.0).losses
    assert len(set(losses)) == len(losses) > 1


@pytest.mark.parametrize("breaks", ["parity.compare", "sketches._numbers"])
def test_what_breaks_in_the_gates_own_procedure_is_not_judged(breaks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a hook of the gate too: its innermost frame is the gate's; the user's `optimizer.step` is further out."""
    here = recorded()
    here.judge(BF16, STOCK, 1.0, 1.0)  # makes the reference
    monkeypatch.setattr(f"amptune.measure.numerics.{breaks}", partial(int, "no number"))
    judgements = judged_alone(here).judgements
    assert not judgements.bars(BF16)
    because = judgements.unjudged_because(BF16)
    assert str(because).startswith("crash: the numerics check itself broke: error: ")
    assert not judgements.is_open(BF16)
