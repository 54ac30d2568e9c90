"""Effects: the reasons why measurements of one policy differ, with their sizes before a row is seen. Values.

They were learned from repeated sittings of models on two kinds of machine (reports, "sittings").
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["CPU", "GPU", "Machine", "machine_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The effects on one kind of machine, as standard deviations in step spreads of a policy."""

    device: Literal["cuda", "cpu"]
    launch: float
    """The difference of one start of a process to the next, until rows tell it."""

    sitting: float
    """The difference of one sitting to a later one. It is not estimated: few tables hold two sittings."""

    least_spread: float
    """The smallest step spread that counts, as a share of a step."""

    block: float = 1.0
    """The noise of one block, until rows tell it."""

    @property
    def in_one_sitting(self) -> Machine:
        """This machine for a statement about one sitting alone: sittings have no effect."""
        return replace(self, sitting=0.0)


GPU = Machine(device="cuda", launch=0.8, sitting=1.2, least_spread=0.003)
CPU = Machine(device="cpu", launch=1.0, sitting=0.7, least_spread=0.08)


def machine_of(device: str) -> Machine:
    """Returns the effects for "cuda" or "cpu"."""
    return GPU if device == "cuda" else CPU
