"""The claim of a policy file, and what measuring it again says of it. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from amptune.errors import ClaimError, ObjectiveError
from amptune.policy.policy_file import PolicyFile
from amptune.policy.serialization import policy_from_dict
from amptune.policy.settings import STOCK, Policy
from amptune.search.table.effects import Machine
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.ratio import Ratio
from amptune.search.table.row import Row
from amptune.search.table.verdict import Verdict, verdict_of

__all__ = [
    "MARGIN",
    "NARROW_ENOUGH",
    "Answer",
    "Claim",
    "Figure",
    "Round",
    "answer_of",
    "baseline_of",
    "claim_of",
    "is_missed_by",
    "is_settled",
    "require_figures",
]

# A claim may be missed by this share of it.
MARGIN = 0.02
# A ratio that reaches what is needed confirms it if half its interval, relative, is at most this.
NARROW_ENOUGH = 0.1

Answer = Literal["met", "missed", "open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """The policy's speed, or another figure that is claimed, over the baseline's after a round.

    It is as measured `here`, in this sitting, as it may be in a `later` one, and in the `last` round alone; None if it
    cannot be measured. `needed` is None if nothing is claimed. Whether a claim holds is a question about this sitting.
    It was made in another one, so it is false only if no other sitting would reach it either.
    """

    name: str
    needed: float | None
    here: Ratio | None = None
    later: Ratio | None = None
    last: Ratio | None = None

    @property
    def is_narrow(self) -> bool:
        return self.here is not None and self.here.half_width <= NARROW_ENOUGH

    @property
    def is_met(self) -> bool:
        """True if the interval lies above what is needed, or the value does and the interval is narrow enough."""
        if self.here is None or self.needed is None:
            return self.here is not None
        return self.here.low >= self.needed or (self.here.value >= self.needed and self.is_narrow)

    @property
    def is_missed(self) -> bool:
        """True if the round leaves no ratio possible that reaches what is needed."""
        if self.needed is None or self.here is None or self.later is None or self.last is None:
            return False
        return max(self.here.high, self.later.high, self.last.value) < self.needed


# The figures of a claim after a round: its speed, and its gain in another figure if one is claimed.
Round = tuple[Figure, ...]


def is_missed_by(figures: Round) -> bool:
    """Returns True if one of the figures after a round lies below what is needed."""
    return any(figure.is_missed for figure in figures)


def answer_of(rounds: Sequence[Round]) -> Answer:
    """Returns what the rounds say of a claim.

    It is met if all figures of the last round reach what is needed. It is missed if one lies below that in two rounds
    in a row.
    """
    if rounds and all(figure.is_met for figure in rounds[-1]):
        return "met"
    return "missed" if len(rounds) > 1 and all(map(is_missed_by, rounds[-2:])) else "open"


def is_settled(rounds: Sequence[Round]) -> bool:
    """Returns True if two rounds in a row gave the same answer: a single one may owe it to an outlier.

    Where nothing is claimed, the last of two rounds or more has to be narrow enough.
    """
    answer, is_claimed = answer_of(rounds), all(figure.needed is not None for figure in rounds[-1])
    if not is_claimed:
        return len(rounds) > 1 and all(figure.is_narrow for figure in rounds[-1])
    return answer == "missed" or (answer == "met" and answer_of(rounds[:-1]) == "met")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The claim of a policy file: its speed as a multiple of the baseline's, and the ms per step of both.

    A policy tuned for memory or energy also claims a `gain` in that figure: the baseline's over its own. A file without
    evidence claims no `speedup`: its policy is measured all the same.
    """

    policy: Policy
    baseline: Policy
    speedup: float | None
    step_ms: float | None
    baseline_ms: float | None
    objective: Objective = THROUGHPUT
    gain: float | None = None

    @property
    def both(self) -> tuple[Policy, ...]:
        return tuple(dict.fromkeys((self.baseline, self.policy)))

    def verdict(self, rows: Sequence[Row], machine: Machine) -> Verdict | None:
        return verdict_of(rows, self.baseline, machine, self.objective)

    def figures(self, rows: Sequence[Row], machine: Machine) -> Round | None:
        """Returns the figures that the claim is about, after the last round; None if a policy failed in one."""
        whole, last = self.verdict(rows, machine), self.verdict(rows[-len(self.both) :], machine)
        here = self.verdict(rows, machine.in_one_sitting)
        if whole is None or last is None or here is None or not all(map(self._runs_in, (whole, last, here))):
            return None
        claimed = [("speed", self.speedup, here.speeds, whole.speeds, last.speeds)]
        if self.gain is not None:
            claimed.append((self.objective.name, self.gain, here.scores, whole.scores, last.scores))
        return tuple(
            Figure(
                name=name,
                needed=None if value is None else (1 - MARGIN) * value,
                here=now.to_baseline(self.policy, later=False),
                later=then.to_baseline(self.policy),
                last=alone.to_baseline(self.policy),
            )
            for name, value, now, then, alone in claimed
        )

    def _runs_in(self, verdict: Verdict) -> bool:
        found = verdict.contender_of(self.policy)
        return found is not None and found.failure is None


def claim_of(policy_file: PolicyFile) -> Claim:
    """Returns the claim to verify. Raises `ClaimError` if the evidence is malformed."""
    evidence: Any = policy_file.evidence
    require_figures(evidence)
    own_baseline, baseline = baseline_of(policy_file), evidence.get("baseline", {})
    try:
        return Claim(
            policy=policy_file.policy,
            baseline=own_baseline,
            speedup=evidence.get("speedup"),
            step_ms=evidence.get("step_ms"),
            baseline_ms=float(baseline["step_ms"]) if "step_ms" in baseline else None,
            objective=Objective(evidence.get("objective", "throughput"), evidence.get("least_speed", 1.0)),
            gain=evidence.get("gain"),
        )
    except ObjectiveError as error:
        raise ClaimError(f"evidence.objective is not what `amptune tune` writes: {error}") from error
    except (TypeError, ValueError) as error:
        raise ClaimError(f"evidence.baseline is not what `amptune tune` writes: {error}") from error


def require_figures(evidence: Mapping[str, Any]) -> None:
    """Raises `ClaimError` for a figure that no measurement gives: 0, less, or without end."""
    for name in ("speedup", "gain", "step_ms", "samples_per_s", "least_speed"):
        value = evidence.get(name, 1)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ClaimError(f"evidence is not what `amptune tune` writes: {name} is {value}, and not above 0")


def baseline_of(policy_file: PolicyFile) -> Policy:
    """Returns the baseline that a file names, else stock PyTorch. Raises `ClaimError` if it is malformed."""
    baseline: Any = policy_file.evidence.get("baseline", {})
    try:
        return policy_from_dict(baseline["policy"]) if "policy" in baseline else STOCK
    except (TypeError, ValueError) as error:
        raise ClaimError(f"evidence.baseline is not what `amptune tune` writes: {error}") from error
