"""The claims of the hard faults, held by plain training loops, and what the gate says of them."""

from __future__ import annotations

from functools import cache
from statistics import mean

import pytest
import torch
from faults import Fault
from hard_faults import HARD_FAULTS

from amptune.measure.bench.bench import Bench
from amptune.measure.numerics.parity import judge
from amptune.measure.numerics.reference import make_reference
from amptune.measure.results.training_runs import Reference
from amptune.policy.settings import STOCK, Autocast, Fp32Rule, Policy, amp_recipe
from amptune.runtime.apply_policy import apply
from amptune.search.gate.judgement import judged

pytestmark = pytest.mark.slow

STEPS = 300
HALVES: tuple[Autocast, ...] = ("bf16", "fp16")
CPU = torch.device("cpu")
each_fault = pytest.mark.parametrize("fault", HARD_FAULTS, ids=lambda fault: fault.name)
each_half = pytest.mark.parametrize("half", HALVES)


def trained(fault: Fault, policy: Policy) -> float:
    """Returns the mean loss of the last steps. Raises what the model raises."""
    workload = fault.workload
    torch.manual_seed(0)
    model = workload.model()
    losses = []
    with apply(policy, model) as tuned:
        optimizer = workload.optimizer(model)
        for _ in range(STEPS):
            batch = workload.batch(workload.batch_size)
            with tuned.autocast():
                loss = workload.loss(tuned.model, batch)  # type: ignore[misc]
            torch.autograd.backward(tuned.scaler.scale(loss))
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
    return mean(losses[-30:])


@cache
def in_fp32(fault: Fault) -> float:
    return trained(fault, STOCK)


@each_half
@each_fault
def test_it_breaks_training_in_the_dtypes_that_it_names_and_its_culprit_in_fp32_cures(
    fault: Fault, half: Autocast
) -> None:
    try:
        times = trained(fault, Policy(autocast=half)) / in_fp32(fault)
    except (RuntimeError, FloatingPointError):
        times = float("inf")
    assert (times > 1.1) == (half in fault.breaks)
    rules = tuple(Fp32Rule(path=path) for path in fault.culprits)
    assert trained(fault, Policy(autocast=half, fp32_modules=rules)) == pytest.approx(in_fp32(fault), rel=0.06)


@cache
def reference_of(fault: Fault) -> tuple[Bench, Reference]:
    bench = Bench(fault.workload, CPU)
    return bench, make_reference(bench, STOCK, 60.0)


@each_half
@each_fault
def test_the_gate_rejects_it_where_it_breaks_training_and_only_there(fault: Fault, half: Autocast) -> None:
    bench, reference = reference_of(fault)
    policy = amp_recipe(half)
    assert judged(policy, judge(bench, policy, reference)).passes == (half not in fault.breaks)


@each_fault
def test_the_gate_passes_it_with_its_culprit_in_fp32(fault: Fault) -> None:
    bench, reference = reference_of(fault)
    rules = tuple(Fp32Rule(path=path) for path in fault.culprits)
    policy = Policy(autocast=fault.breaks[0], fp32_modules=rules)
    assert judged(policy, judge(bench, policy, reference)).passes
