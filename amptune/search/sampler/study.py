"""The study: the trials so far with their outcomes, and what to try next."""

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
from amptune.measure.results.outcome import Failure, Measurement, Outcome
from amptune.policy.settings import Policy
from amptune.search.batch_size.memory_model import arm_of
from amptune.search.gate.judge import PolicyJudged
from amptune.search.gate.limits import Judgement
from amptune.search.sampler.acquisition import Proposer, Seen, features_of, with_features
from amptune.search.sampler.records import GateRecord, TuningRecord
from amptune.search.sampler.storage import Handle, Store, open_store
from amptune.search.space.knobs import BATCH_SIZE, Knob, Point, Space, points
from amptune.search.table.ablation import variants_of
from amptune.search.table.objective import THROUGHPUT, Objective, Yardstick
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial

__all__ = ["Study", "Suggestion", "open_study"]

# A single measurement may show only this share of a policy's speed, if another program used the machine meanwhile.
OUTLIER_SHARE = 0.6
# A policy may reach this many standard deviations above its expected score.
REACH = 3.0

# For the proposer: the FP32 math mode of a policy that computes no product in FP32.
UNUSED = "unused"

ToPolicy = Callable[[Point], Policy]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A policy to measure next; `handle` is its trial in the store.

    `gain` is its expected improvement, on the logarithm of the score; infinite for a policy that was asked for.
    A score below `least` would be a surprise. `cost` is the trial's time over that of the cheapest one.
    """

    policy: Policy
    handle: Handle
    gain: float = math.inf
    least: float = 0.0
    cost: float = 1.0


class Study:
    """The trials so far and a proposer of the next one. Every outcome is stored before the next policy is asked for.

    The trials come from tuning runs of any objective. A trial is used if it failed or has the figure that this
    `objective` needs. A speed that the objective needs is compared with the `baseline`'s.
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
                self._points.setdefault(policy, point)  # deeper points of a short ladder give the same policy
        self._traits = {policy: _traits(policy, point) for policy, point in self._points.items()}
        self._choices = {knob.name: knob.choices for knob in space.knobs}
        self._policies = list(self._points)
        self._index = {policy: index for index, policy in enumerate(self._policies)}
        self._proposer = Proposer(
            with_features(_with_unused(space.knobs)), list(map(features_of, self._traits.values())), seed=seed
        )
        self._first: deque[Policy] = deque()
        self._left_out: set[int] = set()
        self._run = ""
        known = store.trials()
        self.trials: list[Trial] = list(filter(self._tells, known))
        self._rows = [*(trial.row for trial in known if not self._tells(trial)), *store.rows()]
        self._outcomes = {trial.policy: trial for trial in self.trials}
        self._sizes = sorted({policy.batch_size for policy in self._policies if policy.batch_size is not None})
        for trial in self.trials:
            self._note_size(trial)

    def __contains__(self, policy: Policy) -> bool:
        """Returns True if the space holds a policy, measured or not."""
        return policy in self._points

    def has_knob(self, name: str) -> bool:
        """Returns True if the space has a choice for this knob."""
        return len({point[name] for point in self._points.values() if name in point}) > 1

    @property
    def size(self) -> int:
        """The number of different policies in the space."""
        return len(self._points)

    def trial_of(self, policy: Policy) -> Trial | None:
        return self._outcomes.get(policy)

    @property
    def yardstick(self) -> Yardstick:
        """The yardstick that trials are compared by, with the baseline's measurement if it is known."""
        trial = self._outcomes.get(self._baseline) if self._baseline is not None else None
        outcome = trial.outcome if trial is not None else None
        return Yardstick(self._objective, outcome if isinstance(outcome, Measurement) else None)

    def _tells(self, trial: Trial) -> bool:
        """Returns True if a trial can be scored by the objective, or failed."""
        return isinstance(trial.outcome, Failure) or self._objective.score(trial.outcome) is not None

    def leave_out(self, which: Callable[[Policy], bool]) -> None:
        """Excludes these policies from all suggestions."""
        self._left_out |= {index for index, policy in enumerate(self._policies) if which(policy)}
        self._first = deque(policy for policy in self._first if not which(policy))

    def next_smaller(self, policy: Policy) -> Policy | None:
        """Returns the policy with the next smaller batch size of the space, if there is one."""
        point, smaller = self._points.get(policy), [size for size in self._sizes if size < (policy.batch_size or 0)]
        return self._to_policy(Point({**point, BATCH_SIZE: smaller[-1]})) if point is not None and smaller else None

    def _note_size(self, trial: Trial) -> None:
        """Excludes larger batches of the same kind if this one was too large."""
        if self._is_too_large(trial):
            kind, size = arm_of(trial.policy), trial.policy.batch_size or 0
            self.leave_out(lambda policy: (policy.batch_size or 0) >= size and arm_of(policy) == kind)

    def _is_too_large(self, trial: Trial) -> bool:
        """Returns True if it ran out of memory and a smaller batch might not: its other settings are not to blame."""
        return len(self._sizes) > 1 and isinstance(trial.outcome, Failure) and trial.outcome.kind == "oom"

    @property
    def has_left_out(self) -> bool:
        """True if an exclusion kept any policy from being measured."""
        return any(self._policies[index] not in self._outcomes for index in self._left_out)

    def begin(self, tuning: TuningRecord) -> None:
        """Records that a tuning run uses the study from now on."""
        self._run = tuning.run
        self._store.note_tuning(tuning)

    def runs(self) -> list[str]:
        """Returns the tuning runs that have used the study; [] if the storage fails."""
        with suppress(StudyError):
            return self._store.runs()
        return []

    def add(self, row: Row) -> None:
        """Adds a timing that is no trial; a storage that fails loses it for later runs alone."""
        self._rows.append(row)
        with suppress(StudyError):
            self._store.note_row(row)

    def catch_up(self) -> None:
        """Adds the timings that other workers have stored meanwhile; a storage that fails adds none."""
        with suppress(StudyError):
            stored = [*(trial.row for trial in self._store.trials()), *self._store.rows()]
            known = set(self.table)
            self._rows += [row for row in stored if row.run != self._run and row not in known]

    @property
    def table(self) -> list[Row]:
        """Every timing of all runs: the trials' and the others."""
        return [*(trial.row for trial in self.trials), *self._rows]

    def keeping_judgements(self, observer: Callable[[PolicyJudged], None]) -> Callable[[PolicyJudged], None]:
        """Returns an observer that also records the numerics gate's judgements; a failing storage loses only those."""

        def observe(event: PolicyJudged) -> None:
            with suppress(StudyError):
                self.keep(event.judgement)
            observer(event)

        return observe

    def keep(self, judgement: Judgement) -> None:
        """Records the numerics gate's judgement of a policy."""
        self._store.note_judged(GateRecord.of(judgement))

    def measure_first(self, policies: Iterable[Policy]) -> None:
        """Puts these policies first, including those outside the space."""
        self._first.extend(policies)

    def measure_next(self, policies: Sequence[Policy]) -> None:
        """Puts these policies before those that `measure_first` named."""
        self._first.extendleft(reversed(policies))

    def suggest(self, fixed: Mapping[str, Any] | None = None) -> Suggestion | None:
        """Returns the next unmeasured policy, with some knobs fixed; None if all such policies are measured."""
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
        """Returns the measured policies, the best first, those that are too slow for the objective last.

        Two orders alternate. One is by the estimate from all trials together, as a single short measurement may be
        lucky or an outlier. The other is by its own score, as the estimate knows little of a policy unlike all others.
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
        """Returns the policies one step from a policy that may be better: one setting less, or one knob changed.

        They are ordered by what they may reach, those outside the space first. Neither a low expectation nor a
        measurement that may be an outlier excludes a policy.
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
        """Returns True if it failed, or was worse than an outlier explains."""
        trial, other = self._outcomes.get(policy), self._outcomes.get(beside)
        if trial is None or isinstance(trial.outcome, Failure):
            return trial is not None
        if self.yardstick.share_of_needed_speed(trial.outcome) < OUTLIER_SHARE:
            return True
        best = self._plain_score(other.outcome) if other is not None else 0.0
        return self._plain_score(trial.outcome) < OUTLIER_SHARE * best

    def _plain_score(self, outcome: Outcome) -> float:
        """Returns the score without a penalty for low speed, as that is one measurement and may be an outlier."""
        return (self._objective.score(outcome) or 0.0) if isinstance(outcome, Measurement) else 0.0

    def _steps_between(self, a: Point, b: Point) -> int:
        """Counts one for another word, and for numbers the choices from one to the other."""
        return sum(
            1 if isinstance(a[name], str) else abs(choices.index(a[name]) - choices.index(b[name]))
            for name, choices in self._choices.items()
            if a[name] != b[name] and UNUSED not in (a[name], b[name])
        )

    def reconsider(self, policy: Policy) -> None:
        """Forgets a failure: on a busy machine it may have been chance, and nothing works without a baseline."""
        trial = self._outcomes.get(policy)
        if trial is not None and isinstance(trial.outcome, Failure):
            del self._outcomes[policy]
            self.trials.remove(trial)

    def tell(self, suggestion: Suggestion, trial: Trial) -> None:
        """Adds an outcome and stores it."""
        self.trials.append(trial)  # first, so that a storage that fails now does not lose it
        self._outcomes[trial.policy] = trial
        self._note_size(trial)
        self._store.tell(suggestion.handle, trial)

    def forget(self, suggestion: Suggestion) -> None:
        """Leaves a suggestion unmeasured, so that it can be asked for again."""
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

    Policies of the space that do not fit into memory are left out. Every `objective` uses the same study.
    Optuna keeps the points as points of the space `stored`, by default `space`: a space that this run has cut to its
    sound points must not look like another space.
    Raises `StudyError` if the storage cannot be used.
    """
    store = open_store(where, name, stored or space)
    return Study(store, space, to_policy, seed, objective, baseline, fits)


def _traits(policy: Policy, point: Point) -> Point:
    """Returns the settings that decide speed: the point, with an FP32 math mode that acts on nothing marked unused."""
    return point if policy.uses_fp32_math or "fp32_math" not in point else Point({**point, "fp32_math": UNUSED})


def _with_unused(knobs: Sequence[Knob]) -> list[Knob]:
    return [replace(knob, choices=(*knob.choices, UNUSED)) if knob.name == "fp32_math" else knob for knob in knobs]
