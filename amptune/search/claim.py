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
from amptune.search.table.effects import machine_of
from amptune.search.table.model import Estimates
from amptune.search.table.objective import THROUGHPUT, Objective
from amptune.search.table.ratio import Ratio
from amptune.search.table.row import Row
from amptune.search.table.verdict import Verdict, verdict_of

__all__ = [
    "MARGIN",
    "NARROW_ENOUGH",
    "Answer",
    "Claim",
    "Comparison",
    "Figure",
    "Pair",
    "Ratios",
    "baseline_of",
    "claim_of",
    "require_figures",
]

# A claim may be missed by this share of it.
MARGIN = 0.02
# A ratio that reaches what is needed confirms it if half its interval, relative, is at most this.
NARROW_ENOUGH = 0.1

Answer = Literal["met", "missed", "open"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The policy over its baseline after a round: as measured in this sitting, and as it may be in a later one.

    Whether a claim holds is a question about this sitting. It was made in another one, so it is false only if no other
    sitting would reach it either. `last` is the ratio in the round alone.
    """

    here: Ratio
    later: Ratio
    last: float

    @property
    def highest(self) -> float:
        """The largest ratio that the round leaves possible."""
        return max(self.here.high, self.later.high, self.last)


# After a round: the ratio of speed, and that of the gain if one is claimed; None for what was not measured.
Ratios = tuple[Comparison | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A ratio that the claim needs, with its measured value; None if there is no such figure."""

    name: str
    needed: float
    measured: Comparison | None

    @property
    def is_met(self) -> bool:
        """True if the interval lies above what is needed, or the value does and the interval is narrow enough."""
        if self.measured is None:
            return False
        here = self.measured.here
        return here.low >= self.needed or (here.value >= self.needed and here.half_width <= NARROW_ENOUGH)

    @property
    def is_missed(self) -> bool:
        """True if the round leaves no ratio possible that reaches what is needed."""
        return self.measured is not None and self.measured.highest < self.needed


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

    def answer(self, rounds: Sequence[Ratios]) -> Answer:
        """Returns what the ratios after each round say: those of speed, and of the gain if one is claimed.

        The claim is met if all ratios of the last round reach what is needed. It is missed if one lies below that in
        two rounds in a row.
        """
        if rounds and all(figure.is_met for figure in self.figures(rounds[-1])):
            return "met"
        if len(rounds) > 1 and all(map(self.is_missed_by, rounds[-2:])):
            return "missed"
        return "open"

    def is_settled(self, rounds: Sequence[Ratios]) -> bool:
        """Returns True if two rounds in a row gave the same answer: a single one may owe it to an outlier."""
        if self.speedup is None:
            return len(rounds) > 1 and all(one and one.here.half_width <= NARROW_ENOUGH for one in rounds[-1])
        answer = self.answer(rounds)
        return answer == "missed" or (answer == "met" and self.answer(rounds[:-1]) == "met")

    def is_missed_by(self, ratios: Ratios) -> bool:
        """Returns True if one of the ratios after a round lies below what is needed."""
        return any(figure.is_missed for figure in self.figures(ratios))

    def figures(self, ratios: Ratios) -> list[Figure]:
        """Returns each ratio after a round beside what is needed of it."""
        if self.speedup is None:
            return []
        claimed = [("speed", self.speedup)] + ([] if self.gain is None else [(self.objective.name, self.gain)])
        return [
            Figure(name=name, needed=(1 - MARGIN) * value, measured=ratio)
            for (name, value), ratio in zip(claimed, ratios, strict=True)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The policy and the baseline of a claim, with the batch sizes that they have here; `device` is "cuda" or "cpu"."""

    claim: Claim
    policy: Policy
    baseline: Policy
    device: str

    @property
    def both(self) -> tuple[Policy, ...]:
        return tuple(dict.fromkeys((self.baseline, self.policy)))

    def verdict(self, rows: Sequence[Row]) -> Verdict | None:
        return verdict_of(rows, self.baseline, machine_of(self.device), self.claim.objective)

    def ratios(self, rows: Sequence[Row]) -> Ratios | None:
        """Returns the ratios that the claim is about; None if the policy or the baseline failed."""
        machine, last = machine_of(self.device), rows[-len(self.both) :]
        verdicts = [
            verdict_of(rows, self.baseline, machine.in_one_sitting, self.claim.objective),
            self.verdict(rows),
            self.verdict(last),
        ]
        known = [one for one in verdicts if one is not None and self._runs_in(one)]
        if len(known) < len(verdicts):
            return None
        speed = self._comparison([one.speeds for one in known])
        gain = self._comparison([one.scores for one in known])
        return None if speed is None else (speed,) if self.claim.gain is None else (speed, gain)

    def _runs_in(self, verdict: Verdict) -> bool:
        found = verdict.contender_of(self.policy)
        return found is not None and found.failure is None

    def _comparison(self, fits: Sequence[Estimates]) -> Comparison | None:
        here, later, last = fits
        now = here.to_baseline(self.policy, later=False)
        then, alone = (fit.to_baseline(self.policy) for fit in (later, last))
        if now is None or then is None or alone is None:
            return None
        return Comparison(here=now, later=then, last=alone.value)


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
