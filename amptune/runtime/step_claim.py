"""A policy file's claim about a training step, and whether the steps of a training keep it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amptune.policy.findings import Finding

if TYPE_CHECKING:
    from amptune.policy.policy_file import PolicyFile

__all__ = ["STEPS_COMPARED", "STEPS_TO_SETTLE", "StepClaim", "claim_about_steps", "missed", "typical_step_ms"]

# What compiles, records graphs or tries algorithms once does so in the first steps, and training pays that once.
STEPS_TO_SETTLE = 50
# Work that is done once (a last batch of another size compiles, a recording is compared with the model) makes one
# window slow. A policy that compiles anew all the time makes most windows slow, and the median of its steps may not.
_WINDOW_STEPS = 25
_WINDOWS = 9
STEPS_COMPARED = _WINDOW_STEPS * _WINDOWS

# A claim holds to a few percent where it was measured, and a busier host or a warmer GPU costs some more.
_CLEARLY = 1.25
# Against the baseline less is enough, as the claim is already missed.
_SLOWER_THAN_BASELINE = 1.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepClaim:
    """The mean time of an optimizer step by a file's evidence, with the batches and devices it was measured with.

    `baseline_ms` is what the baseline took for as many samples, or None if the file does not claim to be faster.
    """

    step_ms: float
    batch_size: int
    accumulate: int
    baseline_ms: float | None = None
    devices: int = 1


def claim_about_steps(policy_file: PolicyFile) -> StepClaim | None:
    """Returns None if the file has no step time in its evidence, or no batch size that goes with it."""
    policy, evidence = policy_file.policy, policy_file.evidence
    step_ms = _figure(evidence.get("step_ms"))
    if step_ms is None or policy.batch_size is None:
        return None
    baseline_ms = None
    if evidence.get("objective", "throughput") == "throughput":
        baseline_ms = _baseline_ms(evidence.get("baseline"), policy.batch_size * policy.accumulate)
    return StepClaim(
        step_ms=step_ms,
        batch_size=policy.batch_size,
        accumulate=policy.accumulate,
        baseline_ms=baseline_ms if baseline_ms is not None and baseline_ms > step_ms else None,
        devices=evidence.get("devices", 1),
    )


def missed(claim: StepClaim, steps_ms: Sequence[float]) -> Finding | None:
    """Returns a finding if training's steps, those after it settled, clearly take longer than the claim says."""
    took_ms = typical_step_ms(steps_ms)
    if took_ms <= _CLEARLY * claim.step_ms:
        return None
    figures = {"step_ms": float(f"{took_ms:.4g}"), "tuned_step_ms": claim.step_ms}
    if claim.baseline_ms is None or took_ms <= _SLOWER_THAN_BASELINE * claim.baseline_ms:
        return Finding(
            code="slower-than-promised",
            message=f"your steps take {_ms(took_ms)} ms from the forward pass to the optimizer, this policy promised "
            f"{_ms(claim.step_ms)}: `amptune verify` says why",
            figures=figures,
        )
    return Finding(
        code="slower-than-baseline",
        message=f"your steps take {_ms(took_ms)} ms from the forward pass to the optimizer. This policy promised "
        f"{_ms(claim.step_ms)}, and its baseline took {_ms(claim.baseline_ms)}, so training is faster without it: "
        "put amptune.Policy() in its place, or tune again with `amptune tune`. `amptune verify` says why",
        figures={**figures, "baseline_step_ms": claim.baseline_ms},
    )


def typical_step_ms(steps_ms: Sequence[float]) -> float:
    """Returns the median, over windows of consecutive steps, of their mean time."""
    starts = range(0, len(steps_ms) - _WINDOW_STEPS + 1, _WINDOW_STEPS)
    return statistics.median(statistics.fmean(steps_ms[start : start + _WINDOW_STEPS]) for start in starts)


def _baseline_ms(baseline: Any, samples: int) -> float | None:
    """Returns the baseline's time for that many samples; a baseline without a batch size is taken to have as many."""
    if not isinstance(baseline, Mapping):
        return None
    step_ms, policy = _figure(baseline.get("step_ms")), baseline.get("policy")
    if not isinstance(policy, Mapping):
        return step_ms
    batch_size = _figure(policy.get("batch_size"))
    if step_ms is None or batch_size is None:
        return step_ms
    return step_ms * samples / (batch_size * (_figure(policy.get("accumulate")) or 1))


def _figure(value: Any) -> float | None:
    """Returns a positive number, or None for all else: people write evidence by hand too."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 < value < math.inf else None


def _ms(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"
