"""Content of a policy file: the settings, the machine they are valid for, and the measured evidence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from typing_extensions import TypedDict

from amptune.policy.settings import Policy

__all__ = ["Evidence", "PolicyFile"]


class Evidence(TypedDict, total=False):
    """What was measured in the final comparison; times in ms, memory in MiB, energy in J, rates per second.

    `baseline`, `amp_recipe` and the `finalists` hold the same figures for other policies, or their failure.
    `launches` is how many process launches the speed-up rests on. `parity` is how far training is from that in
    FP32: the first steps, and what the numerics gate saw; `ablation` what each setting buys, as the speed with it
    over the speed without; `end_to_end` what a training loop with fresh data reached. `tuned_on` is UTC, ISO 8601.

    `objective` is "memory" or "energy", and left out for throughput; `gain` is then the baseline's peak memory, or
    energy a sample, over the policy's, and so is what an ablated setting buys, its share of the speed beside it.
    `least_speed` is the share of the baseline's speed that had to be reached. `pareto` are the trials that no other
    beats in samples per second, peak memory and energy at once, at most twelve: `judged` where the numerics gate has
    passed them, or had nothing to judge. What they are to be held against is the baseline's own `trial`.
    """

    __pydantic_config__ = {"extra": "forbid"}  # type: ignore[misc]  # noqa: RUF012  # read by pydantic

    workload: str
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
    parity: dict[str, Any]
    ablation: dict[str, Any]
    end_to_end: dict[str, Any]
    findings: list[dict[str, Any]]
    tuned_on: str
    trials: int
    seconds: float
    provisional: bool
    finalists: list[dict[str, Any]]
    pareto: list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFile:
    """A policy with its name, the labels of the machine its evidence was taken on, and that evidence."""

    policy: Policy
    name: str | None = None
    valid_for: Mapping[str, str] = field(default_factory=dict, hash=False)
    evidence: Evidence = field(default_factory=Evidence, hash=False)
