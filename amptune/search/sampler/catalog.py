"""The policies of a search space, each once, and what a study knows of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from amptune.measure.results.outcome import Failure, Measurement, Outcome
from amptune.policy.setting_effects import memory_of
from amptune.policy.settings import CompileMode, Policy
from amptune.search.sampler.acquisition import Proposer, Seen, features_of, with_features
from amptune.search.space.knobs import BATCH_SIZE, Dimension, Point, Space, points
from amptune.search.table.objective import Objective, Yardstick
from amptune.search.table.trial import Trial

__all__ = ["Catalog", "History", "ToPolicy"]

# The FP32 math mode of a policy that computes no product in FP32.
UNUSED = "unused"

ToPolicy = Callable[[Point], Policy]


class Catalog:
    """The policies of a space that fit into memory, in a fixed order. Points that give the same policy count once."""

    def __init__(self, space: Space, to_policy: ToPolicy, fits: Callable[[Policy], bool] = lambda _: True) -> None:
        self._to_policy = to_policy
        self.points: dict[Policy, Point] = {}
        for point in points(space):
            policy = to_policy(point)
            if fits(policy):
                self.points.setdefault(policy, point)  # deeper points of a short ladder give the same policy
        self.policies = list(self.points)
        self.index = {policy: index for index, policy in enumerate(self.policies)}
        self._knobs = _with_unused(space.knobs)
        self._choices = {knob.name: knob.choices for knob in space.knobs}
        self._traits = {policy: _traits(policy, point) for policy, point in self.points.items()}
        # of each policy, by its index: its batch size, and the settings that decide its memory besides
        self.kinds = [(policy.batch_size or 0, memory_of(policy)) for policy in self.policies]
        self.sizes = sorted({policy.batch_size for policy in self.policies if policy.batch_size is not None})

    def proposer(self, seed: int) -> Proposer:
        """Returns a source of proposals, which names these policies by their index."""
        return Proposer(with_features(self._knobs), list(map(features_of, self._traits.values())), seed=seed)

    def policy_of(self, params: Mapping[str, Any]) -> Policy | None:
        """Returns the policy of a point; None if it is not one of the catalog."""
        if set(params) != set(self._choices):
            return None
        policy = self._to_policy(Point(params))
        return policy if policy in self.points else None

    def not_in(self, modes: Collection[CompileMode]) -> set[int]:
        """Returns the policies, by index, that have none of these modes of torch.compile."""
        return {index for policy, index in self.index.items() if policy.compile not in modes}

    @property
    def has_modes(self) -> bool:
        """True if there is a choice of modes of torch.compile."""
        return len({policy.compile for policy in self.policies}) > 1

    def next_smaller(self, policy: Policy) -> Policy | None:
        """Returns the policy with the next smaller batch size, if there is one."""
        point, smaller = self.points.get(policy), [size for size in self.sizes if size < (policy.batch_size or 0)]
        return self._to_policy(Point({**point, BATCH_SIZE: smaller[-1]})) if point is not None and smaller else None

    def one_step_from(self, policy: Policy) -> Iterator[Policy]:
        """Yields the policies that differ in one knob; for numbers, by one step."""
        own = self._traits.get(policy)
        if own is not None:
            yield from (other for other, its in self._traits.items() if self._steps_between(its, own) == 1)

    def _steps_between(self, a: Point, b: Point) -> int:
        """Counts one for another word, and for numbers the choices from one to the other."""
        return sum(
            1 if isinstance(a[name], str) else abs(choices.index(a[name]) - choices.index(b[name]))
            for name, choices in self._choices.items()
            if a[name] != b[name] and UNUSED not in (a[name], b[name])
        )


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

    def seen(self) -> dict[int, Seen]:
        """Returns what each policy scored, by its index; one that was too large says nothing of other settings."""
        yardstick, index = self.yardstick, self.catalog.index
        return {
            index[policy]: Seen(score=yardstick.score(trial.outcome), seconds=trial.seconds)
            for policy, trial in self.latest.items()
            if policy in index and not self._is_too_large(trial)
        }

    def too_large(self) -> set[int]:
        """Returns the policies with no smaller a batch than one of their kind that ran out of memory."""
        least: dict[Any, int] = {}
        for trial in filter(self._is_too_large, self.trials):
            kind, size = memory_of(trial.policy), trial.policy.batch_size or 0
            least[kind] = min(size, least.get(kind, size))
        if not least:
            return set()
        kinds = enumerate(self.catalog.kinds)
        return {index for index, (size, kind) in kinds if kind in least and size >= least[kind]}

    def _is_too_large(self, trial: Trial) -> bool:
        """Returns True if it ran out of memory and a smaller batch might not: its other settings are not to blame."""
        return len(self.catalog.sizes) > 1 and isinstance(trial.outcome, Failure) and trial.outcome.kind == "oom"


def _traits(policy: Policy, point: Point) -> Point:
    """Returns the settings that decide speed: the point, with an FP32 math mode that acts on nothing marked unused."""
    return point if policy.uses_fp32_math or "fp32_math" not in point else Point({**point, "fp32_math": UNUSED})


def _with_unused(knobs: Sequence[Dimension]) -> list[Dimension]:
    return [replace(knob, choices=(*knob.choices, UNUSED)) if knob.name == "fp32_math" else knob for knob in knobs]
