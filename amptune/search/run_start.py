"""The beginning of a run: its study is opened, and what is known before its first job."""

from __future__ import annotations

from amptune.measure.evaluator import Evaluator
from amptune.measure.results.subject import Prepared
from amptune.search.batch_size.batch_sizes import NO_SIZES
from amptune.search.decided import tuning_of
from amptune.search.events import Observer, SearchStarted
from amptune.search.gate.judge import Judge
from amptune.search.gate.judgements import Judgements
from amptune.search.perform import Performer
from amptune.search.request import TuningRequest
from amptune.search.sampler.records import without_password
from amptune.search.sampler.study import open_study
from amptune.search.space.candidates import Candidates
from amptune.search.state import Graphs, Rounds, State

__all__ = ["performer_of", "state_of"]


def performer_of(
    evaluator: Evaluator, request: TuningRequest, prepared: Prepared, candidates: Candidates, observer: Observer
) -> Performer:
    """Opens the study of a run. Raises `StudyError` if it cannot be used."""
    study = open_study(
        request.study,
        candidates.study_name,
        candidates.space,
        candidates.policy_of,
        objective=request.objective,
        baseline=candidates.baseline,
        sampler=request.sampler,
        left_s=lambda: request.budget.left_s,
    )
    study.begin(tuning_of(request, prepared, candidates.baseline))
    study.reconsider(candidates.baseline)
    judge = Judge(evaluator, candidates.baseline, prepared.subject.tolerance)
    performer = Performer(evaluator, study, judge, observer)
    observer(
        SearchStarted(
            architecture=candidates.space.architecture,
            size=len(study.history.catalog.policies),
            remembered=len(study.trials),
            study=without_password(str(request.study)),
            left_s=request.budget.left_s,
        )
    )
    return performer


def state_of(performer: Performer, request: TuningRequest, prepared: Prepared, candidates: Candidates) -> State:
    """Returns what is known before the first job: the workload, and what the study has of former runs."""
    first = State(
        request=request,
        prepared=prepared,
        candidates=candidates,
        history=performer.study.history,
        judgements=Judgements(candidates.baseline),
        sensed=performer.study.sensed,
        sizes=None if request.wanted.batch_size == "auto" else NO_SIZES,
        graphs=Graphs(at_once=performer.evaluator.graphs_at_once),
        rounds=Rounds(start_s=prepared.start_s),
        built_s=request.budget.spent_s,
    )
    return performer.seen(performer.with_candidates(first))
