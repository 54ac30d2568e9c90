"""Effects: the reasons why measurements of one policy differ, with their sizes before a row is seen. Values.

The priors are learned from repeated sittings of models on two kinds of machine (reports/sittings).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["CPU", "EFFECTS", "GPU", "WORTH", "Effect", "Machine", "machine_of"]

# `block`: the noise of one block. `process`: what differs from one start of a process to the next. `sitting`: what
# differs for one policy from one sitting to the next. `host`: what a sitting does to all steps that wait for the host.
# `drift`: what passes within minutes, for all policies.
EFFECTS = ("block", "process", "sitting", "host", "drift")

# What is known before a row is seen counts as so many observations.
WORTH = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """The size of an effect, as a standard deviation in step spreads; the prior is worth so many observations."""

    size: float
    worth: float = WORTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The priors of one kind of machine. A step spread counts as at least `least_spread`.

    It `shows_alone` what a policy gains if one process may speak for all: on a CPU threads and memory fall otherwise in
    the next one, for all its steps alike, and small models gained 1.6 times in one process that lost in twelve others.
    """

    device: Literal["cuda", "cpu"]
    process: Effect
    sitting: Effect
    host: Effect
    least_spread: float
    shows_alone: bool = True
    block: Effect = Effect(size=1.0)
    drift: Effect = Effect(size=0.5)

    @property
    def effects(self) -> dict[str, Effect]:
        return {name: getattr(self, name) for name in EFFECTS}

    @property
    def in_one_sitting(self) -> Machine:
        """The priors of this machine for what is said of one sitting alone: sittings have no effect."""
        return replace(self, sitting=Effect(size=0.0), host=Effect(size=0.0))


GPU = Machine(
    device="cuda",
    process=Effect(size=0.8),
    sitting=Effect(size=0.8, worth=2.0),
    host=Effect(size=1.0, worth=2.0),
    least_spread=0.003,
)
CPU = Machine(
    device="cpu",
    process=Effect(size=1.0),
    sitting=Effect(size=0.6),
    host=Effect(size=0.3),
    least_spread=0.08,
    shows_alone=False,
)


def machine_of(device: str) -> Machine:
    """Returns the priors for "cuda" or "cpu"."""
    return GPU if device == "cuda" else CPU
