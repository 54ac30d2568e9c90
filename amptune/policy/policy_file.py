"""Content of a policy file: the settings, the machine they are valid for, and the measured evidence.

Presets are policies by name: PyTorch's AMP recipe, what the Trainer of transformers does by itself, and the opt levels
of NVIDIA's Apex, for training code that used `apex.amp.initialize`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from typing_extensions import TypedDict

from amptune.errors import FileFormatError, Problem
from amptune.policy.settings import LossScale, Policy, amp_recipe

__all__ = ["APEX_LEVELS", "BASELINES", "Evidence", "PolicyFile", "is_preset", "preset"]


class Evidence(TypedDict, total=False):
    """Figures measured in the final comparison; times in ms, memory in MiB, energy in J, rates per second.

    `baseline`, `amp_recipe` and the `finalists` hold the same figures for other policies, or their failure.
    `launches` is how many process launches the speed-up rests on. `plain_loop` is the speed-up of a loop that does not
    train by `tuned.training_step`, if the policy records whole steps. `parity` is how far training is from that in
    FP32: the first steps, and what the numerics gate saw; `ablation` what each setting buys, as the speed with it
    over the speed without; `end_to_end`, in older files, what a training loop reached. `tuned_on` is UTC, ISO 8601.

    `confidence` is "confirmed", "likely" (then `provisional` is set) or "undecided" (then the baseline stays).

    `objective` is "memory" or "energy", and left out for throughput; `gain` is then the baseline's peak memory, or
    energy a sample, over the policy's, and so is what an ablated setting buys, its share of the speed beside it.
    `least_speed` is the share of the baseline's speed that had to be reached. `pareto` are the trials that no other
    beats in samples per second, peak memory and energy at once, at most twelve: `judged` where the numerics gate has
    passed them, or had nothing to judge. What they are to be held against is the baseline's own `trial`.

    Without `devices` a step was measured on one. With several they exchange gradients; samples are those of all.
    """

    __pydantic_config__ = {"extra": "forbid"}  # type: ignore[misc]  # noqa: RUF012  # for the JSON Schema

    workload: str
    devices: int
    objective: str
    least_speed: float
    baseline: dict[str, Any]
    amp_recipe: dict[str, Any]
    samples_per_s: float
    step_ms: float
    step_ms_ci95: list[float]
    peak_memory_mib: float
    energy_j_per_sample: float
    speedup: float
    speedup_ci95: list[float]
    gain: float
    gain_ci95: list[float]
    launches: int
    plain_loop: dict[str, Any]
    parity: dict[str, Any]
    ablation: dict[str, Any]
    end_to_end: dict[str, Any]
    findings: list[dict[str, Any]]
    tuned_on: str
    trials: int
    seconds: float
    confidence: str
    provisional: bool
    finalists: list[dict[str, Any]]
    pareto: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFile:
    """A policy with its name, the labels of the machine its evidence was taken on, and that evidence.

    `origin` is where it was read from: a file, and the entry of a profile.
    """

    policy: Policy
    name: str | None = None
    valid_for: Mapping[str, str] = field(default_factory=dict, hash=False)
    evidence: Evidence = field(default_factory=Evidence, hash=False)
    origin: str = field(default="", compare=False)


_PREFIX = "apex:"

# Values of apex/amp/frontend.py and apex/amp/scaler.py until May 2025: a dynamic scale starts at 2^16, doubles after
# 2,000 clean steps and is at most 2^24.
_DYNAMIC = LossScale(init=2.0**16, growth_interval=2000, max=2.0**24)

# O1 patched the functions in its lists; autocast now does the same.
APEX_LEVELS = {
    "O0": Policy(),
    "O1": Policy(autocast="fp16", loss_scale=_DYNAMIC),
    "O2": Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True, loss_scale=_DYNAMIC),
    "O3": Policy(weights="half"),
}


# As `--baseline` names them. The Trainer of transformers 5 computes in FP32, with PyTorch's own math, and fuses AdamW.
BASELINES = {
    "amp-fp16": amp_recipe("fp16"),
    "amp-bf16": amp_recipe("bf16"),
    "transformers": Policy(fused_optimizer=True),
}


def is_preset(name: object) -> TypeGuard[str]:
    """Returns True if the name means a preset; name a file like that as `./apex:…`, or use a `pathlib.Path`."""
    return isinstance(name, str) and (name.startswith(_PREFIX) or name in BASELINES)


def preset(name: str) -> PolicyFile:
    """Returns the policy of a name such as `apex:O2` or `amp-bf16`.

    Raises `FileFormatError` for a level that Apex does not have.
    """
    policy = BASELINES.get(name) or APEX_LEVELS.get(name.removeprefix(_PREFIX))
    if policy is None:
        levels = ", ".join(_PREFIX + level for level in APEX_LEVELS)
        raise FileFormatError([Problem(message=f"is no opt level of Apex; there are {levels}", source=name)])
    return PolicyFile(policy=policy, name=name)
