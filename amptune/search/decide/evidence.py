"""The evidence in a policy file: the machines and models that it holds for, and the figures behind it."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, cast

from amptune.measure.results.outcome import Measurement
from amptune.measure.results.subject import Prepared
from amptune.measure.results.training_runs import HARMLESS, ILL_CONDITIONED
from amptune.policy.findings import Finding
from amptune.policy.policy_file import Evidence
from amptune.policy.serialization import policy_to_dict
from amptune.policy.settings import Policy
from amptune.search.decide.conclusion import Conclusion
from amptune.search.gate.judgement import Judgement
from amptune.search.table.ablation import Ablated
from amptune.search.table.contenders import Contender
from amptune.search.table.objective import Objective
from amptune.search.table.ratio import Ratio
from amptune.search.table.row import Row
from amptune.search.table.verdict import Verdict

__all__ = ["evidence_of", "labels_of", "parity_of"]

# Prefixes of the labels that the evidence depends on. Others (driver, site labels) do not change which policy wins.
_HOLDS_FOR = {
    "cuda": ("nvidia.com/gpu.product", "nvidia.com/gpu.memory", "nvidia.com/gpu.compute.", "torch", "cudnn"),
    "cpu": ("kubernetes.io/arch", "feature.node.kubernetes.io/cpu-", "torch"),
}


def labels_of(prepared: Prepared) -> dict[str, str]:
    """Returns `valid_for`: the labels of this machine that matter, and the model's digest."""
    prefixes = _HOLDS_FOR[prepared.hardware.device]
    return {name: value for name, value in prepared.labels.items() if name == "model" or name.startswith(prefixes)}


def evidence_of(
    found: Conclusion,
    rows: Sequence[Row],
    parity: Mapping[str, float],
    findings: Sequence[Finding],
    *,
    seconds: float,
    provisional: bool,
) -> Evidence:
    """Returns the policy file's `evidence`. Of the sound trials it keeps those that no other one beats.

    Keys have the order of the format, so that a reader meets the claim before the figures of all finalists.
    """
    verdict, baseline = found.verdict, found.baseline
    devices = max((row.outcome.devices for row in rows if isinstance(row.outcome, Measurement)), default=1)
    evidence: dict[str, Any] = {
        "baseline": _figures(baseline) | ({"trial": baseline.axes} if baseline in found.points else {}),
        "amp_recipe": found.amp_recipe and _figures(found.amp_recipe),
        **_own_figures(verdict.winner),
        "plain_loop": _of_plain_loop(verdict),
        **_of_objective(found),
        "parity": {**parity, **_of_the_gate(found.judgements.known(verdict.winner.policy))},
        "finalists": [_figures(contender) for contender in found.finalists],
        "ablation": {one.variant.setting: _bought(one, found.objective) for one in found.ablation} or None,
        "pareto": found.pareto or None,
        "findings": [finding.as_dict() for finding in findings],
        "confidence": verdict.confidence,
        "provisional": provisional or None,
        "devices": devices if devices > 1 else None,
        "tuned_on": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "trials": len(found.trials),
        "seconds": round(seconds, 1),
    }
    known = {key: evidence[key] for key in Evidence.__annotations__ if evidence.get(key) is not None}
    return cast("Evidence", known)


def _of_plain_loop(verdict: Verdict) -> dict[str, Any] | None:
    """Returns what a loop gets that does not train by `tuned.training_step`, if the winner needs that, and if known."""
    policy = verdict.winner.policy
    if not policy.needs_call:
        return None
    plain = replace(policy, compile="default") if policy.compile == "step" else policy
    others = (verdict.contender_of(replace(plain, cuda_graphs=graphs)) for graphs in (True, False))
    known = next((one.vs_baseline for one in others if one is not None and one.vs_baseline is not None), None)
    return None if known is None else {"speedup": _digits(known.value), "speedup_ci95": _interval(known)}


def _of_objective(found: Conclusion) -> dict[str, Any]:
    """Returns the objective and its gain; nothing for throughput, as its gain is the speedup."""
    objective, gain = found.objective, found.gain
    if objective.name == "throughput":
        return {}
    least_speed = objective.least_speed if objective.needs_speed else None
    figures = {"objective": objective.name, "gain": _digits(gain.value), "gain_ci95": _interval(gain)}
    return {**figures, "least_speed": least_speed}


