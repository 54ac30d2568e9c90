"""Models that raise under autocast and train well in FP32: refused, with the module and the line named."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from benches import CPU, Called, workload_of
from torch import Tensor, nn

from amptune.measure.bench.bench import Bench
from amptune.measure.numerics.parity import judge
from amptune.measure.numerics.reference import make_reference
from amptune.measure.results.training_runs import Parity
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.gate.judgement import judged

BF16, FP16 = amp_recipe("bf16"), amp_recipe("fp16")


def of_sines(model: nn.Module, x: Tensor) -> Any:
    return (model(x).float() - x[:, :1].sin()).square().mean()


def looked_at(policy: Policy, *between: nn.Module, loss: Any = of_sines, meanwhile: Callable[..., Any] = int) -> Parity:
    model = nn.Sequential(nn.Linear(8, 16), *between, nn.Linear(16, 1))
    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.01)  # noqa: E731
    bench = Bench(workload_of(model, loss=loss, batch_size=32, optimizer=sgd), CPU)
    reference = make_reference(bench, STOCK, 2.0)
    meanwhile()
    return judge(bench, policy, reference)


def checked(own: Any, x: Tensor) -> Any:
    y = 3e4 * own.product(x) * 3.0
    if not torch.isfinite(y).all():
        raise ValueError("the activations are not finite")
    return x + y / 1e5


def ended(own: Any, x: Tensor) -> Any:
    y = own.product(x)
    if y.dtype != torch.float32:
        sys.exit("this code is written for float32")
    return x + y


@pytest.mark.parametrize(("then", "policy"), [(checked, FP16), (ended, BF16)])
def test_what_raises_under_autocast_alone_is_refused_by_name(then: Any, policy: Policy) -> None:
    parity = looked_at(policy, Called(then, product=nn.Linear(16, 16)))
    (why,) = judged(policy, parity).shortcomings
    assert (why.code, why.module) == ("breaks", "1")
    assert f"{__file__}:" in why.message


MEMORY = torch.zeros(())


def recorded_loss(model: nn.Module, x: Tensor) -> Any:
    """Gives its loss, under autocast in one place, as a CUDA graph does: the next run writes there."""
    loss = of_sines(model, x)
    if torch.is_autocast_enabled("cpu"):
        loss.data = MEMORY.copy_(loss.detach())
    return loss


def test_a_result_in_a_graphs_memory_is_not_read_after_the_next_run() -> None:
    parity = looked_at(BF16, nn.LayerNorm(16), loss=recorded_loss)
    assert judged(BF16, parity).passes
    assert len(set(parity.losses)) == len(parity.losses) > 1


@pytest.mark.parametrize("breaks", ["parity.compare", "sketches._numbers"])
def test_what_breaks_in_the_gates_own_procedure_is_not_judged(breaks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a hook of the gate too: its innermost frame is the gate's; the user's `optimizer.step` is further out."""
    name = f"amptune.measure.numerics.{breaks}"
    breaking = partial(monkeypatch.setattr, name, partial(int, "no number"))
    parity = looked_at(BF16, nn.LayerNorm(16), loss=recorded_loss, meanwhile=breaking)
    assert parity.failure is not None
    assert str(parity.failure).startswith("crash: the numerics check itself broke: error: ")
