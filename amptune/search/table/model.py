"""The one statistical model of the table: what each policy scores, and how well that is known. Pure.

A row's score, on the logarithm, is its policy's own plus random effects (`effects.py`), whose sizes count in step
spreads: how much the policy's steps differ within a block. How large they are, the rows say, and before them a prior.

It is a linear mixed model: restricted maximum likelihood (Patterson and Thompson 1971) by fixed-point steps (MacKay
1992), noise of Student's t (Lange et al. 1989), intervals with Satterthwaite's degrees of freedom (1946).
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from amptune.measure.results.outcome import Measurement
from amptune.policy.settings import Policy
from amptune.search.table.effects import EFFECTS, WORTH, Effect, Machine
from amptune.search.table.population import shrunk
from amptune.search.table.ratio import Ratio
from amptune.search.table.row import Row, decisive, step_spread
from amptune.search.table.row_arrays import LEVEL, Array, RowArrays, arrays_of

__all__ = ["Estimates", "fit"]

Score = Callable[[Measurement], float | None]

# If blocks differ more than expected, so do these, as far as the rows cannot tell them apart.
_AS_BLOCKS = ("process", "sitting")
# Degrees of freedom of the noise.
_TAILS = 2.0
# A row of which the others say next to nothing is no outlier.
_UNKNOWN = 1e-6
_ITERATIONS, _FINAL_ITERATIONS = 20, 5
# The effects are sized by at most so many rows of policies measured more than once: time grows with their cube.
_MOST_ROWS = 200


@dataclass(frozen=True, kw_only=True, eq=False)
class Estimates:
    """The estimates of all policies, on the logarithm of the score, relative to the baseline's.

    `mean` and `own` (variance) are shrunk towards the other policies. `raw` are the means as measured, `contrast` the
    variance of each pair's difference. `spread` is each policy's step spread, `size` the variance of each effect in
    squares of it. Each array has one entry per policy, in the order of `policies`; `contrast` has (policies, policies).
    """

    policies: tuple[Policy, ...]
    baseline: int
    raw: Array
    contrast: Array
    mean: Array
    own: Array
    spread: Array
    freedom: Array
    size: Mapping[str, float]
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
        deviation = math.sqrt(variance + (self.next_variance(p, q) if later else 0.0))
        if deviation > LEVEL:  # no run has both
            return None
        return Ratio.of_log(
            log,
            deviation,
            freedom=float(min(self.freedom[p], self.freedom[q])),
            launches=min(self.launches[p], self.launches[q]),
        )

    def next_variance(self, p: int, q: int) -> float:
        """Returns the variance that another sitting, with other processes, adds to the difference of two policies."""
        own = (self.size["sitting"] + self.size["process"]) * (self.spread[p] ** 2 + self.spread[q] ** 2)
        return float(own + self.size["host"] * (self.spread[p] - self.spread[q]) ** 2)

    def time_share(self, policy: Policy) -> float:
        """Returns half the 95 % interval of the policy's time in a later sitting, as a share of it."""
        p = self.place[policy]
        lasting = 2 * (self.size["sitting"] + self.size["process"] + self.size["host"]) + self.size["drift"]
        deviation = float(self.spread[p]) * math.sqrt(lasting + self.size["block"] / self.rows[p])
        return Ratio.of_log(0.0, deviation, freedom=float(self.freedom[p]), launches=1).high - 1

    @property
    def block_deviation(self) -> float:
        """The standard deviation of a typical policy's blocks."""
        return math.sqrt(self.size["block"]) * float(np.median(self.spread))


