"""Tuning, as one pipeline: prepare, narrow the space, search, compare the finalists, decide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from amptune.errors import NothingFeasibleError, StudyError
from amptune.measure.evaluator import Evaluator, WorkerEvaluator
from amptune.measure.outcome import Failure
from amptune.measure.subject import Prepared
from amptune.policy.findings import Finding
from amptune.policy.settings import STOCK, Policy
from amptune.search.budget import Budget
from amptune.search.candidates import Candidates, Wanted, candidates_for
from amptune.search.deciding import Decision, decide
from amptune.search.end_to_end import checked_in_a_loop, loop_s
from amptune.search.events import Observer, SearchStarted
from amptune.search.failed_baseline import error_of_baseline
from amptune.search.finals import ROUNDS_PER_LAUNCH
from amptune.search.guarding import guard_against
from amptune.search.judging import Judge
from amptune.search.proof import Contest, Proof
from amptune.search.proving import FINALS_SHARE, prove
from amptune.search.ratios import ENOUGH_LAUNCHES
from amptune.search.request import TuningRequest, place_of, source_of
from amptune.search.samples import keeping_samples
from amptune.search.searching import search
from amptune.search.sensing import timed_ladder
from amptune.search.space import Space
from amptune.search.study import Study, open_study
from amptune.workload.protocol import Workload

__all__ = ["TuningInterrupted", "run_tuning", "tune", "tune_with"]

# The comparisons behind the search are kept at most this share of the time there is once the workload is built.
PROOF_SHARE = 0.6
# The proof is not kept more time than for these launches of its contenders.
LAUNCHES_KEPT = 20
# The numerics of so many of them are judged ahead: an unsound one that is fast would make sound ones look beaten.
JUDGED_BEFORE = 2
# Beyond the budget, to judge the winner.
GRACE_S = 8.0
# The fastest trials stand in the finals: as many as there is time for enough launches of, within these bounds.
FINALISTS, MOST_FINALISTS = 4, 8


class TuningInterrupted(KeyboardInterrupt):
    """Ctrl-C (or SIGTERM, on the command line) during tuning; `decision` is the best so far, provisional, or None."""

    def __init__(self, decision: Decision | None) -> None:
        super().__init__("tuning was interrupted")
        self.decision = decision


def tune(
    workload: Workload | str,
    *,
    budget_s: float = 300.0,
    trials: int | None = None,
    space: str | Path | None = None,
    pins: Mapping[str, str] | None = None,
    baseline: Policy = STOCK,
    batch_size: int | Literal["auto"] | None = None,
    device: str | None = None,
    study: str | Path | None = None,
    seed: int = 0,
    observer: Observer | None = None,
) -> Decision:
    """Finds the fastest policy for a workload on this machine: `amptune tune` as a function.

    `workload` is a `Workload` (its functions travel to the worker processes by value) or a target such as
    `"train.py:workload"`. `budget_s` is wall-clock seconds, final comparison included; `trials` bounds the
    number of policies tried. `space` names a search space or its file, `pins` fixes knobs by name, `study`
    is a folder or a database URL to remember trials in (default: under `.amptune/`).

    Raises an `AmptuneError` of the fitting kind, and `TuningInterrupted` on Ctrl-C, with the best so far.
    """
    source = source_of(workload)
    name = workload.name or "workload" if isinstance(workload, Workload) else workload
    folder, storage = place_of(study, name)
    request = TuningRequest(
        source=source,
        wanted=Wanted(baseline=baseline, space=space, pins=pins or {}, batch_size=batch_size),
        budget=Budget(seconds=budget_s, trials=trials),
        folder=folder,
        study=storage,
        device=device,
        seed=seed,
    )
    return run_tuning(request, observer or (lambda _: None))


def run_tuning(request: TuningRequest, observer: Observer) -> Decision:
    """Tunes on this machine. Raises an `AmptuneError`, or `TuningInterrupted` with what was found by then."""
    with _locked(request.folder):
        evaluator = WorkerEvaluator(request.source, request.device, request.folder / "workers.log")
        try:
            decision = tune_with(evaluator, _with_time_for_a_loop(request), keeping_samples(request.folder, observer))
            try:
                return checked_in_a_loop(evaluator, decision, request.budget)
            except KeyboardInterrupt:
                raise TuningInterrupted(decision) from None
        finally:
            evaluator.close()


def tune_with(evaluator: Evaluator, request: TuningRequest, observer: Observer) -> Decision:
    """The same on any evaluator: this machine, or a recording of one."""
    before_s = request.budget.spent_s
    prepared = evaluator.prepare(request.budget.left_to_prepare_s)
    prepare_s = request.budget.spent_s - before_s
    candidates = candidates_for(prepared, request.wanted)
    judge = Judge(evaluator, candidates.baseline, request.budget, observer, prepared.subject.tolerance)
    progress = _Progress(request, prepared, candidates, judge)
    try:
        progress.narrow(evaluator)
        _run(evaluator, progress, prepare_s, observer)
        decision = progress.sound_decision()
    except KeyboardInterrupt:
        raise TuningInterrupted(progress.decision(provisional=True)) from None
    if decision is None:
        raise _nothing_feasible(progress.study, candidates)
    return decision


@dataclass
class _Progress:
    """A tuning run under way: what a decision can be made of at any moment.

    `findings` are those from before the search.
    """

    request: TuningRequest
    prepared: Prepared
    candidates: Candidates
    judge: Judge
    findings: tuple[Finding, ...] = ()
    proof: Proof | None = None

    def __post_init__(self) -> None:
        self.study = self._opened()

    def narrow(self, evaluator: Evaluator) -> None:
        """Times modules by themselves and judges each dtype: which modules there are reasons to keep in FP32."""
        request, prepared = self.request, self.prepared
        ladder = timed_ladder(evaluator, prepared, self.candidates.space, request.budget, request.folder)
        candidates = candidates_for(prepared, request.wanted, ladder)
        guard = guard_against(self.judge, candidates.autocast_alone, prepared.subject)
        self.candidates, self.findings = candidates.guarded(guard.safeguards), guard.findings
        self.study = self._opened(stored=candidates.space)

    def _opened(self, stored: Space | None = None) -> Study:
        name, space = self.candidates.study_name, self.candidates.space
        to_policy, seed = self.candidates.policy_of, self.request.seed
        return open_study(self.request.study, name, space, to_policy, seed=seed, stored=stored)

    def enter_proof(self, start_s: float) -> Proof:
        """Who is compared behind the search: the baseline, stock PyTorch, the AMP recipes and the fastest trials."""
        time_s = FINALS_SHARE * self.request.budget.left_s
        self.proof = self._proof_of(_finalists(self.study, self.candidates, start_s, time_s))
        return self.proof

    def sound_decision(self) -> Decision | None:
        """The decision, its winner judged where there is time; one that is rejected leaves it to another."""
        decision = self.decision(provisional=False)
        while decision is not None and self.judge.is_open(decision.winner) and self.request.budget.left_s > -GRACE_S:
            self.judge.judgement_of(decision.winner)
            decision = self.decision(provisional=False)
        return decision

    def decision(self, *, provisional: bool) -> Decision | None:
        return decide(
            self.prepared,
            self.study.trials,
            self.proof or self._proof_of(()),
            self.judge,
            noticed_before=self.findings,
            amp_recipes=self.candidates.amp_recipes,
            seconds=self.request.budget.spent_s,
            provisional=provisional,
        )

    def _proof_of(self, finalists: tuple[Policy, ...]) -> Proof:
        return Proof(
            contest=Contest(
                baseline=self.candidates.baseline,
                finalists=finalists,
                eligible=self.study.__contains__,
                variant_eligible=self.candidates.allows,
                neighbours=self.study.neighbours,
                tried={trial.policy: trial.outcome for trial in self.study.trials},
                rejected=self.judge.has_rejected,
                seed=self.request.seed,
            )
        )


def _run(evaluator: Evaluator, progress: _Progress, prepare_s: float, observer: Observer) -> None:
    request, study, candidates = progress.request, progress.study, progress.candidates
    study.reconsider(candidates.baseline)
    study.measure_first(candidates.first)
    observer(
        SearchStarted(
            prepared=progress.prepared,
            architecture=candidates.space.architecture,
            size=study.size,
            remembered=len(study.trials),
            study=str(request.study),
            budget_s=request.budget.seconds,
        )
    )
    search(
        study,
        evaluator,
        request.budget,
        baseline=candidates.baseline,
        reserve_s=lambda: _proof_s(study, request.budget, prepare_s),
        observer=observer,
    )
    baseline = study.trial_of(candidates.baseline)
    if baseline is None or isinstance(baseline.outcome, Failure):
        return
    proof = progress.enter_proof(prepare_s)
    if len(proof.contest.finalists) > 1:
        for policy in _fastest_of(proof.contest.finalists, study)[:JUDGED_BEFORE]:
            progress.judge.judgement_of(policy)
        with suppress(StudyError):  # no worker can be started any more: what was measured by now decides
            prove(evaluator, proof, request.budget, prepare_s, observer, progress.judge.rejects)


def _proof_s(study: Study, budget: Budget, prepare_s: float) -> float:
    """The time to keep for the comparisons, at what starting a worker and a trial have cost so far."""
    costs = sorted(trial.seconds for trial in study.trials)
    typical_s = costs[len(costs) // 2] if costs else 0.0
    contenders = min(2 + FINALISTS, len(costs))
    wanted_s = LAUNCHES_KEPT * (prepare_s + ROUNDS_PER_LAUNCH * contenders * typical_s)
    return min(PROOF_SHARE * (budget.seconds - prepare_s), wanted_s)


def _finalists(study: Study, candidates: Candidates, start_s: float, time_s: float) -> tuple[Policy, ...]:
    """The baseline, the known-good policies and the fastest trials, each once: those that `time_s` is enough for."""
    known = [policy for policy in candidates.known_good if study.trial_of(policy) is not None]
    finalists = dict.fromkeys([candidates.baseline, *known])
    fastest = [policy for policy in study.ranked() if policy in study]
    trial_s = {trial.policy: trial.seconds for trial in study.trials}
    for place, policy in enumerate(fastest[:MOST_FINALISTS]):
        launch_s = start_s + ROUNDS_PER_LAUNCH * sum(trial_s[one] for one in {*finalists, policy})
        if place < FINALISTS or ENOUGH_LAUNCHES * launch_s < time_s:
            finalists[policy] = None
    return tuple(finalists)


def _fastest_of(policies: Sequence[Policy], study: Study) -> list[Policy]:
    place = {policy: i for i, policy in enumerate(study.ranked())}
    return sorted((policy for policy in policies if policy in place), key=place.__getitem__)


def _with_time_for_a_loop(request: TuningRequest) -> TuningRequest:
    return replace(request, budget=request.budget.less(loop_s(request.budget)))


def _nothing_feasible(study: Study, candidates: Candidates) -> Exception:
    """Why there is no decision: the user's own error where it is one, else the baseline's failure."""
    trial = study.trial_of(candidates.baseline)
    if trial is None:
        return NothingFeasibleError("the baseline could not be measured within the budget; give more with --budget")
    assert isinstance(trial.outcome, Failure)  # noqa: S101  # a measured baseline always gives a decision
    return error_of_baseline(candidates.baseline, trial.outcome)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps a second tuner out of the study's folder. Raises `StudyError` if there is one, or no folder can be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        lock.acquire(timeout=0)
    except Timeout:
        raise StudyError(
            f"another amptune is tuning in {folder}; wait for it, or name another folder with --study"
        ) from None
    except OSError as error:
        raise StudyError(f"the study's folder {folder} cannot be used: {error}") from error
    try:
        yield
    finally:
        lock.release()
