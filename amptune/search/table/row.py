"""Rows of the table: every timing of a policy, in search or in comparison, in this run or a former one. Values."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amptune.measure.bench.readings import OWN_LOAD
from amptune.measure.results.outcome import Measurement, Outcome, outcome_from_dict, outcome_to_dict
from amptune.policy.serialization import policy_from_dict, policy_to_dict
from amptune.policy.settings import Policy

__all__ = ["SITTING_S", "Row", "sittings_of", "step_spread"]

# Another run is another sitting, and so is each such part of a run: what other programs do has changed by then.
SITTING_S = 600.0
# The standard deviation of a Gaussian over the median distance from its median.
_DEVIATIONS = 1.4826
# Fewer steps than this do not show how much steps differ.
_FEWEST_STEPS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One block of steps of one policy, or its failure.

    `run` names the tuning run, `launch` the start of the process within it. `moment_s` is the end of the block, in
    seconds by the clock of the run. Blocks of one policy in one launch ran in the same process.
    """

    policy: Policy
    outcome: Outcome
    run: str
    launch: str
    moment_s: float

    @property
    def is_disturbed(self) -> bool:
        """True if it was measured beside something else, and not only under its own load."""
        return isinstance(self.outcome, Measurement) and bool(set(self.outcome.contaminated_by) - OWN_LOAD)

    def as_dict(self) -> dict[str, Any]:
        """Returns plain data; `from_dict` is the inverse."""
        return {
            "policy": policy_to_dict(self.policy),
            "outcome": outcome_to_dict(self.outcome),
            "run": self.run,
            "launch": self.launch,
            "moment_s": round(self.moment_s, 3),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Row:
        """Reads what `as_dict` writes. Raises `KeyError`, `TypeError` or `ValueError` for anything else."""
        return Row(
            policy=policy_from_dict(data["policy"]),
            outcome=outcome_from_dict(data["outcome"]),
            run=str(data["run"]),
            launch=str(data["launch"]),
            moment_s=float(data["moment_s"]),
        )


def sittings_of(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Returns the sitting of each row: its run, and which part of it, counted from its first row."""
    first_s: dict[str, float] = {}
    for row in rows:
        first_s[row.run] = min(row.moment_s, first_s.get(row.run, row.moment_s))
    return [(row.run, int((row.moment_s - first_s[row.run]) // SITTING_S)) for row in rows]


def step_spread(measurement: Measurement) -> float | None:
    """Returns how much the steps of a block differ, as a robust standard deviation relative to their median.

    Returns None for a block of few steps. Steps of a GPU that is the limit differ by 0.1 %, steps that wait for the
    host by 1 to 10 %; so do the blocks and the launches of such a policy (reports/sittings).
    """
    steps = measurement.step_ms
    if len(steps) < _FEWEST_STEPS:
        return None
    middle = statistics.median(steps)
    return _DEVIATIONS * statistics.median(abs(ms - middle) for ms in steps) / middle
