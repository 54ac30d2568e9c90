"""The policies of a search space, each once, and what a study knows of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from amptune.measure.results.outcome import Failure, Measurement, Outcome
from amptune.policy.setting_effects import memory_of
from amptune.policy.settings import AUTOTUNED_MODES, CUDA_GRAPH_MODES, Policy
from amptune.search.sampler.surrogate import Belief, Surrogate
from amptune.search.space.knobs import Dimension, Point, Space, Value, points
from amptune.search.table.objective import Objective, Yardstick
from amptune.search.table.trial import Trial

__all__ = ["Catalog", "History", "ToPolicy"]

# The FP32 math mode of a policy that computes no product in FP32.
UNUSED = "unused"
# Features that a surrogate sees in place of torch.compile's modes: is there a compiled graph, do CUDA graphs launch the
# kernels, were the kernels timed against others.
COMPILED, CUDA_GRAPHS, AUTOTUNED = "compile", "cuda_graphs", "autotuned"

ToPolicy = Callable[[Point], Policy]


class Catalog:
    """The policies of a space, in a fixed order. Points that give the same policy count once."""

    def __init__(self, space: Space, to_policy: ToPolicy) -> None:
        self.space, self._to_policy = space, to_policy
        self.points: dict[Policy, Point] = {}
        for point in points(space):
            self.points.setdefault(to_policy(point), point)  # deeper points of a short ladder give the same policy
        self.policies = list(self.points)
        self.index = {policy: index for index, policy in enumerate(self.policies)}
        self.sizes = {policy.batch_size for policy in self.policies if policy.batch_size is not None}

    @cached_property
    def surrogate(self) -> Surrogate:
        """The surrogate of these policies' speeds, which names them by their index."""
        return Surrogate(_features(self.space.knobs), [_seen(*one) for one in self.points.items()])

    @cached_property
    def kinds(self) -> list[tuple[int, Any]]:
        """Each policy's batch size, and its settings that decide its memory besides."""
        return [(policy.batch_size or 0, memory_of(policy)) for policy in self.policies]

    def policy_of(self, params: Mapping[str, Any]) -> Policy | None:
        """Returns the policy of a point; None if it is not one of the catalog."""
        policy = self._to_policy(Point(params))
        return policy if policy in self.points else None


@dataclass(frozen=True)
class History:
    """The trials of a catalog's policies so far, as an objective sees them. A policy's later trial replaces a former.

    A trial tells something if it failed or has the figure that the objective needs. A speed that the objective needs is
    compared with the `baseline`'s.
    """

    catalog: Catalog
    trials: Sequence[Trial]
    objective: Objective
    baseline: Policy | None

    @cached_property
    def latest(self) -> dict[Policy, Trial]:
        """The last trial of each policy."""
        return {trial.policy: trial for trial in self.trials}

    @cached_property
    def outcomes(self) -> dict[Policy, Outcome]:
        """The last outcome of each policy."""
        return {policy: trial.outcome for policy, trial in self.latest.items()}

    @cached_property
    def yardstick(self) -> Yardstick:
        """The yardstick that trials are compared by, with the baseline's measurement if it is known."""
        outcome = next((trial.outcome for trial in reversed(self.trials) if trial.policy == self.baseline), None)
        return Yardstick(self.objective, outcome if isinstance(outcome, Measurement) else None)

    @cached_property
    def scores(self) -> dict[int, float | None]:
        """The score of each measured policy, by its index: None if it failed.

        A policy that was too large is left out: that tells nothing of other settings.
        """
        index = self.catalog.index
        told = ((index[one.policy], one) for one in self.latest.values() if one.policy in index)
        return {number: self.yardstick.score(one.outcome) for number, one in told if not self._is_too_large(one)}

    @cached_property
    def belief(self) -> Belief | None:
        """The belief about every policy, by its index; None if fewer than two scores are known."""
        return self.belief_with(())

    def belief_with(self, running: Sequence[int]) -> Belief | None:
        """Returns the belief if these policies, by index, that are being measured turn out as expected."""
        scores = [score for score in self.scores.values() if score is not None]
        if len(scores) < 2:
            return None
        worst = min(scores)  # also of a policy that failed, so that its neighbours become suspect
        logs = {index: math.log(worst if score is None else score) for index, score in self.scores.items()}
        return self.catalog.surrogate.belief(logs, running)

    @cached_property
    def too_large(self) -> frozenset[int]:
        """The policies, by index, with no smaller a batch than one of their kind that ran out of memory."""
        least: dict[Any, int] = {}
        for trial in filter(self._is_too_large, self.trials):
            kind, size = memory_of(trial.policy), trial.policy.batch_size or 0
            least[kind] = min(size, least.get(kind, size))
        kinds = enumerate(self.catalog.kinds) if least else ()
        return frozenset(index for index, (size, kind) in kinds if kind in least and size >= least[kind])

    def _is_too_large(self, trial: Trial) -> bool:
        """Returns True if it ran out of memory and a smaller batch might not: its other settings are not to blame."""
        return len(self.catalog.sizes) > 1 and isinstance(trial.outcome, Failure) and trial.outcome.kind == "oom"


def _seen(policy: Policy, point: Point) -> Point:
    """Returns a point as a surrogate sees it, with the settings that decide speed.

    An FP32 math mode that acts on nothing is marked unused, and features replace the modes of torch.compile.
    """
    seen: dict[str, Value] = dict(point)
    if "fp32_math" in point and not policy.uses_fp32_math:
        seen["fp32_math"] = UNUSED
    if COMPILED in point:
        mode = str(point[COMPILED])
        seen[COMPILED] = mode if mode in ("off", "blocks") else "on"
        seen[CUDA_GRAPHS] = mode in CUDA_GRAPH_MODES or point.get(CUDA_GRAPHS, False)
        seen[AUTOTUNED] = mode in AUTOTUNED_MODES
    return Point(seen)


def _features(knobs: Sequence[Dimension]) -> list[Dimension]:
    """Returns the knobs of points as a surrogate sees them."""
    found = {
        one.name: replace(one, choices=(*one.choices, UNUSED)) if one.name == "fp32_math" else one for one in knobs
    }
    if COMPILED in found:
        parts = [mode for mode in ("off", "blocks", "on") if mode != "blocks" or mode in found[COMPILED].choices]
        graphs = found[CUDA_GRAPHS].choices if CUDA_GRAPHS in found else ()
        found[COMPILED] = Dimension(name=COMPILED, choices=tuple(parts))
        found[CUDA_GRAPHS] = Dimension(name=CUDA_GRAPHS, choices=tuple(dict.fromkeys((False, True, *graphs))))
        found[AUTOTUNED] = Dimension(name=AUTOTUNED, choices=(False, True))
    return list(found.values())
