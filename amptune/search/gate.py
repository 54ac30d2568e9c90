"""The numerics gate: is training under a policy as good as training in FP32? Pure: from figures to reasons against it.

Both yardsticks come from the user's own FP32: gradients are held against their noise between batches and against what
rounding the weights would do to them in FP32 (what no way of computing at that precision can avoid, so what an
ill-conditioned model cannot complain of), loss curves against how far FP32's own replicas are apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from amptune.measure.numerics import ModuleParity, Parity
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy

__all__ = ["ILL_CONDITIONED", "Judgement", "judged", "used_of"]

# Healthy networks were measured on an H200 and on a CPU, in bf16, fp16 and TF32 (reports/numerics): they use up to
# three quarters of what is allowed here, and half of the allowed drift.
MOST_BIAS = 0.3
MOST_ERROR, MOST_ERROR_OF_NOISE = 0.3, 0.7
# Rounding every activation on the way, and not only the weights, was seen to be up to so much worse.
TIMES_ROUNDING = 4.0
# Where rounding the weights alone changes the gradient by this share, nothing is to be learned from comparing it: the
# first layers of DenseNet-161 at its first step.
ILL_CONDITIONED = 0.3
MOST_VANISHED = 0.25
LEAST_SIZE = 0.3
MOST_DRIFT = 3.0
# Of the steps behind the settling of the loss scale; in practice one in 2,000 is skipped.
MOST_SKIPPED = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What the gate says of a policy; a policy with no `shortcomings` passes."""

    policy: Policy
    parity: Parity
    shortcomings: tuple[Finding, ...]

    @property
    def passes(self) -> bool:
        return not self.shortcomings

    def __str__(self) -> str:
        if self.passes:
            return f"as good as FP32: {used_of(self.parity):.0%} of what is allowed"
        return "; ".join(map(str, self.shortcomings[:2]))


def judged(policy: Policy, parity: Parity, tolerance: float | None = None) -> Judgement:
    """The gate's word on a policy. With a `tolerance`, `evaluate` decides where training did not break."""
    return Judgement(policy=policy, parity=parity, shortcomings=_shortcomings(parity, tolerance))


def used_of(parity: Parity) -> float:
    """How much of what is allowed a policy uses, at its worst place: 0 is FP32 itself, above 1 it fails."""
    modules = [times for module in parity.modules for _, times, _ in _told_of(module)]
    return max([*modules, parity.drift / MOST_DRIFT, parity.skipped_share / MOST_SKIPPED, 0.0])


def _shortcomings(parity: Parity, tolerance: float | None) -> tuple[Finding, ...]:
    """Why a policy is not as good as FP32, the worst first; none where it passes."""
    if parity.failure is not None:
        module = parity.broken[0] if parity.broken else None
        return (Finding(code="breaks", message=str(parity.failure), module=module),)
    found = list(_of_scaling(parity))
    if tolerance is not None and parity.evaluated is not None and parity.evaluated_fp32 is not None:
        return (*found, *_of_evaluation(parity.evaluated, parity.evaluated_fp32, tolerance))
    modules = [finding for module in parity.modules for finding in _of_module(module)]
    modules.sort(key=lambda finding: -finding.figures["times_allowed"])
    return (*found, *_of_curve(parity), *modules)


def _of_scaling(parity: Parity) -> Iterator[Finding]:
    if parity.skipped_share > MOST_SKIPPED:
        message = f"the loss scaler skips {parity.skipped_share:.0%} of the steps once it has settled"
        yield Finding(code="steps-skipped", message=message, figures={"skipped_share": parity.skipped_share})


def _of_evaluation(evaluated: float, fp32: float, tolerance: float) -> Iterator[Finding]:
    if not abs(evaluated - fp32) <= tolerance:
        message = (
            f"evaluate gives {evaluated:.4g} after a moment of training, {fp32:.4g} in FP32: more than {tolerance:g}"
        )
        figures = {"evaluated": evaluated, "evaluated_fp32": fp32, "tolerance": tolerance}
        yield Finding(code="evaluates-differently", message=message, figures=figures)


def _of_curve(parity: Parity) -> Iterator[Finding]:
    if parity.drift > MOST_DRIFT:
        message = (
            f"the loss is {parity.drift_share:.1%} above that in FP32, {parity.drift:.1f} times what FP32 runs "
            "differ by from one to the other"
        )
        figures = {"drift": parity.drift, "drift_share": parity.drift_share}
        yield Finding(code="loss-drifts", message=message, figures=figures)


def _of_module(module: ModuleParity) -> Iterator[Finding]:
    """The worst that is to be said of a module's gradient, if it is bad enough."""
    code, times, message = max(_told_of(module), key=lambda one: one[1])
    if times > 1:
        yield Finding(
            code=f"gradient-{code}", message=message, module=module.path or None, figures={"times_allowed": times}
        )


def _told_of(module: ModuleParity) -> list[tuple[str, float, str]]:
    """(code, times what is allowed, words) of everything that is looked at."""
    told = [
        ("vanishes", module.vanished / MOST_VANISHED, f"{module.vanished:.0%} of its gradient's elements vanish"),
        ("shrinks", _times_too_small(module.size), f"its gradient is {module.size:.2g} times as large as in FP32"),
    ]
    if module.rounding < ILL_CONDITIONED:
        floor = TIMES_ROUNDING * module.rounding
        most_error = max(MOST_ERROR, MOST_ERROR_OF_NOISE * module.noise, floor)
        error = f"its gradient is off by {module.error:.0%}, where it differs by {module.noise:.0%} between batches"
        bias = f"its mean gradient is off by {module.bias:.0%}"
        told += [("error", module.error / most_error, error), ("bias", module.bias / max(MOST_BIAS, floor), bias)]
    return told


def _times_too_small(size: float) -> float:
    """0 where the gradient is as large as in FP32, 1 where it is `LEAST_SIZE` of that."""
    return max(0.0, (1 - size) / (1 - LEAST_SIZE)) if size > LEAST_SIZE else LEAST_SIZE / max(size, 1e-9)
