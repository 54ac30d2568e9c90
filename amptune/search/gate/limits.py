"""The limits of the numerics gate, and the judgement of a policy by them: is training as good as in FP32? Pure.

Both yardsticks come from the user's own FP32. Gradients are compared with their noise between batches, and with the
effect of rounding the weights in FP32: no computation at that precision can avoid this effect, which is large in an
ill-conditioned model. Loss curves are compared with the differences between FP32's own replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from amptune.measure.results.training_runs import ModuleParity, Parity
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy

__all__ = ["ILL_CONDITIONED", "Judgement", "judged"]

# Healthy networks use up to three quarters of these limits on a CPU. On an H200, measured with an earlier form of the
# limits, they use half of the allowed drift (reports/README.md, "numerics").
MOST_BIAS = 0.3
MOST_ERROR, MOST_ERROR_OF_NOISE = 0.3, 0.7
# Rounding every activation, and not only the weights, was seen to have up to this many times the effect.
TIMES_ROUNDING = 4.0
# If rounding the weights alone changes the gradient by this share, a comparison of the gradient tells nothing. An
# example: the first layers of DenseNet-161 at its first step.
ILL_CONDITIONED = 0.3
MOST_VANISHED = 0.25
LEAST_SIZE = 0.3
# The slope of a policy's gradient over FP32's may differ from 1 by this. Both use the same batches, so these add no
# noise.
MOST_SLOPE_OFF = 0.2
# Of an ill-conditioned gradient only the size and the vanished elements are judged. If it is less than this share of
# the model's, it is rounding noise (a bias before BatchNorm, whose true gradient is 0) and is not judged at all.
NULL_SHARE = 1e-4
MOST_DRIFT = 3.0
# A loss below FP32's does no harm, unless it is so far below that it must be another loss.
MOST_BELOW = 10.0
MOST_BUFFER_OFF, TIMES_APART = 0.3, 3.0
# The share of steps skipped after the loss scale has settled; in practice one step in 2,000 is skipped.
MOST_SKIPPED = 0.2


# (code, figure as a multiple of what is allowed, message)
Told = tuple[str, float, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The gate's judgement of a policy; a policy without `shortcomings` passes."""

    policy: Policy
    parity: Parity
    shortcomings: tuple[Finding, ...]
    tolerance: float | None = None

    @property
    def passes(self) -> bool:
        return not self.shortcomings

    @property
    def used(self) -> float:
        """The largest share that the policy uses of what is allowed: 0 is FP32 itself, above 1 the policy fails."""
        parity, tolerance = self.parity, self.tolerance
        if tolerance is not None and parity.evaluated is not None and parity.evaluated_fp32 is not None:
            off = abs(parity.evaluated - parity.evaluated_fp32)
            return off / tolerance if tolerance else math.inf if off else 0.0
        told = [*map(_told_of, parity.modules), list(_told_of_training(parity))]
        return max([0.0, *(times for some in told for _, times, _ in some)])

    def __str__(self) -> str:
        if self.passes:
            return f"as good as FP32: {self.used:.0%} of what is allowed"
        return "; ".join(map(str, self.shortcomings[:2]))


def judged(policy: Policy, parity: Parity, tolerance: float | None = None) -> Judgement:
    """Returns the judgement of a policy. With a `tolerance`, `evaluate` decides if training did not break."""
    return Judgement(policy=policy, parity=parity, shortcomings=_shortcomings(parity, tolerance), tolerance=tolerance)


