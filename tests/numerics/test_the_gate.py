"""The gate on models of which it is known what breaks them: it rejects where training breaks, and nowhere else."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from faults import FAULTS, Fault
from hard_faults import HARD_FAULTS

from amptune.measure.bench.bench import Bench
from amptune.measure.numerics.parity import judge
from amptune.measure.numerics.reference import make_reference
from amptune.measure.results.training_runs import Reference
from amptune.policy.settings import STOCK, Autocast, Fp32Rule, Policy, amp_recipe
from amptune.search.gate.judgement import judged

pytestmark = pytest.mark.slow

HALVES: tuple[Autocast, ...] = ("bf16", "fp16")
each_fault = pytest.mark.parametrize("fault", [*FAULTS, *HARD_FAULTS], ids=lambda fault: fault.name)


@cache
def reference_of(fault: Fault) -> tuple[Bench, Reference]:
    bench = Bench(fault.workload, torch.device("cpu"))
    return bench, make_reference(bench, STOCK, 60.0)


def passes(fault: Fault, policy: Policy) -> bool:
    bench, reference = reference_of(fault)
    return judged(policy, judge(bench, policy, reference)).passes


@pytest.mark.parametrize("half", HALVES)
@each_fault
def test_a_model_is_rejected_where_half_precision_breaks_its_training_and_only_there(
    fault: Fault, half: Autocast
) -> None:
    assert passes(fault, amp_recipe(half)) == (half not in fault.breaks)


@each_fault
def test_a_model_passes_with_its_culprits_in_fp32(fault: Fault) -> None:
    rules = tuple(Fp32Rule(path=path) for path in fault.culprits)
    assert passes(fault, Policy(autocast=fault.breaks[0], fp32_modules=rules))
