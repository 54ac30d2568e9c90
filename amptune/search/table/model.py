"""The statistical model of the table: what each policy scores, and how well that is known. Pure.

The score y of row r, of policy p in run i, which is a sitting, and process j, is on the logarithm

    y_r = s_p + level_i + u_p (launch_pij + sitting_pi + block_r) + doubt_r.

s_p is the policy's own score, level_i that of its run, which is free: policies are compared within runs. u_p is the
policy's step spread, how much its steps differ within a block: processes and blocks of steps that wait for the host
differ by more than those of steps that a GPU limits. The two variance components, λ of launches and β of blocks, in
squares of u, are estimated. The variance τ² of a sitting is a constant of the machine, and so are the doubts. F is the
covariance of all that is not estimated.

With the design X (1 where a row is of a policy), the components' kernels K_λ and K_β (the latter divided by the rows'
weights w), V = λ K_λ + β K_β + F and P = V⁻¹ - V⁻¹ X (Xᵀ V⁻¹ X)⁻¹ Xᵀ V⁻¹, a step for a component v, whose prior v₀
counts as n₀ observations, towards the restricted maximum likelihood (Patterson and Thompson 1971; MacKay 1992) is

    n_v = n₀ + v tr(P K_v),    v ← (n₀ v₀ + v² yᵀ P K_v P y) / n_v.

Blocks have outliers, so their noise is Student's t with f degrees of freedom: w = (f + 1) / (f + d²), d the distance of
a row from what the others predict for it, in its standard deviations (Lange, Little and Taylor 1989).

The scores are s = C Xᵀ V⁻¹ y with C = (Xᵀ V⁻¹ X)⁻¹. In a later sitting, in other processes, the ratio of policies p and
q has the variance C_pp + C_qq - 2 C_pq + (u_p² + u_q²) (λ + τ²). Its interval is that of Student's t, with the degrees
of freedom of a sum of variances a_v v known from n_v observations each, (Σ a_v v)² / Σ ((a_v v)² / n_v) (Satterthwaite
1946), where τ² is known from n₀. With a single process of each policy n_λ is hardly more than n₀ either: such an
interval has the heavy tails of processes that no other one was seen beside.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from amptune.measure.results.outcome import Measurement
from amptune.policy.settings import Policy
from amptune.search.table.effects import Machine
from amptune.search.table.improvement import Floats
from amptune.search.table.population import shrunk
from amptune.search.table.ratio import Ratio
from amptune.search.table.row import Row, decisive, mean_error, step_spread

__all__ = ["Estimates", "fit"]

Score = Callable[[Measurement], float | None]

# The observations that a prior counts as, and the degrees of freedom of the noise.
_PRIOR, _TAILS = 3.0, 2.0
# The standard deviation of a run's level: any.
_LEVEL = 10.0
# Steps that differ by more than this do so for a few slow ones, of which the error of the block's mean tells.
_MOST_SPREAD = 0.2
# A policy's only block may be an outlier, which only another one shows: its noise counts so many times.
_DOUBTFUL = 3.0
# The doubt about a process that was disturbed, and about a policy's trial beside the user's loop, which also draws and
# copies batches (0 to 8 % of a step, reports/h200/foreign): standard deviations.
_DISTURBED, _OFF_LOOP = 0.15, 0.04
_ITERATIONS, _FINAL_ITERATIONS = 20, 5
# The components are estimated from about so many rows of policies measured more than once: time grows with their cube.
_MOST_ROWS = 200


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimates:
    """The estimates of all policies, on the logarithm of the score, relative to the baseline's.

    Arrays have one entry per policy, in the order of `policies`; `contrast` has (policies, policies).
    """

    policies: tuple[Policy, ...]
    baseline: int
    raw: Floats
    """The scores as measured."""

    contrast: Floats
    """The variance of each pair's difference."""

    mean: Floats
    """The scores, shrunk towards the other policies'; `own` has their variances."""

    own: Floats
    spread: Floats
    freedom: Floats
    launch: float
    """The variance of launches, λ; `sitting` and `block` are τ² and β, all in squares of step spreads."""

    sitting: float
    block: float
    launches: tuple[int, ...]
    rows: tuple[int, ...]

    @cached_property
    def place(self) -> dict[Policy, int]:
        """The place of each policy in `policies`."""
        return {policy: place for place, policy in enumerate(self.policies)}

    def to_baseline(self, policy: Policy, *, later: bool = True) -> Ratio | None:
        """Returns the ratio to the baseline in a later sitting; None without a score in a run of the baseline.

        If not `later`, no other sitting and no next process is added to what is not known: the ratio is that over all
        processes like those measured.
        """
        p, b = self.place.get(policy), self.baseline
        if p is None:
            return None
        return self._ratio(p, b, float(self.mean[p] - self.mean[b]), float(self.own[p] + self.own[b]), later=later)

    def between(self, policy: Policy, other: Policy) -> Ratio | None:
        """Returns the ratio of two policies in a later sitting, from their own rows alone; None if one has no score."""
        p, q = self.place.get(policy), self.place.get(other)
        if p is None or q is None:
            return None
        return self._ratio(p, q, float(self.raw[p] - self.raw[q]), float(self.contrast[p, q]))

    def _ratio(self, p: int, q: int, log: float, variance: float, *, later: bool = True) -> Ratio | None:
        if p == q:
            return Ratio(value=1.0, low=1.0, high=1.0)
        deviation = math.sqrt(variance + (self.later_variance(p, q) if later else 0.0))
        if deviation > _LEVEL:  # no run has both
            return None
        return Ratio.of_log(
            log,
            deviation,
            freedom=float(min(self.freedom[p], self.freedom[q])),
            launches=min(self.launches[p], self.launches[q]),
        )

    def later_variance(self, p: int, q: int) -> float:
        """Returns the variance that another sitting, with other processes, adds to the difference of two policies."""
        return float((self.launch + self.sitting) * (self.spread[p] ** 2 + self.spread[q] ** 2))

    def time_share(self, policy: Policy) -> float:
        """Returns half the 95 % interval of the policy's time in a later sitting, as a share of it."""
        p = self.place[policy]
        variance = 2 * (self.sitting + self.launch) + self.block / self.rows[p]
        deviation = float(self.spread[p]) * math.sqrt(variance)
        return Ratio.of_log(0.0, deviation, freedom=float(self.freedom[p]), launches=1).high - 1

    @property
    def block_deviation(self) -> float:
        """The standard deviation of a typical policy's blocks."""
        return math.sqrt(self.block) * float(np.median(self.spread))


