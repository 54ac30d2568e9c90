"""The limits of the numerics gate: what training under a policy uses of what is allowed beside FP32. Pure.

Both yardsticks come from the user's own FP32. Gradients are compared with the effect of rounding the weights in FP32:
no computation at that precision can avoid this effect, which is large in an ill-conditioned model. Loss curves are
compared with the differences between FP32's own replicas.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from amptune.measure.results.training_runs import (
    HARMLESS,
    ILL_CONDITIONED,
    MOST_BUFFER_OFF,
    TIMES_BELOW,
    TIMES_SPREAD,
    BufferParity,
    GradientParity,
    Parity,
)
from amptune.policy.findings import Finding

__all__ = ["JudgedFigure", "buffer_limit", "figures_of", "is_near_limits"]

MOST_BIAS = MOST_ERROR = 0.3
# Rounding every activation, and not only the weights, was seen to have up to 4.4 times the effect.
TIMES_ROUNDING = 6.0
# The weight of a BatchNorm whose channels another one divides by, as after a depthwise convolution, has no gradient but
# for an epsilon, and in half the sum of millions of rounding errors: in 27 models up to 9 times what is negligible.
TIMES_NULL = 2 * TIMES_ROUNDING
MOST_VANISHED = 0.25
LEAST_SIZE = 0.3
# The slope of a policy's gradient over FP32's, on the same batches, may differ from 1 by this.
MOST_SLOPE_OFF = 0.2
# A gradient that is shorter than this share of the whole model's is rounding noise in FP32 too.
NULL_SHARE = 2**-24
# A measure that FP32 has not moved by a tolerance counts if the policy moves it by this many: it was no chance level.
TIMES_MOVED = 3.0
# The share of steps skipped after the loss scale has settled; in practice one step in 2,000 is skipped.
MOST_SKIPPED = 0.2
# Of hundreds of figures of a healthy model one was seen to exceed its limit by chance, by up to 2.5 times; of planted
# faults that break training the worst figure does so by 3.1 times and more.
MOST_BY_CHANCE = 3.0


@dataclass(frozen=True, slots=True)
class JudgedFigure:
    """A figure of a judgement, as a multiple of what is allowed; of a module's gradient, if a module is named."""

    code: str
    times_allowed: float
    message: str
    allowed: str
    module: str | None = None
    parameter: str | None = None
    buffer: str | None = None

    @property
    def of(self) -> tuple[str, str | None]:
        """Its code and its parameter or buffer: no other figure of a look has the same."""
        return self.code, self.parameter or self.buffer

    def as_finding(self) -> Finding:
        message = f"{self.message} ({self.times_allowed:.3g} times what is allowed: {self.allowed})"
        figures = {"times_allowed": self.times_allowed, "allowed": self.allowed, "parameter": self.parameter}
        return Finding(code=self.code, message=message, module=self.module or None, figures=figures)


def is_near_limits(parity: Parity, tolerance: float | None = None) -> bool:
    """Returns True if figures exceed their limits by no more than chance can make them."""
    return parity.failure is None and 1 < _used(figures_of(parity, tolerance)) <= MOST_BY_CHANCE


def _used(figures: Iterable[JudgedFigure]) -> float:
    """Returns the largest figure; infinity if one is no number."""
    return max(math.inf if math.isnan(one.times_allowed) else one.times_allowed for one in figures)


def figures_of(parity: Parity, tolerance: float | None = None) -> tuple[JudgedFigure, ...]:
    """Returns the figures; after a second look each as it was when it used less of what is allowed.

    Gradients that cannot be compared in the second look are left out. If that look finds more than chance makes, its
    figures count. With a `tolerance`, the result of the workload's `evaluate` is one of them.
    """
    first = {one.of: one for one in _figures_of_a_look(parity, tolerance)}
    if parity.again is None:
        return tuple(first.values())
    again = {one.of: one for one in _figures_of_a_look(parity.again, tolerance)}
    if _used(again.values()) > MOST_BY_CHANCE:
        return tuple(again.values())
    both = ((one, again.get(of, one)) for of, one in first.items() if of in again or one.parameter is None)
    return tuple(min(pair, key=lambda one: one.times_allowed) for pair in both)


