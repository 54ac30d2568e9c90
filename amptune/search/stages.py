"""The stages of a run, each of which says what it wants to do next; what one finds out changes what others want."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property

from amptune.errors import StudyError
from amptune.measure.evaluator import Evaluator
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.answer_costs import compared_s, load_s, ranked, turn_s
from amptune.search.batch_size.batch_sizes import batch_sizes_for
from amptune.search.compiled_graphs import BEHIND, CompiledGraphs, typical_s
from amptune.search.events import Observer, SearchEnded
from amptune.search.groundwork import Modules, Numerics
from amptune.search.knowledge import Knowledge
from amptune.search.narrowing import Narrowing
from amptune.search.plan.compile_costs import cold_s
from amptune.search.plan.plan import Stage, Step, Wants
from amptune.search.space.knobs import FLOAT8
from amptune.search.trials import Trials

__all__ = ["Stages"]

# Finding the largest batch takes at most this share of the time: nothing else is measured meanwhile.
BATCH_SIZES_SHARE = 1 / 8


@dataclass
class Stages:
    """The stages of a run. They measure with the `evaluator`, and `known` is what they have found out."""

    known: Knowledge
    evaluator: Evaluator
    observer: Observer

    def __post_init__(self) -> None:
        self._budget = self.known.request.budget
        self._built_s = self._budget.spent_s
        self._has_ended = False

    @property
    def in_order(self) -> list[list[Wants]]:
        """The stages: those of a group compete, a later group has its turn when no earlier one has a step."""
        search: list[Wants] = [self._graphs.wants, self.trials.wants, self.trials.compiling]
        search += [self._numerics.wants, self._modules.wants, self._numerics.graph]
        return [search, [self._graphs.wait], [self._comparison]]

    @property
    def findings(self) -> Iterator[Finding]:
        """The findings of the stages."""
        yield from self.known.sizes.findings
        if (lost := self.known.study.lost) is not None:
            message = f"{lost}: later runs and `amptune report` lack some of what this run measured"
            yield Finding(code="not-recorded", message=message)
        yield from self._numerics.findings
        yield from self._narrowing.findings

    def sizing(self) -> Step | None:
        """Returns the step that finds the largest batches, if asked for, before anything compiles beside that."""
        ladder = self._modules.ladder()
        if ladder is not None:
            self.known.take(ladder, self._numerics.safeguards)
        if self.known.request.wanted.batch_size != "auto":
            return None
        policy = next(iter(self.known.candidates.halves_alone), self.known.baseline)
        seconds = self._budget.left_s * BATCH_SIZES_SHARE
        what = f"the largest batch under {policy}"
        return Step(stage="batch size", what=what, seconds=seconds, worth=math.inf, policies=(policy,))

    def take(self, step: Step, limit_s: float) -> None:
        """Takes a step that was wanted, within this time; the one place where steps are carried out."""
        if step.stage == "batch size":  # before the other stages, and the study, are made of what it finds
            self._find_batch_sizes(step, limit_s)
            return
        by_stage: dict[Stage, Callable[[Step, float], None]] = {
            "compile": self._graphs.take,
            "trial": self.trials.take,
            "numerics": self._numerics.take,
            "cure": self._numerics.cure,
            "modules": self._modules.take,
            "graph": lambda step, limit_s: self.known.judge.judge_graph(step.policies[0], limit_s),
            "wait": lambda step, limit_s: self._graphs.collect(min(limit_s, step.seconds)),
            "comparison": self._compare,
        }
        by_stage[step.stage](step, limit_s)

    def _find_batch_sizes(self, step: Step, limit_s: float) -> None:
        rest_s = self._budget.left_s - limit_s
        left_s = lambda: self._budget.left_s - rest_s  # noqa: E731
        whole, prepared = self.known.request.wanted.global_batch, self.known.prepared
        self.known.sizes = batch_sizes_for(self.evaluator, step.policies[0], prepared, whole, left_s=left_s)
        self.known.take(self._modules.ladder(), self._numerics.safeguards)

    def put_first(self) -> None:
        """Has the known-good policies measured first; those that compile in the background come by themselves."""
        first, study = (self.known.candidates.baseline, *self.known.candidates.starts), self.known.study
        if self._modules.are_open:
            first = tuple(policy for policy in first if not policy.fp32_modules)
            study.leave_out(lambda policy: any(not rule.is_needed for rule in policy.fp32_modules))
        study.measure_first(policy for policy in first if policy.compile not in BEHIND)

    def _changed(self) -> None:
        """Goes on with other policies: modules were timed, or a precision needs some of them in FP32."""
        self.trials.drop()
        self._graphs.drop()
        has_changed = self.known.take(self._modules.ladder(), self._numerics.safeguards)
        self.known.study.leave_nothing_out()
        if has_changed:
            self.known.adopt()
        self.put_first()

    @cached_property
    def _graphs(self) -> CompiledGraphs:
        prepared = self.known.prepared
        return CompiledGraphs(
            self.known.study,
            self.evaluator,
            self._budget,
            self.known.baseline,
            self.observer,
            leaves=len(prepared.subject.leaves),
            repeated_leaves=prepared.subject.repeated_leaves,
            memory_mib=prepared.memory_mib or math.inf,
            float8=self.known.candidates.in_words.get(FLOAT8, {}).get("wide", ()),
        )

    @cached_property
    def trials(self) -> Trials:
        known = self.known
        return Trials(known.study, self.evaluator, self._budget, known.baseline, self.observer, self._graphs)

    @cached_property
    def _numerics(self) -> Numerics:
        return Numerics(
            self.known.judge,
            self.known.prepared.subject,
            study=lambda: self.known.study,
            recipes=self.known.candidates.halves_alone,
            changed=self._changed,
        )

    @cached_property
    def _modules(self) -> Modules:
        known = self.known
        return Modules(
            self.evaluator,
            known.prepared,
            known.candidates.space,
            known.request.folder,
            timed=self._changed,
            trial_s=lambda: typical_s(known.study),
        )

    @cached_property
    def _narrowing(self) -> Narrowing:
        known = self.known
        return Narrowing(
            evaluator=self.evaluator,
            budget=self._budget,
            observer=self.observer,
            run=known.request.run,
            verdict=known.verdict,
            keep=known.study.add,
            objective=known.request.objective,
            bar=known.bar,
            unseen=self._unseen,
            beside=lambda verdict: known.state.better_recipe(verdict),
            rejects=known.judge.judged_unsound,
            cost_s=lambda policy: turn_s(known.study.history, policy, known.prepared.draw_s),
            start_s=known.prepared.start_s,
            load_s=lambda policy: load_s(known.study.history, policy),
            judging_s=known.judging_s,
            reserve_s=self._not_for_comparing_s,
            seed=known.request.seed,
        )

    def _comparison(self, _free_s: float) -> Step | None:
        """Returns the round of the comparison that tells most, once there is something to compare."""
        if not self._narrowing.rounds:  # the processes of the trials still run, as a rule
            own = (row for row in self.known.state.table if row.run == self.known.request.run)
            self._narrowing.running = {row.policy: row.launch for row in own}
        return self._narrowing.wants()

    def _compare(self, step: Step, limit_s: float) -> None:
        if not (self._has_ended or self._graphs.may_come):
            self.end_search(self.trials.ended_because())
        self._narrowing.take(step, limit_s)

    def needed_s(self) -> float:
        """Returns the seconds to keep for the answer: for judging it, and comparing it in fresh processes.

        A trial's time is kept besides, since the last step may take longer than expected, and a graph may come. They
        are infinite if there can be no answer.
        """
        history = self.known.study.history
        if self.trials.has_failed:
            return math.inf
        if len(history.trials) < 2:
            return 0.0
        judging_s = self.known.judging_s(ranked(history)[0])
        if self._narrowing.is_over:
            return judging_s
        compared = compared_s(
            history,
            self.known.baseline,
            start_s=self._narrowing.start_s,
            draw_s=self.known.prepared.draw_s,
            rounds=self._narrowing.rounds,
            search_s=self._budget.seconds - self._built_s,
            awaits_graph=self._graphs.is_awaited,
        )
        return judging_s + compared + typical_s(self.known.study)

    def _not_for_comparing_s(self) -> float:
        """Returns the seconds that the comparison leaves for a graph that may come."""
        return typical_s(self.known.study) if self._graphs.may_come else 0.0

    def _unseen(self, leader: Policy) -> Iterator[Policy]:
        """Yields the known-good policies that were not tried, then those one step from the leader; none to compile."""
        study = self.known.study
        for policy in (*self.known.candidates.known_good, *study.neighbours(leader)):
            if not cold_s(policy, study.history.outcomes):
                yield policy

    def end_search(self, because: str) -> None:
        """Tells once why no more policies are measured."""
        if not self._has_ended:
            self._has_ended = True
            measured, left_s = self.known.study.measured, self._budget.left_s
            self.observer(SearchEnded(because=because, trials=measured, left_s=left_s))

    def give_back(self) -> None:
        """Gives up what is not measured."""
        for give_back in (self.trials.drop, self._graphs.forget):
            with suppress(StudyError):
                give_back()
