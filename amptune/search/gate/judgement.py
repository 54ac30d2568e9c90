"""The judgement of a policy by the limits of the numerics gate: is training as good as in FP32? Values, pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amptune.measure.numerics.limits import JudgedFigure, figures_of
from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import Parity
from amptune.policy.findings import Finding
from amptune.policy.serialization import adapter_for, policy_from_dict, policy_to_dict
from amptune.policy.settings import Policy

__all__ = ["Judgement", "Unjudged", "is_own_fault", "judged"]

# Figures of a judgement that a study keeps.
MOST_WORST = 30
_BREAKS = "breaks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The gate's judgement of a policy: whether it is as good as FP32, and the largest share of a limit it uses.

    With a share of 0 it is FP32 itself, above 1 it fails. `worst` are the figures nearest to their limits or beyond,
    the worst first, one a module, or what broke training; `losses` is the policy's loss curve, `losses_fp32` that of
    FP32 and of its replicas. `parity` is all that was compared;
    it is empty in a judgement that was read from a study.
    """

    policy: Policy
    passes: bool
    used: float
    words: str
    worst: tuple[Finding, ...] = ()
    losses: tuple[float, ...] = ()
    losses_fp32: tuple[tuple[float, ...], ...] = ()
    parity: Parity = field(default=Parity(), compare=False, repr=False)

    @property
    def shortcomings(self) -> tuple[Finding, ...]:
        """Why the policy fails, one finding a module: of the whole model first, then the worst first."""
        return _beyond(self.worst)

    def __str__(self) -> str:
        return self.words

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data for the study; `from_dict` is the inverse."""
        return {
            "policy": policy_to_dict(self.policy),
            "passes": self.passes,
            "used": self.used,
            "words": self.words,
            "worst": [finding.as_dict() for finding in self.worst[:MOST_WORST]],
            "losses": _short(self.losses),
            "losses_fp32": [_short(losses) for losses in self.losses_fp32],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Judgement:
        """Reads what `as_dict` returns. Raises an error for anything else."""
        worst = tuple(map(Finding.from_dict, data.get("worst", ())))
        kept = {name: value for name, value in data.items() if name != "parity"}
        read = {**kept, "policy": policy_from_dict(data["policy"]), "worst": worst}
        return adapter_for(Judgement).validate_python(read)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Unjudged:
    """A policy that is neither sound nor unsound: memory or time was short, or the gate's own procedure broke."""

    policy: Policy
    because: Failure


def judged(policy: Policy, parity: Parity, tolerance: float | None = None) -> Judgement:
    """Returns the judgement of a policy; with a `tolerance`, the result of `evaluate` is held to FP32's too."""
    figures = figures_of(parity, tolerance)
    used = max([0.0, *(figure.times_allowed for figure in figures)])
    worst = _one_a_module(figures) if parity.failure is None else (_broken(parity.failure, parity.broken),)
    words = "; ".join(map(str, _beyond(worst)[:2]))
    return Judgement(
        policy=policy,
        passes=not words,
        used=used,
        words=words or f"as good as FP32: {used:.0%} of what is allowed",
        worst=worst,
        losses=parity.losses,
        losses_fp32=parity.losses_fp32,
        parity=parity,
    )


def is_own_fault(policy: Policy, failure: Failure) -> bool:
    """Returns True if a policy is to blame for a failure, not the machine, the compiler or the gate.

    An exception of a graph alone is not the policy's: its steps ran when it was timed, and its precision is judged
    without a graph.
    """
    return failure.kind == "nonfinite" or (failure.kind in ("error", "unsupported") and policy.compile == "off")


def _broken(failure: Failure, modules: Sequence[str]) -> Finding:
    raised = "" if failure.kind == "nonfinite" else "it raises what FP32 does not: "
    return Finding(code=_BREAKS, message=f"{raised}{failure}", module=modules[0] if modules else None)


def _one_a_module(figures: Iterable[JudgedFigure]) -> tuple[Finding, ...]:
    """Returns the worst figure of each module, and of each kind of figure that is of no module; NaN is the worst."""
    worst: dict[str, JudgedFigure] = {}
    for figure in sorted(figures, key=lambda one: -math.inf if math.isnan(one.times_allowed) else -one.times_allowed):
        worst.setdefault(figure.code if figure.module is None else figure.module, figure)
    return tuple(figure.as_finding() for figure in worst.values())


def _beyond(worst: Iterable[Finding]) -> tuple[Finding, ...]:
    """Returns what is beyond its limit, no number included, of the whole model first."""
    beyond = [one for one in worst if one.code == _BREAKS or not one.figures.get("times_allowed", 0.0) <= 1]
    return tuple(sorted(beyond, key=lambda one: one.module is not None))


def _short(losses: Sequence[float]) -> list[float]:
    """Returns the losses to six digits, which is what a chart shows of them."""
    return [float(f"{loss:.6g}") for loss in losses]
