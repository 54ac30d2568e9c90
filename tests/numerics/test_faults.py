"""What the gate says of the planted faults. That each breaks training where it says so was held at 67bbcaf."""

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

pytestmark = pytest.mark.slow  # the gate that the faults are given to is tested elsewhere


@cache
def reference_of(fault: Fault) -> tuple[Bench, Reference]:
    bench = Bench(fault.workload, torch.device("cpu"))
    return bench, make_reference(bench, STOCK, 60.0)


@pytest.mark.parametrize("half", ["bf16", "fp16"])
@pytest.mark.parametrize("fault", [*FAULTS, *HARD_FAULTS], ids=lambda fault: fault.name)
def test_the_gate_rejects_it_where_it_breaks_training_and_not_with_its_culprit_in_fp32(
    fault: Fault, half: Autocast
) -> None:
    bench, reference = reference_of(fault)
    cured = Policy(autocast=half, fp32_modules=tuple(Fp32Rule(path=path) for path in fault.culprits))
    for policy, breaks in ((amp_recipe(half), half in fault.breaks), (cured, False)):
        assert judged(policy, judge(bench, policy, reference)).passes != breaks
