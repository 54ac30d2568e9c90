"""Chooses the point of a space to measure next: the one that promises the most for its time. Pure."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from amptune.policy.setting_effects import changes_graph
from amptune.policy.settings import AUTOTUNED_MODES, CUDA_GRAPH_MODES, WHOLE_MODES
from amptune.search.plan.compile_costs import AUTOTUNE_S, COMPILE_S
from amptune.search.sampler.surrogate import NOISE, Belief, Floats, Surrogate
from amptune.search.space.knobs import Dimension, Point, Value

__all__ = ["Proposal", "Proposer", "Seen", "features_of", "with_features"]

Strings = NDArray[np.str_]
Codes = NDArray[np.int64]

# Features that a surrogate sees in place of torch.compile's modes: is there a compiled graph, do CUDA graphs launch the
# kernels, were the kernels timed against others.
COMPILED, CUDA_GRAPHS, AUTOTUNED = "compile", "cuda_graphs", "autotuned"
# Settings that make a trial expensive: plans to be timed, graphs to be compiled, kernels to be timed. These extra
# seconds are assumed until a similar trial was measured; cuDNN's plans of ResNet-50 took 10 to 25 s on an H200.
DEAR_S = {COMPILED: COMPILE_S, AUTOTUNED: AUTOTUNE_S - COMPILE_S, "cudnn_benchmark": 10.0}
# A score is a surprise if it is this many standard deviations, of the belief and of a measurement, too low.
SURPRISING = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The result of one point's trial: its score, higher is better (None if it failed), and the seconds it cost."""

    score: float | None
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A point by its index; `gain` is its expected improvement over the best, on the logarithm of the score.

    A score below `least` would be a surprise: an outlier, or a wrong expectation. The trial is expected to take
    `seconds`, None if nothing is known of that.
    """

    index: int
    gain: float
    least: float = 0.0
    seconds: float | None = None


class Proposer:
    """A source of proposals: points of one space that were not measured yet."""

    def __init__(self, knobs: Sequence[Dimension], points: Sequence[Point], *, seed: int) -> None:
        self._surrogate = Surrogate(knobs, points)
        self._values = {knob.name: np.array([str(point[knob.name]) for point in points]) for knob in knobs}
        self._dear = np.stack([self._is_dear(name, len(points)) for name in DEAR_S])
        self._compiled = self._dear[list(DEAR_S).index(COMPILED)]
        self._graph = _codes([values for name, values in self._values.items() if changes_graph(name)], len(points))
        self._seed = seed

    def next(
        self,
        seen: Mapping[int, Seen],
        left_out: Collection[int] = (),
        running: Collection[int] = (),
    ) -> Proposal | None:
        """Returns the point that promises most per second; None if every point was seen or is left out.

        Those that are `running` elsewhere are believed to turn out as expected.
        """
        free = np.ones(self._surrogate.size, dtype=bool)
        free[[*seen, *left_out, *running]] = False
        if not free.any():
            return None
        belief = self.belief(seen, running)
        if belief is None:
            drawn = random.Random(f"{self._seed} {len(seen)} {sorted(running)}")  # noqa: S311  # no secret
            return Proposal(index=drawn.choice(np.flatnonzero(free).tolist()), gain=math.inf)
        feasible = [index for index, one in seen.items() if one.score is not None]
        gain = np.where(free, belief.improvement(float(belief.mean[feasible].max())), -1.0)
        seconds = self._seconds(seen)
        chosen = int((gain / seconds).argmax())
        surprise = SURPRISING * (float(belief.deviation[chosen]) + NOISE)
        least = math.exp(float(belief.mean[chosen]) - surprise)
        return Proposal(index=chosen, gain=float(gain[chosen]), least=least, seconds=float(seconds[chosen]))

    def belief(self, seen: Mapping[int, Seen], running: Collection[int] = ()) -> Belief | None:
        """Returns the belief about every point; None if fewer than two scores are known."""
        scores = {index: one.score for index, one in seen.items() if one.score is not None}
        if len(scores) < 2:
            return None
        worst = min(scores.values())  # also of a point that failed, so that its neighbours become suspect
        logs = {index: math.log(scores.get(index, worst)) for index in seen}
        return self._surrogate.belief(logs, running)

    def _is_dear(self, name: str, count: int) -> NDArray[np.bool_]:
        """Returns a mask of the points that have this expensive setting."""
        values = self._values.get(name)
        return np.zeros(count, dtype=bool) if values is None else (values != "off") & (values != "False")

    def _seconds(self, seen: Mapping[int, Seen]) -> Floats:
        """Returns the seconds that a trial of each point will cost.

        That is the mean of trials with the same expensive settings. If there is none, it is the highest estimate from
        trials with some of these settings plus the assumed seconds of the others. A graph compiled before is cached.
        """
        costs: dict[tuple[bool, ...], list[float]] = defaultdict(list)
        from_cache: list[float] = []
        graphs: set[int] = set()
        for index, one in seen.items():
            known = bool(self._compiled[index]) and int(self._graph[index]) in graphs
            (from_cache if known else costs[tuple(self._dear[:, index].tolist())]).append(one.seconds)
            graphs |= {int(self._graph[index])} if self._compiled[index] else set()
        means = {kind: fmean(some) for kind, some in costs.items()}
        seconds = np.full(self._surrogate.size, fmean(one.seconds for one in seen.values()))
        for kind in itertools.product((False, True), repeat=len(DEAR_S)):
            alike = (self._dear == np.array(kind)[:, None]).all(axis=0)
            seconds[alike] = means.get(kind) or _reckoned(kind, means) or seconds[alike]
        cached = self._compiled & np.isin(self._graph, list(graphs))
        seconds[cached] = fmean(from_cache) if from_cache else float(seconds.min())
        positive: Floats = np.maximum(seconds, np.finfo(float).eps)
        return positive


def _codes(columns: Sequence[Strings], count: int) -> Codes:
    """Returns a number for each combination of values that occurs in the columns."""
    codes = np.zeros(count, dtype=np.int64)
    for column in columns:
        _, own = np.unique(column, return_inverse=True)
        _, codes = np.unique(codes * (int(own.max()) + 1) + own, return_inverse=True)
    return codes


def features_of(point: Point) -> Point:
    """Returns the point as a surrogate sees it: modes of torch.compile become features such as `cuda_graphs`."""
    if COMPILED not in point:
        return point
    mode = str(point[COMPILED])
    made_of: dict[str, Value] = {
        COMPILED: "on" if mode in WHOLE_MODES else mode,
        CUDA_GRAPHS: mode in CUDA_GRAPH_MODES or point.get(CUDA_GRAPHS, False),
        AUTOTUNED: mode in AUTOTUNED_MODES,
    }
    return Point({**point, **made_of})


def with_features(knobs: Sequence[Dimension]) -> list[Dimension]:
    """Returns the knobs of points that `features_of` made."""
    modes, graphs = (next((one.choices for one in knobs if one.name == name), ()) for name in (COMPILED, CUDA_GRAPHS))
    made_of = [
        Dimension(name=COMPILED, choices=("off", *(["blocks"] if "blocks" in modes else []), "on")),
        Dimension(name=CUDA_GRAPHS, choices=tuple(dict.fromkeys((False, True, *graphs)))),
        Dimension(name=AUTOTUNED, choices=(False, True)),
    ]
    if all(knob.name != COMPILED for knob in knobs):
        return list(knobs)
    return [*(knob for knob in knobs if knob.name not in (COMPILED, CUDA_GRAPHS)), *made_of]


def _reckoned(kind: tuple[bool, ...], means: Mapping[tuple[bool, ...], float]) -> float | None:
    """Returns the assumed seconds of a kind of trial; None if no cheaper kind has been measured."""
    extras = [
        mean + sum(s for s, has, had in zip(DEAR_S.values(), kind, seen, strict=True) if has and not had)
        for seen, mean in means.items()
        if all(has or not had for has, had in zip(kind, seen, strict=True))
    ]
    return max(extras, default=None)
