"""The claims of the planted faults, held by plain training loops, and what the gate says of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import Any

import pytest
import torch
from faults import FAULTS, Fault
from hard_faults import HARD_FAULTS
from torch import Tensor

from amptune.changes.tensor_tree import map_tensors
from amptune.measure.bench.bench import Bench
from amptune.measure.numerics.parity import judge
from amptune.measure.numerics.reference import make_reference
from amptune.measure.results.training_runs import Reference
from amptune.policy.settings import STOCK, Autocast, Fp32Rule, Policy, amp_recipe
from amptune.runtime.apply_policy import apply
from amptune.runtime.tuned import Tuned
from amptune.search.gate.judgement import judged

# Some hundred trainings; the gate that the faults are given to is tested elsewhere.
pytestmark = pytest.mark.slow

COMPARED = 3  # batches whose gradients are compared
HALVES: tuple[Autocast, ...] = ("bf16", "fp16")
CPU = torch.device("cpu")
on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
each_device = pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda", 0), marks=on_a_gpu)], ids=str)
each_fault = pytest.mark.parametrize("fault", [*FAULTS, *HARD_FAULTS], ids=lambda fault: fault.name)
each_half = pytest.mark.parametrize("half", HALVES)


@dataclass(frozen=True, kw_only=True)
class Run:
    """What became of the steps. `gradients` are the untrained model's, one vector a module; None: not finite."""

    losses: tuple[float, ...]
    finite: bool
    gradients: dict[str, Tensor] | None

    @property
    def end(self) -> float:
        return mean(self.losses[-len(self.losses) // 10 :])


def loss_of(fault: Fault, tuned: Tuned, device: torch.device) -> Tensor:
    batch = map_tensors(lambda tensor: tensor.to(device), fault.workload.batch(fault.workload.batch_size))
    loss: Any = fault.workload.loss
    with tuned.autocast():
        return loss(tuned.model, batch)  # type: ignore[no-any-return]


def run(fault: Fault, policy: Policy, device: torch.device) -> Run:
    """From the same weights and over the same batches at each call; what is hard to see takes more steps."""
    torch.manual_seed(0)
    model, losses = fault.workload.model(), []
    with apply(policy, model, guard=False) as tuned:  # which would warn of the faults
        optimizer: Any = fault.workload.optimizer(model.to(device))
        for _ in range(300 if fault in HARD_FAULTS else 40):
            loss = loss_of(fault, tuned, device)
            torch.autograd.backward(tuned.scaler.scale(loss))
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    state = [tensor for tensor in model.state_dict().values() if tensor.is_floating_point()]
    finite = math.isfinite(losses[-1]) and all(bool(tensor.isfinite().all()) for tensor in state)
    # Hard ones may draw random numbers, and closed branches have no gradients.
    gradients = {} if fault in HARD_FAULTS else gradients_of(fault, policy, device)
    return Run(losses=tuple(losses), finite=finite, gradients=gradients)


def gradients_of(fault: Fault, policy: Policy, device: torch.device) -> dict[str, Tensor] | None:
    """Summed over a few batches, at the largest loss scale up to the scaler's first that overflows nowhere."""
    for power in (16, 12, 8, 4, 0):
        torch.manual_seed(0)
        model = fault.workload.model()
        with apply(policy, model, guard=False) as tuned:
            model.to(device)
            for _ in range(COMPARED):
                torch.autograd.backward(loss_of(fault, tuned, device).float() * 2.0**power)
        found = {
            path: torch.cat([p.grad.flatten() for p in own if p.grad is not None]).double()
            for path, module in model.named_modules()
            if (own := list(module.parameters(recurse=False)))
        }
        if all(bool(gradient.isfinite().all()) for gradient in found.values()):
            return found
    return None


@cache
def in_fp32(fault: Fault, device: torch.device) -> Run:
    return run(fault, STOCK, device)


def is_broken(fault: Fault, policy: Policy, device: torch.device) -> bool:
    fp32 = in_fp32(fault, device)
    assert fp32.finite
    assert fp32.gradients is not None
    try:
        half = run(fault, policy, device)
    except (RuntimeError, FloatingPointError):
        return True
    if not half.finite or half.end > 1.1 * fp32.end or half.gradients is None:
        return True
    return any(torch.cosine_similarity(fp32.gradients[path], g, dim=0) < 0.9 for path, g in half.gradients.items())


def cured(fault: Fault, half: Autocast) -> Policy:
    return Policy(autocast=half, fp32_modules=tuple(Fp32Rule(path=path) for path in fault.culprits))


@each_device
@each_half
@each_fault
def test_it_breaks_training_in_the_dtypes_that_it_names_and_its_culprit_in_fp32_cures(
    fault: Fault, half: Autocast, device: torch.device
) -> None:
    assert is_broken(fault, Policy(autocast=half), device) == (half in fault.breaks)
    assert not is_broken(fault, cured(fault, half), device)


@cache
def reference_of(fault: Fault) -> tuple[Bench, Reference]:
    bench = Bench(fault.workload, CPU)
    return bench, make_reference(bench, STOCK, 60.0)


@each_half
@each_fault
def test_the_gate_rejects_it_where_it_breaks_training_and_not_with_its_culprit_in_fp32(
    fault: Fault, half: Autocast
) -> None:
    bench, reference = reference_of(fault)
    for policy, breaks in ((amp_recipe(half), half in fault.breaks), (cured(fault, half), False)):
        assert judged(policy, judge(bench, policy, reference)).passes != breaks