def fit(
    rows: Sequence[Row], baseline: Policy, score: Score, machine: Machine, spread: float | None = None
) -> Estimates | None:
    """Fits the model; None if the baseline has no score. For figures other than time, `spread` is the step spread."""
    scored = [
        (row, value)
        for row in (decisive(rows) if spread is None else rows)
        if isinstance(row.outcome, Measurement) and (value := score(row.outcome)) and 0 < value < math.inf
    ]
    repeated = Counter(row.policy for row, _ in scored)
    core = _newest([pair for pair in scored if repeated[pair[0].policy] > 1 or pair[0].policy == baseline])
    singles = [pair for pair in scored if repeated[pair[0].policy] == 1 and pair[0].policy != baseline]
    policies = tuple(dict.fromkeys(row.policy for row, _ in core + singles))
    if baseline not in policies:
        return None
    spreads = _spreads([row for row, _ in scored], machine.least_spread, spread)
    sizes = _sized(arrays_of(core[-_MOST_ROWS:], spreads, of_time=spread is None), machine.effects)
    data = arrays_of(core + singles, spreads, of_time=spread is None)
    return _estimated(data, policies, policies.index(baseline), sizes)


def _newest(scored: Sequence[tuple[Row, float]]) -> list[tuple[Row, float]]:
    """Returns about `_MOST_ROWS` rows: the newest of each policy in each run, as many of each as that allows.

    Every policy keeps a row in each of its runs, for policies are compared within runs.
    """
    counts = Counter((row.policy, row.run) for row, _ in scored)
    most = max(counts.values(), default=0)
    while most > 1 and sum(min(most, count) for count in counts.values()) > _MOST_ROWS:
        most -= 1
    kept, seen = [], Counter[tuple[Policy, str]]()
    for pair in reversed(scored):
        one = pair[0].policy, pair[0].run
        seen[one] += 1
        if seen[one] <= most:
            kept.append(pair)
    return kept[::-1]


def _spreads(rows: Sequence[Row], least: float, given: float | None) -> dict[Policy, float]:
    """Returns each policy's spread: that of its steps, and the more blocks there are, that of its blocks.

    A policy of which too few steps are known has the median spread of the others' steps.
    """
    found: dict[Policy, list[float]] = {row.policy: [] for row in rows}
    if given is not None:
        return dict.fromkeys(found, given)
    times: dict[Policy, dict[str, list[float]]] = {policy: {} for policy in found}
    for row in rows:
        assert isinstance(row.outcome, Measurement)  # noqa: S101  # only these have a score
        spread = step_spread(row.outcome)
        found[row.policy] += [] if spread is None else [spread]
        times[row.policy].setdefault(row.run, []).append(math.log(row.outcome.mean_ms))
    steps = {policy: statistics.median(spreads) for policy, spreads in found.items() if spreads}
    typical = statistics.median(steps.values()) if steps else least
    return {policy: max(least, _pooled(steps.get(policy, typical), times[policy].values())) for policy in found}


def _pooled(steps: float, runs: Iterable[Sequence[float]]) -> float:
    """Returns the mean of the steps' spread, which counts as `WORTH` blocks, and the blocks' own.

    The blocks' own is the distance from their run's median that 68 % of them keep: one deviation of Gaussian ones. The
    farthest block, which may be an outlier, counts as no farther than the next.
    """
    distances = sorted(abs(log - statistics.median(logs)) for logs in runs for log in logs if len(logs) > 1)
    if not distances:
        return steps
    if len(distances) > 2:
        distances[-1] = distances[-2]
    blocks, freedom = float(np.quantile(distances, 0.68)), len(distances) - 1
    return (WORTH * steps + freedom * blocks) / (WORTH + freedom)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The variance of each effect, in squares of step spreads, and the observations behind it, the prior's included."""

    size: dict[str, float]
    worth: dict[str, float]


