"""The study: what was tried, what came of it, and so what to try next."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from amptune.errors import StudyError
from amptune.measure.outcome import Failure, Measurement, Outcome
from amptune.policy.settings import Policy
from amptune.search.ablation import variants_of
from amptune.search.events import Event, Observer, PolicyJudged
from amptune.search.gate import Judgement
from amptune.search.memory_model import arm_of
from amptune.search.objective import THROUGHPUT, Objective, Yardstick
from amptune.search.proposing import Proposer, Seen, features_of, with_features
from amptune.search.remembered import Choice, Judged, TuningRecord
from amptune.search.space import BATCH_SIZE, Knob, Point, Space, points
from amptune.search.storing import Handle, Store, open_store
from amptune.search.trial import Trial

__all__ = ["Study", "Suggestion", "open_study"]

# A single measurement may show this share of what a policy can do, if something else had the machine meanwhile.
OUTLIER_SHARE = 0.6
# What a policy may reach: so many standard deviations above what is expected of it.
REACH = 3.0

# The FP32 math mode of a policy that computes no product in FP32, to the proposer.
UNUSED = "unused"

ToPolicy = Callable[[Point], Policy]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A policy to measure next; `handle` is the store's trial behind it.

    `gain` is the improvement expected of it, on the logarithm of the score; infinite for one that was asked for.
    A score of less than `least` would be a surprise. `cost` is what the trial takes, in times of a plain one.
    """

    policy: Policy
    handle: Handle
    gain: float = math.inf
    least: float = 0.0
    cost: float = 1.0


