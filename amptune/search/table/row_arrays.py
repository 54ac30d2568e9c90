"""The rows of the table as arrays, with the covariances of what makes them differ. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from amptune.measure.results.outcome import Measurement
from amptune.policy.settings import Policy
from amptune.search.table.row import Row, mean_error, sittings_of

__all__ = ["LEVEL", "Array", "RowArrays", "arrays_of"]

Array = np.ndarray[Any, np.dtype[np.float64]]

# The level of a run (standard deviation) is free: policies are compared within runs.
LEVEL = 10.0
# Drift is forgotten in this time.
_DRIFT_S = 300.0
# A policy's only block counts as one with so many times the noise: if that is an outlier, only another one shows it.
# What disturbs blocks of a process makes all of them slower: by an unknown share, of which this is the standard
# deviation, and more if threads waited for a CPU for longer.
_DOUBTFUL, _DISTURBED = 3.0, 0.15
# The user's loop takes longer for each sample than steps on batches that lie on the device, since it copies them, by a
# time that all policies share: this is its standard deviation, as a share of the fastest policy's. Each differs from
# that by half of this share of its own (reports/h200/foreign: 0 to 8 %).
_LONGER_IN_LOOP = 0.05


@dataclass(frozen=True, slots=True)
class RowArrays:
    """The rows as arrays. `design` is (rows, policies), 1 where a row is of a policy; kernels are (rows, rows).

    `fixed` is the covariance of effects whose size is not estimated: the level of a run, disturbances, the
    difference of steps by themselves to the user's loop, and the doubt about means that a few slow steps decide.
    """

    score: Array
    design: Array
    noise: Array
    kernels: Mapping[str, Array]
    fixed: Array
    launches: tuple[int, ...]
    spread: Array

    def with_noise(self, weights: Array) -> dict[str, Array]:
        """Returns each effect's covariance between rows, for a size of 1."""
        return {"block": np.diag(self.noise / weights), **self.kernels}

    def inverse(self, size: Mapping[str, float], weights: Array) -> Array:
        """Returns the inverse of the rows' covariance."""
        covariance = self.fixed.copy()
        for name, kernel in self.with_noise(weights).items():
            covariance += size[name] * kernel
        return np.asarray(np.linalg.inv(covariance), dtype=np.float64)


def arrays_of(scored: Sequence[tuple[Row, float]], spreads: Mapping[Policy, float], *, of_time: bool) -> RowArrays:
    """Returns the arrays of rows and their scores, which are `of_time` if they are samples per second.

    Only these are in doubt if a few slow steps decide the mean, or if others are of the user's loop.
    """
    rows = [row for row, _ in scored]
    own: dict[Policy, list[Row]] = {}
    for row in rows:
        own.setdefault(row.policy, []).append(row)
    place = {policy: i for i, policy in enumerate(own)}
    single = [len(own[row.policy]) == 1 for row in rows]
    disturbed = np.array([_disturbance(row, of_time=of_time) for row in rows])
    values = np.array([value for _, value in scored])
    off_loop = np.array([of_time and not row.in_loop for row in rows]) * any(row.in_loop for row in rows)
    longer, apart = _LONGER_IN_LOOP * off_loop * values / values.max(), _LONGER_IN_LOOP / 2 * off_loop
    blocks = [row.outcome for row in rows if isinstance(row.outcome, Measurement)]  # failures have no score
    means = np.array([mean_error(block) if of_time else 0.0 for block in blocks])
    spread = np.array([spreads[row.policy] for row in rows])
    time_s = np.array([row.moment_s for row in rows])
    together, run, sittings = np.outer(spread, spread), _alike([row.run for row in rows]), sittings_of(rows)
    process = _alike([(row.run, row.launch, row.policy) for row in rows])
    return RowArrays(
        score=np.log(values),
        design=np.eye(len(own))[[place[row.policy] for row in rows]],
        noise=spread**2 * np.where(single, _DOUBTFUL**2, 1.0),
        kernels={
            "process": together * process,
            "sitting": together * _alike([(sitting, row.policy) for sitting, row in zip(sittings, rows, strict=True)]),
            "host": together * _alike(sittings),
            "drift": together * run * np.exp(-np.abs(time_s[:, None] - time_s) / _DRIFT_S),
        },
        fixed=LEVEL**2 * run
        + np.outer(disturbed, disturbed) * process
        + np.outer(longer, longer) * run
        + np.outer(apart, apart) * _alike([row.policy for row in rows])
        + np.diag(np.maximum(0.0, means**2 - spread**2)),
        launches=tuple(map(_launches, own.values())),
        spread=np.array([spreads[policy] for policy in own]),
    )


def _disturbance(row: Row, *, of_time: bool) -> float:
    """Returns by how much the row may be off for what disturbed it, as a standard deviation on the logarithm.

    A time may be too long: if a thread waited for a CPU for a fourth of it, another may have waited for that thread for
    as long. On a quiet machine the steps may take half of the time, or all of it.
    """
    if not row.is_disturbed or not isinstance(row.outcome, Measurement):
        return 0.0
    delay = (row.outcome.host_delay or 0.0) if of_time else 0.0
    return max(_DISTURBED, -math.log(max(_DISTURBED, 1 - 2 * delay)))


def _launches(rows: Sequence[Row]) -> int:
    """Returns the number of processes that a policy was timed in undisturbed, or at all if it was not."""
    quiet = {(row.run, row.launch) for row in rows if not row.is_disturbed}
    return len(quiet or {(row.run, row.launch) for row in rows})


def _alike(keys: Sequence[object]) -> Array:
    """Returns a matrix (rows, rows) with 1 where two rows have the same key."""
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    numbers = np.array([number[key] for key in keys])
    return np.asarray(numbers[:, None] == numbers, dtype=np.float64)
