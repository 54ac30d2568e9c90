"""Rows of the table: every timing of a policy, in search or in comparison, in this run or a former one. Values."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amptune.measure.bench.readings import OWN_LOAD
from amptune.measure.results.loop_timing import MOST_WAITING
from amptune.measure.results.outcome import Measurement, Outcome, outcome_from_dict, outcome_to_dict
from amptune.policy.serialization import finite, policy_from_dict, policy_to_dict, text
from amptune.policy.settings import Policy

__all__ = [
    "Row",
    "decisive",
    "graphs_keep_coming",
    "mean_error",
    "settled_in",
    "step_spread",
    "wait_share",
    "waits_for_data",
]

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

    @property
    def in_loop(self) -> bool:
        """True if the user's training loop was timed."""
        return isinstance(self.outcome, Measurement) and self.outcome.in_loop

    @property
    def is_bound(self) -> bool:
        """True if it ended early: the policy is at most as fast as its first steps, and nobody knows its mean."""
        return isinstance(self.outcome, Measurement) and self.outcome.abandoned

    @property
    def is_settled(self) -> bool:
        """True unless graphs were still compiled or recorded in the second half of its block."""
        return not isinstance(self.outcome, Measurement) or self.outcome.settled

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
            run=text(data["run"]),
            launch=text(data["launch"]),
            moment_s=finite(data["moment_s"]),
        )


def decisive(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows that tell how fast policies are.

    These are no bounds, no loops that wait for data, and no unsettled blocks of a policy that has settled ones.
    """
    waits, settled = waits_for_data(rows), settled_in(rows)
    able = (row for row in rows if not row.is_bound and not (waits and row.in_loop))
    return [row for row in able if row.is_settled or row.policy not in settled]


def settled_in(rows: Sequence[Row]) -> set[Policy]:
    """Returns the policies with a block in whose second half no graph was compiled or recorded.

    The loop has the last word: its batches are new, those of a trial come again and again.
    """
    looped = {row.policy for row in rows if row.in_loop}
    return {
        row.policy for row in rows if row.is_settled and not row.is_bound and (row.in_loop or row.policy not in looped)
    }


def graphs_keep_coming(rows: Sequence[Row]) -> bool:
    """Returns True if graphs kept coming in the user's loop under a policy whose trial did not show it.

    A trial's batches come again and again. If that is why, the trials of other graphs are no better.
    """
    looped = {row.policy for row in rows if row.in_loop}
    settled = {row.policy for row in rows if not row.in_loop and row.is_settled and not row.is_bound}
    return bool((looped & settled) - settled_in(rows))


def waits_for_data(rows: Sequence[Row]) -> bool:
    """Returns True if the user's loop waits for its data for so long that it does not tell how fast a step is."""
    return any(share > MOST_WAITING for share in wait_share(rows).values())


def wait_share(rows: Sequence[Row]) -> dict[Policy, float]:
    """Returns the share of its loop's time for which the device waits for data, by policy: the median of its rows."""
    shares: dict[Policy, list[float]] = {}
    for row in rows:
        if isinstance(row.outcome, Measurement) and row.in_loop:
            shares.setdefault(row.policy, []).append(row.outcome.wait_share)
    return {policy: statistics.median(of) for policy, of in shares.items()}


def step_spread(measurement: Measurement) -> float | None:
    """Returns how much the steps of a block differ, as a robust standard deviation relative to their median.

    Returns None for a block of few steps. Steps of a GPU that is the limit differ by 0.1 %, steps that wait for the
    host by 1 to 10 %; so do the blocks and the launches of such a policy (reports/README.md, "sittings").
    """
    steps = measurement.step_ms
    if len(steps) < _FEWEST_STEPS:
        return None
    middle = statistics.median(steps)
    return _DEVIATIONS * statistics.median(abs(ms - middle) for ms in steps) / middle


def mean_error(measurement: Measurement) -> float:
    """Returns the standard error of the block's mean step, as a share of it: a few very slow steps make it large."""
    steps, mean = measurement.step_ms, measurement.mean_ms
    if len(steps) < 2:
        return 0.0
    squares = math.fsum((ms - mean) ** 2 for ms in steps)  # statistics.stdev takes a hundred times as long
    return math.sqrt(squares / (len(steps) - 1) / len(steps)) / mean
