"""The numerics gate: is training under a policy as good as training in FP32? Pure: from figures to reasons against it.

Both yardsticks come from the user's own FP32: gradients are held against their noise between batches and against what
rounding the weights would do to them in FP32 (what no way of computing at that precision can avoid, so what an
ill-conditioned model cannot complain of), loss curves against how far FP32's own replicas are apart.
"""

from __future__ import annotations

from collections.abc import Iterator

from amptune.measure.numerics import ModuleParity, Parity
from amptune.policy.findings import Finding

__all__ = ["shortcomings"]

# Healthy networks were measured on an H200 and on a CPU in bf16, fp16 and TF32 (reports/README.md, "The numerics
# gate"): bias up to 0.12, error up to 0.56 of the noise or three times `rounding`, drift up to 0.9.
MOST_BIAS = 0.3
MOST_ERROR, MOST_ERROR_OF_NOISE = 0.3, 0.7
# Rounding every activation on the way, and not only the weights, was seen to be so much worse.
TIMES_ROUNDING = 3.0
# Where rounding the weights changes the gradient by this share, nothing is to be learned from comparing it.
ILL_CONDITIONED = 0.5
MOST_VANISHED = 0.25
LEAST_SIZE = 0.3
MOST_DRIFT = 3.0
# Of the steps behind the settling of the loss scale; in practice one in 2,000 is skipped.
MOST_SKIPPED = 0.2


def shortcomings(parity: Parity, tolerance: float | None = None) -> tuple[Finding, ...]:
    """Why a policy is not as good as FP32, the worst first; none where it passes.

    With a `tolerance`, the workload's own `evaluate` decides where training did not break.
    """
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
    told = [
        ("vanishes", module.vanished / MOST_VANISHED, f"{module.vanished:.0%} of its gradient's elements vanish"),
        (
            "shrinks",
            LEAST_SIZE / max(module.size, 1e-9),
            f"its gradient is {module.size:.2g} times as large as in FP32",
        ),
    ]
    if module.rounding < ILL_CONDITIONED:
        floor = TIMES_ROUNDING * module.rounding
        most_error = max(MOST_ERROR, MOST_ERROR_OF_NOISE * module.noise, floor)
        error = f"its gradient is off by {module.error:.0%}, where it differs by {module.noise:.0%} between batches"
        bias = f"its mean gradient is off by {module.bias:.0%}"
        told += [("error", module.error / most_error, error), ("bias", module.bias / max(MOST_BIAS, floor), bias)]
    code, times, message = max(told, key=lambda one: one[1])
    if times > 1:
        yield Finding(
            code=f"gradient-{code}", message=message, module=module.path or None, figures={"times_allowed": times}
        )
