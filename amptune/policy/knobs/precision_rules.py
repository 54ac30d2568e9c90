"""Rules that give modules a precision of their own, by path or by type."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from amptune.policy.findings import Finding
from amptune.policy.knobs.knob import Knob, Settings

__all__ = ["FP32_MODULES", "HALF_MODULES", "Fp32Rule", "HalfRule", "ModuleRule", "Reason"]

# For pydantic, which makes the JSON Schemas from these classes: a key that is not a field of the class is an error.
_STRICT = {"extra": "forbid"}
# A recorded risk this large stands for numbers that are not finite.
OVERFLOWS = 1e5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """Why a module is kept in FP32, as measured.

    `saves_ms` is the step time its exclusion saves; `risk` how many times as large the module makes the relative
    error of what passes through it in half precision, a million where that overflows.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    saves_ms: float | None = None
    risk: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleRule:
    """Modules that run in a precision of their own: by `path` or by `type`, exactly one of the two.

    A path is exact, or a pattern in which `*` stands for one name and `**` for any depth. A type is a class
    name as `type(module).__name__` or one of its bases has it. `reason` is no setting: two rules that differ in
    it alone are equal.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT

    path: str | None = None
    type: str | None = None
    reason: Reason | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if (self.path is None) == (self.type is None):
            raise ValueError("a rule names either a path or a type, and not both")
        if self.path == "" or self.type == "":
            raise ValueError("a rule's path or type must not be empty")

    @property
    def is_needed(self) -> bool:
        """True if the numerics need this rule; False if it serves speed alone."""
        return self.reason is not None and self.reason.risk is not None

    def __str__(self) -> str:
        return self.path if self.path is not None else f"type {self.type}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp32Rule(ModuleRule):
    """Modules kept out of autocast, or out of half weights.

    `cast_output` casts the output back to the autocast dtype, so an FP32 output does not promote the stream
    behind it. Beside half weights every output is cast back: what follows could not take it otherwise.
    """

    cast_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfRule(ModuleRule):
    """Modules without children run in the autocast dtype although autocast would compute them in FP32."""


def _idle(setting: str, policy: Settings) -> Iterator[Finding]:
    if policy.precision == "off" and getattr(policy, setting):
        yield Finding(
            code=f"{setting.replace('_', '-')}-without-effect",
            message=f"autocast is off, so everything runs in FP32 and {setting} changes nothing",
        )
    if policy.weights == "half" and setting == "half_modules" and policy.half_modules:
        yield Finding(
            code="half-modules-without-effect",
            message="weights are half, so everything runs in half already and half_modules changes nothing",
        )


def _explained(rule: Fp32Rule) -> str:
    why = ""
    if rule.reason is not None and rule.reason.saves_ms is not None:
        why = f": keeping it out of autocast saves {rule.reason.saves_ms:.3g} ms a step"
    if rule.reason is not None and rule.reason.risk is not None:
        times = (
            "makes what passes through it overflow"
            if rule.reason.risk >= OVERFLOWS
            else f"makes the relative error of what passes through it {rule.reason.risk:.3g} times as large"
        )
        why = f": in half precision it {times}"
    cast = "; its output is cast back" if rule.cast_output else ""
    return f"fp32_modules {rule}: stays in FP32{why}{cast}."


# `apply_policy` swaps the modules' classes, of both knobs at once. A search varies how far down a ladder of rules
# modules stay in FP32, and whether all modules that qualify run in half.
FP32_MODULES = Knob(
    name="fp32_modules",
    stock=(),
    memory=False,
    precision="part",
    matters=lambda value, subject: bool(subject.leaves) or not value,
    idle=lambda policy, _: _idle("fp32_modules", policy),
    words="FP32: {}",
    told=lambda policy: map(_explained, policy.fp32_modules),
)
HALF_MODULES = Knob(
    name="half_modules",
    stock=(),
    memory=False,
    precision="part",
    idle=lambda policy, _: _idle("half_modules", policy),
    words="half: {}",
    told=lambda policy: (
        f"half_modules {one}: runs in {policy.autocast}, though autocast would use FP32." for one in policy.half_modules
    ),
)