def _sized(data: RowArrays, prior: Mapping[str, Effect]) -> _Sizes:
    """Returns the most likely sizes. An effect that the rows do not show keeps its prior."""
    sizes = _Sizes({name: prior[name].size ** 2 for name in EFFECTS}, {name: prior[name].worth for name in EFFECTS})
    weights = np.ones_like(data.score)
    if len(data.score) <= data.design.shape[1]:
        return sizes
    for _ in range(_ITERATIONS):
        project = _projection(data.inverse(sizes.size, weights), data.design)
        weights = _weights(data, project, weights, sizes.size["block"])
        project = _projection(data.inverse(sizes.size, weights), data.design)
        pull = project @ data.score
        more = max(0.0, sizes.size["block"] / prior["block"].size ** 2 - 1)
        for name, kernel in data.with_noise(weights).items():
            size = sizes.size[name]
            shown, seen = size * float(np.sum(project * kernel)), size**2 * float(pull @ kernel @ pull)
            sizes.worth[name] = prior[name].worth + shown
            expected = prior[name].size ** 2
            if name in _AS_BLOCKS:
                expected *= 1 + more * prior[name].worth / sizes.worth[name]
            sizes.size[name] = (prior[name].worth * expected + seen) / sizes.worth[name]
    return sizes


def _projection(inverse: Array, design: Array) -> Array:
    """Returns the matrix (rows, rows) that removes the policies' own scores."""
    weighted = inverse @ design
    return np.asarray(inverse - weighted @ np.linalg.solve(design.T @ weighted, weighted.T))


def _weights(data: RowArrays, project: Array, weights: Array, block: float) -> Array:
    """Returns how far each block is no outlier: by the distance from what all other rows predict for it.

    An outlier thus does not pass for the effect of a process or a sitting that it is the only block of.
    """
    own = np.diag(project)
    known = own > _UNKNOWN / data.noise
    variance = 1 / np.where(known, own, 1.0)
    distance = np.where(known, variance * (project @ data.score), 0.0)
    plain = np.maximum(variance - block * data.noise * (1 / weights - 1), block * data.noise)
    return np.asarray((_TAILS + 1) / (_TAILS + distance**2 / plain))


def _estimated(data: RowArrays, policies: tuple[Policy, ...], baseline: int, sizes: _Sizes) -> Estimates:
    weights = np.ones_like(data.score)
    for _ in range(_FINAL_ITERATIONS):
        project = _projection(data.inverse(sizes.size, weights), data.design)
        weights = _weights(data, project, weights, sizes.size["block"])
    weighted = data.inverse(sizes.size, weights) @ data.design
    covariance = np.asarray(np.linalg.inv(data.design.T @ weighted), dtype=np.float64)
    scores = covariance @ (weighted.T @ data.score)
    raw, variance = scores - scores[baseline], np.diag(covariance)
    mean, own = shrunk(raw, covariance, baseline)
    return Estimates(
        policies=policies,
        baseline=baseline,
        raw=raw,
        contrast=np.maximum(variance[:, None] + variance - 2 * covariance, 0.0),
        mean=mean,
        own=own,
        spread=data.spread,
        freedom=_freedom(weighted @ covariance, data, weights, sizes, baseline),
        size=sizes.size,
        launches=data.launches,
        rows=tuple(int(count) for count in data.design.sum(axis=0)),
    )


def _freedom(estimator: Array, data: RowArrays, weights: Array, sizes: _Sizes, baseline: int) -> Array:
    """Returns the degrees of freedom of each policy's difference to the baseline in a later sitting."""
    lever, spread = estimator - estimator[:, [baseline]], data.spread
    squares = spread**2 + spread[baseline] ** 2
    later = {"process": squares, "sitting": squares, "host": (spread - spread[baseline]) ** 2}
    whole, doubt = np.zeros_like(spread), np.zeros_like(spread)
    for name, kernel in data.with_noise(weights).items():
        part = sizes.size[name] * (np.sum(lever * (kernel @ lever), axis=0) + later.get(name, 0.0))
        whole += part
        doubt += part**2 / sizes.worth[name]
    return np.asarray(np.maximum(1.0, whole**2 / np.maximum(doubt, np.finfo(float).tiny)))
