"""A tuning run: step after step, as the plan chooses them; a decision can be had at any moment."""

from __future__ import annotations

from dataclasses import dataclass

from amptune.errors import StudyError
from amptune.search.decide.decision import Decision
from amptune.search.events import SearchStarted
from amptune.search.plan.compile_costs import judged_graph_s
from amptune.search.plan.plan import Choice, Moment, next_step
from amptune.search.plan.timeline import Timeline
from amptune.search.sampler.records import without_password
from amptune.search.stages import Stages

__all__ = ["TuningRun"]

# Seconds beyond the budget for judging the winner.
GRACE_S = 5.0


@dataclass
class TuningRun:
    """A tuning run in progress, from which a decision can be made at any moment."""

    stages: Stages
    timeline: Timeline

    def __post_init__(self) -> None:
        self._known = self.stages.known
        self._budget = self._known.request.budget

    def find_answer(self) -> None:
        """Searches, judges and compares as the plan has it, until the answer is known or the budget is spent."""
        sizing = self.stages.sizing()
        if sizing is not None:
            self._take(Choice(step=sizing, limit_s=sizing.seconds))
        study = self._known.study
        study.reconsider(self._known.baseline)
        self.stages.put_first()
        self.stages.observer(
            SearchStarted(
                architecture=self._known.candidates.space.architecture,
                size=study.size,
                remembered=len(study.trials),
                study=without_password(str(self._known.request.study)),
                left_s=self._budget.left_s,
            )
        )
        self.stages.trials.anchor()
        try:
            while (choice := self._next()) is not None:
                self._take(choice)
            self.stages.end_search(self.stages.trials.ended_because())
        except StudyError as error:  # a failing storage, or no worker can be started: what is in memory still decides
            self.stages.end_search(str(error))
        finally:
            self.stages.give_back()
            study.end(self.timeline.entries)

    def _next(self) -> Choice | None:
        """Returns the next step: of the first group of stages that has one."""
        left_s, needed_s = self._budget.left_s, self.stages.needed_s()
        for group in self.stages.in_order:
            wanted = tuple(step for wants in group if (step := wants(left_s - needed_s)) is not None)
            if (choice := next_step(Moment(left_s=left_s, needed_s=needed_s, wanted=wanted))) is not None:
                return choice
        return None

    def _take(self, choice: Choice) -> None:
        with self.timeline.noting(choice):
            self.stages.take(choice.step, choice.limit_s)

    def sound_decision(self) -> Decision | None:
        """Returns the decision with its winner judged if there is time; a rejected winner is replaced by another."""
        decision, judge = self.decision(interrupted=False), self._known.judge
        while decision is not None and self._budget.left_s > -GRACE_S:
            winner, left_s = decision.winner, self._budget.left_s + GRACE_S
            try:
                if judge.judgements.is_open(winner):
                    judge.judgement_of(winner)
                elif self._can_judge_graph(decision, left_s):
                    judge.judge_graph(winner, left_s)
                else:
                    return decision
            except StudyError:  # no worker can be started any more, which has ended the search too
                return decision
            decision = self.decision(interrupted=False)
        return decision

    def _can_judge_graph(self, decision: Decision, left_s: float) -> bool:
        winner, judge = decision.winner, self._known.judge
        seconds = judged_graph_s(winner, self._known.study.history.outcomes)
        return judge.judgements.is_graph_open(winner) and seconds < min(left_s, judge.longest_graph_s)

    def decision(self, *, interrupted: bool) -> Decision | None:
        """Returns the decision as things stand; None if the baseline was not measured, or failed."""
        self._known.study.catch_up()
        verdict = self._known.verdict()
        if verdict is None:
            return None
        return self._known.state.decision(
            verdict,
            tuple(self.stages.findings),
            seconds=self._budget.spent_s,
            interrupted=interrupted,
            timeline=self.timeline.entries,
        )