def _shortcomings(parity: Parity, tolerance: float | None) -> tuple[Finding, ...]:
    """Returns why a policy is not as good as FP32, the worst first; empty if it passes."""
    if parity.failure is not None:
        module = parity.broken[0] if parity.broken else None
        raised = "" if parity.failure.kind == "nonfinite" else "it raises what FP32 does not: "
        return (Finding(code="breaks", message=f"{raised}{parity.failure}", module=module),)
    training = [_finding(told) for told in _told_of_training(parity) if _is_too_much(told)]
    if tolerance is not None and parity.evaluated is not None and parity.evaluated_fp32 is not None:
        skipped = [finding for finding in training if finding.code == "steps-skipped"]
        return (*skipped, *_of_evaluation(parity.evaluated, parity.evaluated_fp32, tolerance))
    worst = (max(_told_of(module), key=lambda told: told[1], default=None) for module in parity.modules)
    modules = [
        _finding(told, module.path)
        for module, told in zip(parity.modules, worst, strict=True)
        if told is not None and _is_too_much(told)
    ]
    return (*training, *sorted(modules, key=lambda finding: -finding.figures["times_allowed"]))


def _is_too_much(told: Told) -> bool:
    """Returns whether a figure is above what is allowed; NaN counts as above."""
    return not told[1] <= 1


def _finding(told: Told, module: str = "") -> Finding:
    code, times, message = told
    return Finding(code=code, message=message, module=module or None, figures={"times_allowed": times})


def _of_evaluation(evaluated: float, fp32: float, tolerance: float) -> Iterator[Finding]:
    if not abs(evaluated - fp32) <= tolerance:
        message = (
            f"evaluate gives {evaluated:.4g} after a moment of training, {fp32:.4g} in FP32: more than {tolerance:g}"
        )
        figures = {"evaluated": evaluated, "evaluated_fp32": fp32, "tolerance": tolerance}
        yield Finding(code="evaluates-differently", message=message, figures=figures)


def _told_of_training(parity: Parity) -> Iterator[Told]:
    """Yields the figures of the loss scaler, the loss curve and the buffers."""
    yield (
        "steps-skipped",
        parity.skipped_share / MOST_SKIPPED,
        f"the loss scaler skips {parity.skipped_share:.0%} of the steps once it has settled",
    )
    yield (
        "loss-drifts",
        parity.drift / MOST_DRIFT,
        f"the loss is {parity.drift_share:.1%} above that in FP32, {parity.drift:.1f} times what FP32 runs differ by "
        "from one to the other",
    )
    below = f"the loss is {parity.below:.1f} times further below that in FP32 than FP32 runs differ: it is another loss"
    yield "loss-differs", parity.below / MOST_BELOW, below
    for buffer in parity.buffers:
        most = max(MOST_BUFFER_OFF, TIMES_APART * buffer.apart)
        yield (
            "statistics-differ",
            buffer.off / most,
            f"the buffer {buffer.path} is off by {buffer.off:.0%} after a moment of training",
        )


def _told_of(module: ModuleParity) -> list[Told]:
    """Returns the figures of a module's gradient; empty for a gradient that is rounding noise."""
    ill_conditioned = module.rounding >= ILL_CONDITIONED
    if ill_conditioned and module.share < NULL_SHARE:
        return []
    told = [
        (
            "gradient-vanishes",
            module.vanished / MOST_VANISHED,
            f"{module.vanished:.0%} of its gradient's elements vanish",
        ),
        ("gradient-size", _times_off(module.size), f"its gradient is {module.size:.2g} times as large as in FP32"),
    ]
    if ill_conditioned:
        return told
    floor = TIMES_ROUNDING * module.rounding
    most_error = max(MOST_ERROR, MOST_ERROR_OF_NOISE * module.noise, floor)
    slope = f"its gradient holds {module.slope:.0%} of FP32's"
    error = f"its gradient is off by {module.error:.0%}, where it differs by {module.noise:.0%} between batches"
    bias = f"its mean gradient is off by {module.bias:.0%}"
    return [
        *told,
        ("gradient-error", module.error / most_error, error),
        ("gradient-bias", module.bias / max(MOST_BIAS, floor), bias),
        ("gradient-slope", abs(module.slope - 1) / max(MOST_SLOPE_OFF, floor), slope),
    ]


def _times_off(size: float) -> float:
    """Returns 0 if the gradient is as large as in FP32, 1 if it is `LEAST_SIZE` or 1 / `LEAST_SIZE` times as large."""
    return abs(math.log(max(size, 1e-9)) / math.log(LEAST_SIZE))