def fit(
    rows: Sequence[Row], baseline: Policy, score: Score, machine: Machine, spread: float | None = None
) -> Estimates | None:
    """Fits the model; None if the baseline has no score. For figures other than time, `spread` is the step spread."""
    scored = [
        (row, value)
        for row in (decisive(rows) if spread is None else rows)
        if isinstance(row.outcome, Measurement) and (value := score(row.outcome)) and 0 < value < math.inf
    ]
    counts = Counter(row.policy for row, _ in scored)
    if baseline not in counts:
        return None
    kept, of_time = _newest(scored), spread is None
    again = {policy for policy, count in counts.items() if count > 1}
    core = [pair for pair in kept if pair[0].policy == baseline or (pair[0].policy in again and pair[0].is_settled)]
    spreads = _spreads([row for row, _ in scored], machine.least_spread, spread)
    size, known = _components(_Table.of(core, spreads, of_time=of_time), machine)
    return _estimates(_Table.of(kept, spreads, of_time=of_time), baseline, size, known)


def _newest(scored: Sequence[tuple[Row, float]]) -> list[tuple[Row, float]]:
    """Returns about `_MOST_ROWS` rows: the newest of each policy in each run, as many of each.

    Every policy keeps a row in each of its runs, for policies are compared within runs.
    """
    own: dict[tuple[Policy, str], list[tuple[Row, float]]] = {}
    for pair in scored:
        own.setdefault((pair[0].policy, pair[0].run), []).append(pair)
    most = max(1, (_MOST_ROWS - len(own)) // max(1, sum(len(pairs) > 1 for pairs in own.values())))
    return [pair for pairs in own.values() for pair in pairs[-most:]]


def _spreads(rows: Sequence[Row], least: float, given: float | None) -> dict[Policy, float]:
    """Returns each policy's step spread; one of which too few steps are known has the median of the others'."""
    found: dict[Policy, list[float]] = {row.policy: [] for row in rows}
    if given is not None:
        return dict.fromkeys(found, given)
    for row in rows:
        spread = step_spread(row.outcome) if isinstance(row.outcome, Measurement) else None
        found[row.policy] += [] if spread is None else [spread]
    known = {policy: statistics.median(spreads) for policy, spreads in found.items() if spreads}
    typical = statistics.median(known.values()) if known else least
    return {policy: min(_MOST_SPREAD, max(least, known.get(policy, typical))) for policy in found}


@dataclass(frozen=True, slots=True)
class _Table:
    """The rows as arrays: y, X (rows, policies), the diagonal of K_β and other kernels (rows, rows), u (policies).

    `fixed` is what F has beside sittings.
    """

    policies: tuple[Policy, ...]
    score: Floats
    design: Floats
    noise: Floats
    lasting: Mapping[str, Floats]
    fixed: Floats
    spread: Floats
    launches: tuple[int, ...]

    @staticmethod
    def of(scored: Sequence[tuple[Row, float]], spreads: Mapping[Policy, float], *, of_time: bool) -> _Table:
        """Only rows `of_time` are in doubt for slow steps, for waiting, or beside the user's loop."""
        rows, own = [row for row, _ in scored], {row.policy: list[Row]() for row, _ in scored}
        for row in rows:
            own[row.policy].append(row)
        spread = np.array([spreads[row.policy] for row in rows])
        single = np.array([len(own[row.policy]) == 1 for row in rows])
        off_loop = np.array([of_time and not row.in_loop for row in rows]) * any(row.in_loop for row in rows)
        errors = np.array(
            [_too_long(mean_error(row.outcome)) * of_time for row in rows if isinstance(row.outcome, Measurement)]
        )
        disturbed = np.array([_disturbance(row, own[row.policy], of_time=of_time) for row in rows])
        policy, process = _alike([row.policy for row in rows]), _alike([(*_start(row), row.policy) for row in rows])
        together = np.outer(spread, spread)
        return _Table(
            policies=tuple(own),
            score=np.log([value for _, value in scored]),
            design=np.array([[float(row.policy == one) for one in own] for row in rows]),
            noise=spread**2 * np.where(single, _DOUBTFUL**2, 1.0),
            lasting={"launch": together * process, "sitting": together * policy * _alike([row.run for row in rows])},
            fixed=_LEVEL**2 * _alike([(row.run, row.in_loop) for row in rows])
            + _OFF_LOOP**2 * np.outer(off_loop, off_loop) * policy
            + np.outer(disturbed, disturbed) * process
            + np.diag(np.maximum(0.0, errors**2 - spread**2)),
            spread=np.array([spreads[one] for one in own]),
            launches=tuple(map(_launches, own.values())),
        )

    def kernels(self, weights: Floats) -> dict[str, Floats]:
        """Returns the kernels of launches, sittings and blocks, by these names."""
        return {**self.lasting, "block": np.diag(self.noise / weights)}

    def inverse(self, size: Mapping[str, float], weights: Floats) -> Floats:
        """Returns V⁻¹."""
        parts = (size[name] * kernel for name, kernel in self.kernels(weights).items())
        return np.asarray(np.linalg.inv(sum(parts, self.fixed)), dtype=np.float64)

    def projection(self, size: Mapping[str, float], weights: Floats) -> Floats:
        """Returns P."""
        inverse = self.inverse(size, weights)
        weighted = inverse @ self.design
        return np.asarray(inverse - weighted @ np.linalg.solve(self.design.T @ weighted, weighted.T))

    def weights(self, size: Mapping[str, float], weights: Floats) -> Floats:
        """Returns w, from the weights before: by distances from what all other rows predict.

        An outlier thus does not pass for the effect of a process that it is the only block of.
        """
        project, noise = self.projection(size, weights), size["block"] * self.noise
        known = np.diag(project) > 1e-6 / self.noise  # a row of which the others say next to nothing is no outlier
        variance = 1 / np.where(known, np.diag(project), 1.0)
        distance = np.where(known, variance * (project @ self.score), 0.0)
        plain = np.maximum(variance - noise * (1 / weights - 1), noise)
        return np.asarray((_TAILS + 1) / (_TAILS + distance**2 / plain))


def _components(table: _Table, machine: Machine) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the most likely λ and β beside τ², and the observations that each is known from.

    One that the rows do not show keeps its prior.
    """
    prior = {"launch": machine.launch**2, "sitting": machine.sitting**2, "block": machine.block**2}
    size, known, weights = dict(prior), dict.fromkeys(prior, _PRIOR), np.ones_like(table.score)
    for _ in range(_ITERATIONS if len(table.score) > len(table.policies) else 0):
        project = table.projection(size, weights)
        pull, kernels = project @ table.score, table.kernels(weights)
        for name in ("launch", "block"):
            known[name] = _PRIOR + size[name] * float(np.sum(project * kernels[name]))
            seen = size[name] ** 2 * float(pull @ kernels[name] @ pull)
            size[name] = (_PRIOR * prior[name] + seen) / known[name]
        weights = table.weights(size, weights)
    return size, known


def _estimates(table: _Table, baseline: Policy, size: Mapping[str, float], known: Mapping[str, float]) -> Estimates:
    weights, b = np.ones_like(table.score), table.policies.index(baseline)
    for _ in range(_FINAL_ITERATIONS):
        weights = table.weights(size, weights)
    weighted = table.inverse(size, weights) @ table.design
    covariance = np.asarray(np.linalg.inv(table.design.T @ weighted), dtype=np.float64)
    scores = covariance @ (weighted.T @ table.score)
    raw, variance = scores - scores[b], np.diag(covariance)
    contrast = np.maximum(variance[:, None] + variance - 2 * covariance, 0.0)
    mean, own = shrunk(raw, covariance, b)
    return Estimates(
        policies=table.policies,
        baseline=b,
        raw=raw,
        contrast=contrast,
        mean=mean,
        own=own,
        spread=table.spread,
        freedom=_freedom(table, table.kernels(weights), weighted @ covariance, (size, known), b),
        launch=size["launch"],
        sitting=size["sitting"],
        block=size["block"],
        launches=table.launches,
        rows=tuple(int(count) for count in table.design.sum(axis=0)),
    )


def _freedom(
    table: _Table, kernels: Mapping[str, Floats], estimator: Floats, sizes: Sequence[Mapping[str, float]], b: int
) -> Floats:
    """Returns the degrees of freedom of each policy's difference to the baseline in a later sitting."""
    lever, squares = estimator - estimator[:, [b]], table.spread**2 + table.spread[b] ** 2
    size, known = sizes
    parts = {
        name: size[name] * (np.sum(lever * (kernel @ lever), axis=0) + squares * (name != "block"))
        for name, kernel in kernels.items()
    }
    doubt = sum(part**2 / known[name] for name, part in parts.items())
    return np.asarray(np.maximum(1.0, sum(parts.values()) ** 2 / np.maximum(doubt, np.finfo(float).tiny)))


def _disturbance(row: Row, own: Sequence[Row], *, of_time: bool) -> float:
    """Returns by how much the row may be off for what disturbed it, as a standard deviation on the logarithm.

    If a thread waited for a CPU for a fourth of the time, another may have waited for that thread for as long, and on a
    quiet machine the steps may take half of the time. A policy that waits in each of its blocks does so in training on
    this machine: only waiting beyond its least counts.
    """
    if not row.is_disturbed:
        return 0.0
    delays = [row.outcome.host_delay or 0.0 for row in (row, *own) if isinstance(row.outcome, Measurement)]
    more = delays[0] - (min(delays) if len(own) > 1 else 0.0) if of_time else 0.0
    return max(_DISTURBED, _too_long(2 * more))


def _too_long(share: float) -> float:
    """Returns the doubt, on the logarithm, about a time of which this share may be too much."""
    return -math.log(max(_DISTURBED, 1 - share))


def _start(row: Row) -> tuple[str, str]:
    return row.run, row.launch


def _launches(rows: Sequence[Row]) -> int:
    """Returns the number of processes that a policy was timed in undisturbed, or at all if it was not."""
    quiet = {_start(row) for row in rows if not row.is_disturbed}
    return len(quiet or set(map(_start, rows)))


def _alike(keys: Sequence[object]) -> Floats:
    """Returns a matrix (rows, rows) with 1 where two rows have the same key."""
    number = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    numbers = np.array([number[key] for key in keys])
    return np.asarray(numbers[:, None] == numbers, dtype=np.float64)
