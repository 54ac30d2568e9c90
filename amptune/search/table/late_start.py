"""Policies that start too late: a training of so many steps ends before they have won back what starting took. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from amptune.measure.results.outcome import Measurement
from amptune.policy.setting_effects import graph_of
from amptune.policy.settings import Policy
from amptune.search.table.row import Row

__all__ = ["LateStart", "late_starts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LateStart:
    """A policy whose steps are faster than those of another, which ends the training before it."""

    start_s: float
    steps: int
    before: Policy
    speedup: float

    def __str__(self) -> str:
        return f"starting takes {self.start_s:.0f} s, which {self.steps:,} steps do not win back from {self.before}"


def late_starts(rows: Iterable[Row], baseline: Policy, steps: int | None) -> dict[Policy, LateStart]:
    """Returns the policies that start too late for a training of so many steps of the baseline; none without a number.

    A graph that was compiled once counts for each policy that has it: a training finds no graphs on disk.
    """
    if steps is None:
        return {}
    speeds: dict[Policy, list[float]] = defaultdict(list)
    starts_s: dict[Hashable, float] = defaultdict(float)
    samples = 0
    for row in rows:
        if isinstance(row.outcome, Measurement):
            speeds[row.policy].append(row.outcome.samples_per_s)
            key = _started(row.policy)
            starts_s[key] = max(starts_s[key], 0.0 if key is None else row.outcome.startup_s)
            samples = row.outcome.samples_per_step if row.policy == baseline else samples
    if not samples:
        return {}
    fastest = {policy: max(all_of) for policy, all_of in speeds.items()}
    ends_s = {policy: starts_s[_started(policy)] + steps * samples / speed for policy, speed in fastest.items()}
    first = min(ends_s, key=ends_s.__getitem__)
    return {
        policy: LateStart(
            start_s=starts_s[_started(policy)], steps=steps, before=first, speedup=fastest[policy] / fastest[first]
        )
        for policy in fastest
        if fastest[policy] > fastest[first] and starts_s[_started(policy)] > starts_s[_started(first)]
    }


def _started(policy: Policy) -> Hashable:
    """Returns a key of what a policy prepares in its first steps; None if that is nothing that others do not."""
    if policy.compile != "off":
        return policy.compile, graph_of(policy)
    return policy if policy.cuda_graphs or policy.cudnn_benchmark else None
