"""The findings of a tuning run: its study, its candidates and its judgements, and their state at any moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from amptune.hardware.versions import versions_of
from amptune.measure.results.subject import Prepared
from amptune.policy.settings import Fp32Rule, Policy
from amptune.search.batch_size.batch_sizes import NO_SIZES, BatchSizes
from amptune.search.decide.evidence import labels_of
from amptune.search.gate.judge import Judge, PolicyJudged
from amptune.search.request import TuningRequest
from amptune.search.run_state import RunState
from amptune.search.sampler.records import TuningRecord
from amptune.search.sampler.study import Study, open_study
from amptune.search.space.candidates import Candidates, candidates_for
from amptune.search.space.exclusions import Ladder
from amptune.search.table.verdict import Verdict

__all__ = ["Knowledge"]


@dataclass
class Knowledge:
    """The study, candidates and judgements of one run. `sizes` are the batch sizes that were found."""

    request: TuningRequest
    prepared: Prepared
    candidates: Candidates
    judge: Judge
    sizes: BatchSizes = NO_SIZES
    _verdict: tuple[Any, Verdict | None] | None = None

    @property
    def baseline(self) -> Policy:
        return self.candidates.baseline

    @cached_property
    def study(self) -> Study:
        """The study, opened at first use: after the space is narrowed, or when that is interrupted."""
        request, candidates = self.request, self.candidates
        study = open_study(
            request.study,
            candidates.study_name,
            candidates.space,
            candidates.policy_of,
            seed=request.seed,
            stored=candidates.stored,
            objective=request.objective,
            baseline=candidates.baseline,
            fits=self.sizes.fits,
            sampler=request.sampler,
            left_s=lambda: request.budget.left_s,
        )
        study.begin(self._record)
        for judgement in self.judge.judgements.by_numerics.values():
            study.keep(judgement)
        self.judge.observer = _keeping_judgements(study, self.judge.observer)
        return study

    @property
    def _record(self) -> TuningRecord:
        request, subject = self.request, self.prepared.subject
        return TuningRecord(
            run=request.run,
            began=request.began,
            workload=subject.name,
            target=request.source.target,
            folder=str(request.folder.absolute()),
            hardware=self.prepared.hardware.name,
            batch_size=subject.batch_size,
            baseline=self.candidates.baseline,
            objective=request.objective,
            options=request.options,
            device=self.prepared.hardware.device,
            arguments=request.source.arguments,
            software=tuple(versions_of(self.prepared.hardware).items()),
            memory_mib=self.prepared.memory_mib,
            valid_for=tuple(labels_of(self.prepared).items()),
        )

    @property
    def state(self) -> RunState:
        """All that is known now."""
        return RunState(
            request=self.request,
            prepared=self.prepared,
            candidates=self.candidates,
            judgements=self.judge.judgements,
            history=self.study.history,
            rows=self.study.rows,
        )

    def verdict(self) -> Verdict | None:
        """Returns the verdict on all rows, computed once for each state; None if the baseline has no figure."""
        state = self.state
        if self._verdict is None or self._verdict[0] != state.basis:
            self._verdict = state.basis, state.verdict()
        return self._verdict[1]

    def bar(self, policy: Policy) -> str | None:
        """Returns why a policy cannot win; None if it can."""
        return self.state.bar(policy)

    def judging_s(self, policy: Policy) -> float:
        """Returns the seconds to judge a policy without its graph."""
        return self.judge.last_s if self.judge.judgements.is_open(policy) else 0.0

    def take(self, ladder: Ladder | None, safeguards: Mapping[str, tuple[Fp32Rule, ...] | None]) -> bool:
        """Makes the candidates anew, from the modules' measured times and the batch sizes; returns True if others come.

        `safeguards` are the rules that each precision needs.
        """
        before = self.candidates
        candidates = candidates_for(self.prepared, self.request.wanted, ladder, self.sizes.sizes)
        self.candidates = candidates.guarded(safeguards)
        return self.candidates != before

    def adopt(self) -> None:
        """Goes on with the candidates as they are now, in the study that is open."""
        self.study.adopt(self.candidates.space, self.candidates.policy_of, self.sizes.fits)


def _keeping_judgements(study: Study, observer: Callable[[PolicyJudged], None]) -> Callable[[PolicyJudged], None]:
    """Returns an observer that also records the numerics gate's judgements."""

    def observe(event: PolicyJudged) -> None:
        study.keep(event.judgement)
        observer(event)

    return observe