def _figures_of_a_look(parity: Parity, tolerance: float | None) -> Iterator[JudgedFigure]:
    yield JudgedFigure(
        "steps-skipped",
        parity.skipped_share / MOST_SKIPPED,
        f"the loss scaler skips {parity.skipped_share:.0%} of the steps once it has settled",
        f"{MOST_SKIPPED:.0%}",
    )
    yield JudgedFigure(
        "loss-drifts",
        parity.drift / TIMES_SPREAD,
        f"the loss is {parity.drift_share:.1%} above that in FP32, {parity.drift:.1f} times what chance makes FP32 "
        "runs differ by",
        f"{TIMES_SPREAD:g} times",
    )
    spread = f"{parity.below:.1f} times the spread of FP32 runs"
    below = f"the loss is far below FP32's ({spread}): probably not the same loss"
    yield JudgedFigure("loss-differs", parity.below / TIMES_BELOW, below, f"{TIMES_BELOW:g} times")
    for buffer in parity.buffers:
        yield JudgedFigure(
            "statistics-differ",
            buffer.off / buffer_limit(buffer),
            f"the buffer {buffer.path} is off by {buffer.off:.0%} after a moment of training",
            f"{buffer_limit(buffer):.0%}",
            buffer=buffer.path,
        )
    if tolerance is not None:
        yield from _of_evaluation(parity, tolerance)
    for gradient in parity.gradients:
        yield from _of_gradient(gradient, HARMLESS * parity.precision / gradient.share)


def buffer_limit(buffer: BufferParity) -> float:
    """Returns how far a buffer may be from FP32's."""
    return max(MOST_BUFFER_OFF, TIMES_SPREAD * buffer.apart)


def _of_evaluation(parity: Parity, tolerance: float) -> Iterator[JudgedFigure]:
    """Yields the figure of the user's own measure, unless it is still about what it was before training."""
    evaluated, fp32, at_start = parity.evaluated, parity.evaluated_fp32, parity.evaluated_at_start
    if evaluated is None or fp32 is None:
        return
    if (
        at_start is not None
        and abs(fp32 - at_start) <= tolerance
        and abs(evaluated - at_start) <= TIMES_MOVED * tolerance
    ):
        return
    off = abs(evaluated - fp32)
    times = off / tolerance if tolerance else math.inf if off else 0.0
    message = f"evaluate gives {evaluated:.4g} after a moment of training, {fp32:.4g} in FP32"
    yield JudgedFigure("evaluates-differently", times, message, f"{tolerance:g}")


def _of_gradient(one: GradientParity, negligible: float) -> Iterator[JudgedFigure]:
    """Yields the figures of a parameter's gradient; errors below `negligible` are allowed, but it must not vanish."""
    if one.share < NULL_SHARE:
        return
    name = one.name.rpartition(".")[2]
    whose, floor = f"the gradient of {name}", max(negligible, TIMES_ROUNDING * one.rounding)

    def figure(code: str, times: float, message: str, allowed: str) -> JudgedFigure:
        return JudgedFigure(f"gradient-{code}", times, message, allowed, one.module, one.name)

    vanished = f"{one.vanished:.0%} of the elements vanish in {whose}"
    yield figure("vanishes", one.vanished / MOST_VANISHED, vanished, f"{MOST_VANISHED:.0%}")
    # Where rounding the weights leaves little of FP32's gradient, as of a bias before BatchNorm, that is noise too.
    noise = negligible * (TIMES_NULL if one.rounding >= ILL_CONDITIONED else 1.0)
    size = _times_off(one.size if one.size < 1 else max(1.0, one.size - noise))
    large = f"{whose} is {one.size:.2g} times as large as in FP32"
    yield figure("size", size, large, f"{LEAST_SIZE:g} to {1 / LEAST_SIZE:.2g}")
    if one.rounding >= ILL_CONDITIONED:
        return
    error = f"{whose} is off by {one.error:.0%}, where rounding the weights changes it by {one.rounding:.1%}"
    most = max(MOST_ERROR, floor)
    yield figure("error", one.error / most, error, f"{most:.0%}")
    most = max(MOST_BIAS, floor)
    yield figure("bias", one.bias / most, f"{whose} is off by {one.bias:.0%} in the mean", f"{most:.0%}")
    most = max(MOST_SLOPE_OFF, floor)
    slope = f"{whose} has {one.slope:.0%} of FP32's length along FP32's direction"
    yield figure("slope", abs(one.slope - 1) / most, slope, f"{1 - most:.0%} to {1 + most:.0%}")


def _times_off(size: float) -> float:
    """Returns 0 if the gradient is as large as in FP32, 1 if it is `LEAST_SIZE` or 1 / `LEAST_SIZE` times as large."""
    return abs(math.log(max(size, 1e-9)) / math.log(LEAST_SIZE))
