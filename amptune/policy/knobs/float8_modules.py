"""Linears whose matrix products run in FP8, by torchao."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from amptune.policy.findings import Finding
from amptune.policy.knobs.knob import Knob, Model, Settings
from amptune.policy.knobs.precision_rules import ModuleRule

__all__ = ["FLOAT8_MODULES", "Float8Rule"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Float8Rule(ModuleRule):
    """Modules whose Linears multiply in FP8, those of the modules inside too."""


def _conflict(policy: Settings) -> str | Literal[False]:
    is_bf16 = policy.autocast == "bf16"
    return not is_bf16 and f"float8_modules: FP8 is for autocast bf16, and autocast is {policy.autocast}"


def _idle(policy: Settings, _: Model) -> Iterator[Finding]:
    if policy.float8_modules and policy.compile == "off":
        message = (
            "float8_modules without torch.compile: the casts to FP8 take longer than its products save; add "
            "compile: blocks, or another mode"
        )
        yield Finding(code="float8-not-compiled", message=message)


def _told(policy: Settings) -> Iterator[str]:
    if policy.float8_modules:
        yield (
            f"float8_modules {', '.join(map(str, policy.float8_modules))}: the products of these Linears run in FP8, "
            "whose 3 bits of precision are scaled to each tensor; NaN can come late: watch your loss."
        )


# `apply_policy` swaps the classes of the Linears. A search varies whether all wide ones run in FP8.
FLOAT8_MODULES = Knob(
    name="float8_modules",
    stock=(),
    conflict=_conflict,
    precision="part",
    # A search calls all wide Linears by a word; the subject has those that can run in FP8 on its machine.
    matters=lambda value, subject: value == "none" or bool(subject.wide_linears),
    is_optional=True,
    idle=_idle,
    words="FP8: {}",
    told=_told,
)
