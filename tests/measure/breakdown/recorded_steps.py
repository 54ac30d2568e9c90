"""Training steps of bundled workloads as PyTorch's profiler recorded them on a Hopper GPU (torch 2.11, cuDNN 9).

`profiles/WORKLOAD-POLICY.json.gz` holds one step: the kernels, the operations that they were launched in, outwards,
and the forward operations whose backward those are; arguments of casts, products and convolutions alone. Times are in
ns from the step's beginning, ids count from 0.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path

from simulated.recorded import H200

from amptune.measure.breakdown.figures import distil
from amptune.measure.breakdown.slow_findings import speed_findings
from amptune.measure.breakdown.step_trace import Kernel, Op, StepTrace
from amptune.measure.results.step_profile import StepProfile
from amptune.policy.findings import Finding
from amptune.policy.settings import STOCK, Policy, amp_recipe

PROFILES = Path(__file__).parent / "profiles"
POLICIES = {
    "stock": STOCK,
    "ieee": Policy(fp32_math="ieee"),
    "bf16": amp_recipe("bf16"),
    "bf16-channels-last": amp_recipe("bf16", memory_format="channels_last"),
    "bf16-graphs": amp_recipe("bf16", compile="reduce-overhead"),
}


@cache
def recorded(workload: str, policy: str) -> StepProfile:
    """The profile of the recorded step; `step_ms` and `host_ms` were timed beside it, without the profiler."""
    with gzip.open(PROFILES / f"{workload}-{policy}.json.gz", "rt") as file:
        step = json.load(file)
    ops = tuple(
        Op(
            id=number,
            name=name,
            thread=thread,
            start_us=start_ns / 1000,
            us=ns / 1000,
            types=tuple(types),
            shapes=tuple(map(tuple, shapes)),
            forward=forward,
        )
        for number, (name, thread, start_ns, ns, forward, types, shapes, _) in enumerate(step["ops"])
    )
    kernels = tuple(
        Kernel(name=step["kernel_names"][name], start_us=start_ns / 1000, us=ns / 1000, op=op, compute=compute)
        for name, start_ns, ns, op, compute in step["kernels"]
    )
    return distil(
        [StepTrace(ops=ops, kernels=kernels)],
        device="cuda",
        step_ms=step["step_ms"],
        host_ms=step["host_ms"],
        attributed=step["attributed"],
    )


def found_in(workload: str, policy: str) -> dict[str, Finding]:
    """The findings of the recorded step by code, in their order."""
    findings = speed_findings(recorded(workload, policy), H200, POLICIES[policy])
    return {finding.code: finding for finding in findings}
