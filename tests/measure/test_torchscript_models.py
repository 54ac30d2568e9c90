"""Models with a TorchScript part, which takes no hooks and keeps its buffers: inspected, timed, judged, traced."""

from __future__ import annotations

import math

import pytest
import torch
from benches import CPU, workload_of
from torch import nn

from amptune.measure.bench.bench import Bench
from amptune.measure.modules.inspection import inspect_model
from amptune.measure.modules.sensitivity_pass import sense
from amptune.measure.numerics.parity import judge
from amptune.measure.numerics.reference import make_reference
from amptune.measure.numerics.traces import trace_step
from amptune.policy.settings import STOCK, amp_recipe

# TorchScript is deprecated by torch itself, from 2.10 on.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BF16 = amp_recipe("bf16")


def test_the_parts_beside_it_are_inspected_traced_and_timed_alone_and_all_is_judged() -> None:
    def build() -> nn.Module:
        scripted: nn.Module = torch.jit.script(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
        return nn.Sequential(scripted, nn.Conv2d(4, 4, 1))

    bench = Bench(workload_of(build, (3, 8, 8)), CPU)
    subject = inspect_model(bench, "digest")
    assert {leaf.path for leaf in subject.leaves if leaf.flops} == {"1"}
    assert subject.fusable
    parity = judge(bench, BF16, make_reference(bench, STOCK, math.inf))
    assert {one.name.partition(".")[0] for one in parity.gradients} == {"0", "1"}
    assert "1" in {one.path for one in trace_step(bench, BF16, STOCK)}
    assert "1" in {one.path for one in sense(bench, STOCK, ("bf16",)).modules}