def parity_of(rows: Sequence[Row], policy: Policy, baseline: Policy) -> dict[str, float]:
    """Returns how far the first steps under `policy` are from the baseline's, from the same weights and batches.

    Losses are compared by their largest relative deviation, the first gradient's L2 norm by its relative deviation.
    `fp32_loss_deviation` compares the baseline's own runs, which differ only by the GPU's order of summation.
    """
    own, reference = _measurements(rows, policy), _measurements(rows, baseline)
    if not own or not reference:
        return {}
    first = reference[0]
    if own[0].samples_per_step != first.samples_per_step:
        return {}  # losses of different batches cannot be compared
    parity = {"loss_deviation": max(_loss_deviation(m, first) for m in own)}
    if len(reference) > 1:
        parity["fp32_loss_deviation"] = max(_loss_deviation(m, first) for m in reference[1:])
    if first.gradient_norm and own[0].gradient_norm is not None:
        parity["gradient_norm_deviation"] = abs(own[0].gradient_norm / first.gradient_norm - 1)
    return {name: float(f"{value:.3g}") for name, value in parity.items()}


def _of_the_gate(judgement: Judgement | None) -> dict[str, Any]:
    """Returns the figures of the numerics gate, and the largest share used of what it allows."""
    if judgement is None:
        return {}
    parity = judgement.parity
    gradients = [gradient for gradient in parity.gradients if gradient.share >= HARMLESS * parity.precision]
    compared = [gradient for gradient in gradients if gradient.rounding < ILL_CONDITIONED]
    figures: dict[str, Any] = {
        "share_of_allowed": judgement.used,
        "gradient_bias": max((gradient.bias for gradient in compared), default=None),
        "gradient_error": max((gradient.error for gradient in compared), default=None),
        "gradient_noise_fp32": statistics.median(gradient.noise for gradient in gradients) if gradients else None,
        "loss_drift": parity.drift_share,
        "loss_drift_of_fp32_spread": parity.drift,
        "skipped_share": parity.skipped_share,
        "evaluated": parity.evaluated,
        "evaluated_fp32": parity.evaluated_fp32,
    }
    rounded = {name: float(f"{value:.3g}") for name, value in figures.items() if value is not None}
    modules, judged = ({gradient.module for gradient in some} for some in (gradients, compared))
    return rounded | {"modules": len(modules), "modules_compared": len(judged), "spread_from": parity.spread}


def _measurements(rows: Sequence[Row], policy: Policy) -> list[Measurement]:
    return [row.outcome for row in rows if row.policy == policy and isinstance(row.outcome, Measurement)]


def _loss_deviation(a: Measurement, b: Measurement) -> float:
    pairs = zip(a.losses, b.losses, strict=False)
    return max((abs(x - y) / max(abs(y), sys.float_info.min) for x, y in pairs), default=0.0)


def _figures(contender: Contender) -> dict[str, Any]:
    """Returns one finalist as plain data: its policy and what was measured, or how it failed."""
    figures: dict[str, Any] = {"policy": policy_to_dict(contender.policy)}
    if contender.failure is not None:
        return {**figures, "failure": {"kind": contender.failure.kind, "message": contender.failure.message}}
    return {**figures, **_own_figures(contender)}


def _own_figures(contender: Contender) -> dict[str, Any]:
    figures: dict[str, Any] = {
        "samples_per_s": contender.samples_per_s and _digits(contender.samples_per_s),
        "step_ms": contender.step_ms and _digits(contender.step_ms),
        "step_ms_ci95": contender.step_ms_ci95 and [_digits(limit) for limit in contender.step_ms_ci95],
        "peak_memory_mib": contender.peak_memory_mib and round(contender.peak_memory_mib),
        "energy_j_per_sample": contender.energy_j_per_sample and _digits(contender.energy_j_per_sample),
    }
    ratio = contender.vs_baseline
    if ratio is not None:
        figures |= {"speedup": _digits(ratio.value), "speedup_ci95": _interval(ratio), "launches": ratio.launches}
    if contender.too_slow:
        figures["too_slow"] = True
    if contender.lost:
        figures["lost"] = contender.lost
    return {name: value for name, value in figures.items() if value is not None}


def _bought(one: Ablated, objective: Objective) -> dict[str, Any]:
    figures = {
        "value": one.variant.value,
        "reverted_to": one.variant.reverted_to,
        "buys": _digits(one.buys.value),
        "buys_ci95": _interval(one.buys),
    }
    return figures if objective.name == "throughput" else {**figures, "speed": _digits(one.speed.value)}


def _interval(ratio: Ratio) -> list[float] | None:
    """Returns a ratio's interval; None if it has no end."""
    return None if math.isinf(ratio.high) else [_digits(ratio.low), _digits(ratio.high)]


def _digits(value: float) -> float:
    """Rounds to four significant digits: more than the measurement's precision, and still easy to read."""
    return float(f"{value:.4g}")