class Study:
    """Ask for a policy, tell what became of it. Every outcome is in the storage before the next is asked for.

    The trials are those of any objective. One is remembered where it has the figure that this `objective` goes by, or
    failed; speed that is needed is held against the `baseline`.
    """

    def __init__(
        self,
        store: Store,
        space: Space,
        to_policy: ToPolicy,
        seed: int,
        objective: Objective = THROUGHPUT,
        baseline: Policy | None = None,
        fits: Callable[[Policy], bool] = lambda _: True,
    ) -> None:
        self._store = store
        self._objective = objective
        self._baseline = baseline
        self._to_policy = to_policy
        self._points: dict[Policy, Point] = {}
        for point in points(space):
            policy = to_policy(point)
            if fits(policy):
                self._points.setdefault(policy, point)  # where a ladder is short, its deeper points are the same
        self._traits = {policy: _traits(policy, point) for policy, point in self._points.items()}
        self._choices = {knob.name: knob.choices for knob in space.knobs}
        self._policies = list(self._points)
        self._index = {policy: index for index, policy in enumerate(self._policies)}
        self._proposer = Proposer(
            with_features(_with_unused(space.knobs)), list(map(features_of, self._traits.values())), seed=seed
        )
        self._first: deque[Policy] = deque()
        self._left_out: set[int] = set()
        self.trials: list[Trial] = list(filter(self._tells, store.trials()))
        self._outcomes = {trial.policy: trial for trial in self.trials}
        self._sizes = sorted({policy.batch_size for policy in self._policies if policy.batch_size is not None})
        for trial in self.trials:
            self._note_size(trial)

    def __contains__(self, policy: Policy) -> bool:
        """Whether the space holds a policy, measured or not."""
        return policy in self._points

    def has_knob(self, name: str) -> bool:
        """Whether there is a choice to make there."""
        return len({point[name] for point in self._points.values() if name in point}) > 1

    @property
    def size(self) -> int:
        """How many different policies the space holds."""
        return len(self._points)

    def trial_of(self, policy: Policy) -> Trial | None:
        return self._outcomes.get(policy)

    @property
    def yardstick(self) -> Yardstick:
        """What trials are compared by, as far as it is known."""
        trial = self._outcomes.get(self._baseline) if self._baseline is not None else None
        outcome = trial.outcome if trial is not None else None
        return Yardstick(self._objective, outcome if isinstance(outcome, Measurement) else None)

    def _tells(self, trial: Trial) -> bool:
        """Whether a trial says something for the objective."""
        return isinstance(trial.outcome, Failure) or self._objective.score(trial.outcome) is not None

    def leave_out(self, which: Callable[[Policy], bool]) -> None:
        """Has none of these suggested any more."""
        self._left_out |= {index for index, policy in enumerate(self._policies) if which(policy)}
        self._first = deque(policy for policy in self._first if not which(policy))

    def next_smaller(self, policy: Policy) -> Policy | None:
        """The same with the next smaller batch size of the space, if there is one."""
        point, smaller = self._points.get(policy), [size for size in self._sizes if size < (policy.batch_size or 0)]
        return self._to_policy(Point({**point, BATCH_SIZE: smaller[-1]})) if point is not None and smaller else None

    def _note_size(self, trial: Trial) -> None:
        """Where a batch is too large, larger ones of its kind are too."""
        if self._is_too_large(trial):
            kind, size = arm_of(trial.policy), trial.policy.batch_size or 0
            self.leave_out(lambda policy: (policy.batch_size or 0) >= size and arm_of(policy) == kind)

    def _is_too_large(self, trial: Trial) -> bool:
        """Whether it ran out of memory, and a smaller batch might not: that says nothing of its other settings."""
        return len(self._sizes) > 1 and isinstance(trial.outcome, Failure) and trial.outcome.kind == "oom"

    @property
    def has_left_out(self) -> bool:
        """Whether that kept any policy from being measured."""
        return any(self._policies[index] not in self._outcomes for index in self._left_out)

    def begin(self, tuning: TuningRecord) -> None:
        """Writes down that a tuning run uses the study from now on."""
        self._store.note_tuning(tuning)

    def runs(self) -> list[str]:
        """The tuning runs that have used it; none where the storage fails."""
        with suppress(StudyError):
            return self._store.runs()
        return []

    def conclude(self, run: str, choice: Choice) -> None:
        """Writes down what a tuning run chose; a storage that fails loses that alone."""
        with suppress(StudyError):
            self._store.note_decided(run, choice)

    def keeping_judgements(self, observer: Observer) -> Observer:
        """The observer, and what the numerics gate says written down; a storage that fails loses that alone."""

        def observe(event: Event) -> None:
            if isinstance(event, PolicyJudged):
                with suppress(StudyError):
                    self.keep(event.judgement)
            observer(event)

        return observe

    def keep(self, judgement: Judgement) -> None:
        """Writes down what the numerics gate says of a policy."""
        self._store.note_judged(Judged.of(judgement))

    def measure_first(self, policies: Iterable[Policy]) -> None:
        """Has these suggested before anything else, those outside the space too."""
        self._first.extend(policies)

    def measure_next(self, policies: Sequence[Policy]) -> None:
        """Has these suggested before those that `measure_first` named."""
        self._first.extendleft(reversed(policies))

    def suggest(self, fixed: Mapping[str, Any] | None = None) -> Suggestion | None:
        """The next unmeasured policy, with some knobs fixed; None when every such policy of the space is measured."""
        while self._first:
            if self._first[0] not in self._outcomes:
                return self._ask_for(self._first[0])
            self._first.popleft()
        seen = self._seen()
        proposal = self._proposer.next(seen, fixed or {}, self._left_out)
        if proposal is None:
            return None
        suggestion = self._ask_for(self._policies[proposal.index])
        return replace(suggestion, gain=proposal.gain, least=proposal.least, cost=proposal.cost)

    def ranked(self) -> list[Policy]:
        """The policies that were measured, the best first, those that are too slow for the objective last.

        In turn by what all trials together say of each, as a single short measurement may be lucky or an outlier, and
        by its own, as of what is unlike all others they know nothing.
        """
        belief, yardstick = self._proposer.belief(self._seen()), self.yardstick
        measured: dict[Policy, tuple[bool, float]] = {}
        expected: dict[Policy, tuple[bool, float]] = {}
        for trial in self.trials:
            score = yardstick.score(trial.outcome)
            if score is not None:
                allowed, index = yardstick.allows(trial.outcome), self._index.get(trial.policy)
                measured[trial.policy] = allowed, math.log(score)
                mean = math.log(score) if belief is None or index is None else float(belief.mean[index])
                expected[trial.policy] = allowed, mean
        orders = (sorted(places, key=places.__getitem__, reverse=True) for places in (expected, measured))
        return list(dict.fromkeys(chain.from_iterable(zip(*orders, strict=True))))

    def neighbours(self, policy: Policy) -> list[Policy]:
        """What is one step from a policy and may be better: one setting less, or another choice of one knob.

        They are in the order of what they may reach, those outside the space first. But an expectation rules nothing
        out, nor does a measurement that may have been an outlier.
        """
        simpler = [variant.policy for variant in variants_of(policy)]
        own = self._traits.get(policy)
        others = () if own is None else (p for p, its in self._traits.items() if self._steps_between(its, own) == 1)
        near = [other for other in dict.fromkeys([*simpler, *others]) if not self._is_hopeless(other, beside=policy)]
        belief = self._proposer.belief(self._seen())

        def reach(other: Policy) -> float:
            index = self._index.get(other)
            return (
                math.inf
                if belief is None or index is None
                else float(belief.mean[index] + REACH * belief.deviation[index])
            )

        return sorted(near, key=reach, reverse=True)

    def _is_hopeless(self, policy: Policy, *, beside: Policy) -> bool:
        """Whether it failed, or was worse than an outlier explains."""
        trial, other = self._outcomes.get(policy), self._outcomes.get(beside)
        if trial is None or isinstance(trial.outcome, Failure):
            return trial is not None
        if self.yardstick.share_of_needed_speed(trial.outcome) < OUTLIER_SHARE:
            return True
        best = self._plain_score(other.outcome) if other is not None else 0.0
        return self._plain_score(trial.outcome) < OUTLIER_SHARE * best

    def _plain_score(self, outcome: Outcome) -> float:
        """Whatever its speed: that is one measurement, and may be an outlier."""
        return (self._objective.score(outcome) or 0.0) if isinstance(outcome, Measurement) else 0.0

    def _steps_between(self, a: Point, b: Point) -> int:
        """One for another word, and for numbers as many as there are choices from one to the other."""
        return sum(
            1 if isinstance(a[name], str) else abs(choices.index(a[name]) - choices.index(b[name]))
            for name, choices in self._choices.items()
            if a[name] != b[name] and UNUSED not in (a[name], b[name])
        )

    def reconsider(self, policy: Policy) -> None:
        """Forgets a failure: what once failed on a busy machine may run now, and without a baseline nothing does."""
        trial = self._outcomes.get(policy)
        if trial is not None and isinstance(trial.outcome, Failure):
            del self._outcomes[policy]
            self.trials.remove(trial)

    def tell(self, suggestion: Suggestion, trial: Trial) -> None:
        """Takes in an outcome, and writes it down."""
        self.trials.append(trial)  # first of all: a storage that fails now must not lose it
        self._outcomes[trial.policy] = trial
        self._note_size(trial)
        self._store.tell(suggestion.handle, trial)

    def forget(self, suggestion: Suggestion) -> None:
        """Leaves a suggestion unmeasured, to be asked for again another time."""
        self._store.forget(suggestion.handle)

    def _seen(self) -> dict[int, Seen]:
        yardstick = self.yardstick
        return {
            self._index[policy]: Seen(score=yardstick.score(trial.outcome), seconds=trial.seconds)
            for policy, trial in self._outcomes.items()
            if policy in self._index and not self._is_too_large(trial)
        }

    def _ask_for(self, policy: Policy) -> Suggestion:
        return Suggestion(policy, self._store.ask(self._points.get(policy)))


def open_study(
    where: Path | str,
    name: str,
    space: Space,
    to_policy: ToPolicy,
    *,
    seed: int,
    stored: Space | None = None,
    objective: Objective = THROUGHPUT,
    baseline: Policy | None = None,
    fits: Callable[[Policy], bool] = lambda _: True,
) -> Study:
    """Opens or resumes a study: `where` is a folder (a journal file in it) or a database URL.

    Policies of the space that do not fit into memory are left out. Whatever the `objective`, it is the same study.
    Optuna keeps the points as of the space `stored`, by default the same: a space that was cut to what is sound this
    time must not be another one to it.
    Raises `StudyError` if the storage cannot be used.
    """
    store = open_store(where, name, stored or space)
    return Study(store, space, to_policy, seed, objective, baseline, fits)


def _traits(policy: Policy, point: Point) -> Point:
    """What makes a policy fast or slow: the point, but a FP32 math mode that acts on nothing has no part in it."""
    return point if policy.uses_fp32_math or "fp32_math" not in point else Point({**point, "fp32_math": UNUSED})


def _with_unused(knobs: Sequence[Knob]) -> list[Knob]:
    return [replace(knob, choices=(*knob.choices, UNUSED)) if knob.name == "fp32_math" else knob for knob in knobs]
