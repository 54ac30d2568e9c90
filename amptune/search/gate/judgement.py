"""The judgement of a policy by the limits of the numerics gate: is training as good as in FP32? Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from amptune.measure.numerics.limits import JudgedFigure, figures_of
from amptune.measure.results.training_runs import Parity
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy

__all__ = ["Judgement", "judged"]


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
        return max([0.0, *(figure.times_allowed for figure in figures_of(self.parity, self.tolerance))])

    @property
    def worst(self) -> tuple[Finding, ...]:
        """The figures nearest to their limits or beyond, the worst first, one a module."""
        figures = figures_of(self.parity, self.tolerance)
        return _one_a_module(sorted(figures, key=lambda figure: -figure.times_allowed))

    def __str__(self) -> str:
        if self.passes:
            return f"as good as FP32: {self.used:.0%} of what is allowed"
        return "; ".join(map(str, self.shortcomings[:2]))


def judged(policy: Policy, parity: Parity, tolerance: float | None = None) -> Judgement:
    """Returns the judgement of a policy. With a `tolerance`, the result of `evaluate` is held to FP32's too."""
    return Judgement(policy=policy, parity=parity, shortcomings=_shortcomings(parity, tolerance), tolerance=tolerance)


def _shortcomings(parity: Parity, tolerance: float | None) -> tuple[Finding, ...]:
    """Returns why a policy is not as good as FP32, one finding a module, the worst first; empty if it passes."""
    if parity.failure is not None:
        module = parity.broken[0] if parity.broken else None
        raised = "" if parity.failure.kind == "nonfinite" else "it raises what FP32 does not: "
        return (Finding(code="breaks", message=f"{raised}{parity.failure}", module=module),)
    exceeded = [figure for figure in figures_of(parity, tolerance) if not figure.times_allowed <= 1]  # NaN exceeds too
    return _one_a_module(sorted(exceeded, key=lambda figure: (figure.module is not None, -figure.times_allowed)))


def _one_a_module(ranked: Iterable[JudgedFigure]) -> tuple[Finding, ...]:
    """Returns the first figure of each module, and of each kind of figure that is of no module."""
    first: dict[str, JudgedFigure] = {}
    for figure in ranked:
        first.setdefault(figure.code if figure.module is None else figure.module, figure)
    return tuple(figure.as_finding() for figure in first.values())
