"""The judgement of a policy by the limits of the numerics gate: is training as good as in FP32? Values, pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amptune.measure.numerics.limits import JudgedFigure, figures_of
from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import Parity
from amptune.policy.findings import Finding
from amptune.policy.serialization import adapter_for, policy_from_dict, policy_to_dict
from amptune.policy.settings import Policy

__all__ = ["Judgement", "Unjudged", "is_own_fault"]

# Figures of a judgement that a study keeps.
MOST_WORST = 30
# What the run that judges knows besides, and a study does not keep.
_LIVE = ("shortcomings", "parity")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The gate's judgement of a policy: whether it is as good as FP32, and the largest share of a limit it uses.

    With a share of 0 it is FP32 itself, above 1 it fails. `worst` are the figures nearest to their limits or beyond,
    the worst first, one a module; `losses` is the policy's loss curve, `losses_fp32` that of FP32 and of its replicas.
    `shortcomings` are why it fails, one a module, the worst first. They and `parity`, all that was compared, are empty
    in a judgement that was read from a study; one of an earlier amptune has no figures and losses either.
    """

    policy: Policy
    passes: bool
    used: float
    words: str
    worst: tuple[Finding, ...] = ()
    losses: tuple[float, ...] = ()
    losses_fp32: tuple[tuple[float, ...], ...] = ()
    shortcomings: tuple[Finding, ...] = field(default=(), compare=False)
    parity: Parity = field(default=Parity(), compare=False, repr=False)

    @staticmethod
    def of(policy: Policy, parity: Parity, tolerance: float | None = None) -> Judgement:
        """Judges a policy. With a `tolerance`, the result of the workload's `evaluate` is held to FP32's too."""
        figures = figures_of(parity, tolerance)
        used = max([0.0, *(figure.times_allowed for figure in figures)])
        shortcomings = _shortcomings(parity, figures)
        words = "; ".join(map(str, shortcomings[:2])) or f"as good as FP32: {used:.0%} of what is allowed"
        return Judgement(
            policy=policy,
            passes=not shortcomings,
            used=used,
            words=words,
            worst=_one_a_module(sorted(figures, key=lambda figure: -figure.times_allowed)),
            losses=parity.losses,
            losses_fp32=parity.losses_fp32,
            shortcomings=shortcomings,
            parity=parity,
        )

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
        kept = {name: value for name, value in data.items() if name not in _LIVE}
        read = {**kept, "policy": policy_from_dict(data["policy"]), "worst": worst}
        return adapter_for(Judgement).validate_python(read)  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class Unjudged:
    """A policy that is neither sound nor unsound: memory or time was short, or the gate's own procedure broke."""

    policy: Policy
    because: Failure


def is_own_fault(policy: Policy, failure: Failure) -> bool:
    """Returns True if a policy is to blame for a failure, not the machine, the compiler or the gate.

    An exception of a graph alone is not the policy's: its steps ran when it was timed, and its precision is judged
    without a graph.
    """
    return failure.kind == "nonfinite" or (failure.kind in ("error", "unsupported") and policy.compile == "off")


def _shortcomings(parity: Parity, figures: Iterable[JudgedFigure]) -> tuple[Finding, ...]:
    """Returns why a policy is not as good as FP32, one finding a module, the worst first; empty if it passes."""
    if parity.failure is not None:
        module = parity.broken[0] if parity.broken else None
        raised = "" if parity.failure.kind == "nonfinite" else "it raises what FP32 does not: "
        return (Finding(code="breaks", message=f"{raised}{parity.failure}", module=module),)
    exceeded = [figure for figure in figures if not figure.times_allowed <= 1]  # NaN exceeds too
    return _one_a_module(sorted(exceeded, key=lambda figure: (figure.module is not None, -figure.times_allowed)))


def _one_a_module(ranked: Iterable[JudgedFigure]) -> tuple[Finding, ...]:
    """Returns the first figure of each module, and of each kind of figure that is of no module."""
    first: dict[str, JudgedFigure] = {}
    for figure in ranked:
        first.setdefault(figure.code if figure.module is None else figure.module, figure)
    return tuple(figure.as_finding() for figure in first.values())


def _short(losses: Sequence[float]) -> list[float]:
    """Returns the losses to six digits, which is what a chart shows of them."""
    return [float(f"{loss:.6g}") for loss in losses]
