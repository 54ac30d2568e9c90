"""Tuning, as one pipeline: prepare, narrow the space, search, compare the finalists, decide."""

from __future__ import annotations

import importlib
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from amptune.errors import DeviceError, NothingFeasibleError, ObjectiveError, SpaceError, StudyError, TargetError
from amptune.measure.evaluator import Evaluator, WorkerEvaluator
from amptune.measure.results.outcome import Failure
from amptune.measure.results.subject import Prepared
from amptune.measure.workers.cpu_share import cores_of_this_process
from amptune.policy.artifact_file import kept_in
from amptune.policy.findings import Finding
from amptune.search.decide.decision import Decision
from amptune.search.events import JobStarted, Observer, WorkloadBuilt
from amptune.search.job import Job
from amptune.search.request import TuningRequest, hide_from_git, require_known
from amptune.search.space.candidates import candidates_for
from amptune.search.space.global_batch import GlobalBatch
from amptune.search.table.trial import error_of_baseline
from amptune.search.timeline import Timeline

if TYPE_CHECKING:
    from amptune.search.state import State

__all__ = ["TuningInterrupted", "lock_of", "locked", "prepared_for", "run_tuning", "tune_with"]

# So many processes build the workload beside the first, to compile the first graph: more make all of them slower.
GRAPHS_AHEAD = 1

INTERRUPTED = Finding(code="interrupted", message="the tuning was interrupted: this is the best so far")
NO_ENERGY = "the objective energy cannot be pursued here: this machine reports no energy"


class TuningInterrupted(KeyboardInterrupt):
    """The end of a tuning by Ctrl-C (or a signal, on the command line), or by an error, which is the cause.

    `decision` is the best so far, provisional; None if nothing is known. An error that leaves nothing is raised itself.
    """

    def __init__(self, decision: Decision | None) -> None:
        super().__init__("tuning was interrupted")
        self.decision = decision


def run_tuning(request: TuningRequest, observer: Observer, evaluator: Evaluator | None = None) -> Decision:
    """Tunes on `evaluator`, by default this machine's workers, and closes it.

    Raises an `AmptuneError`, or `TuningInterrupted` with the decision so far.
    """
    with locked(request.folder, request.device, request.ranks):
        evaluator = evaluator or _workers(request)
        try:
            decision = tune_with(evaluator, request, observer)
            _keep_findings(request, decision)
            return _with_artifacts(request, decision)
        except TuningInterrupted as interrupted:
            if interrupted.decision is not None:
                _keep_findings(request, interrupted.decision, INTERRUPTED)
                interrupted.decision = _with_artifacts(request, interrupted.decision)
            raise
        finally:
            evaluator.close()


def prepared_for(request: TuningRequest, evaluator: Evaluator | None = None) -> Prepared:
    """Returns what a tuning would begin with: the workload, built and looked at, on this machine."""
    require_known(request)
    evaluator = evaluator or replace(_workers(request), log=Path(os.devnull))
    try:
        return evaluator.prepare(request.budget.left_to_prepare_s)
    finally:
        evaluator.close()


def _workers(request: TuningRequest) -> WorkerEvaluator:
    """Returns workers on this machine, with the batch size that was asked for."""
    size = request.wanted.batch_size
    source = request.source if size is None or size == "auto" else replace(request.source, batch_size=size)
    log, memory_mib = request.folder / "workers.log", request.wanted.memory_mib
    return WorkerEvaluator(source, request.device, log, memory_mib, artifacts=request.artifacts, ranks=request.ranks)


def tune_with(evaluator: Evaluator, request: TuningRequest, observer: Observer) -> Decision:
    """Tunes on any evaluator: this machine, or a recording of one."""
    timeline = Timeline(request.budget, lambda job: observer(JobStarted(job=job)))
    opening = Job(kind="study", seconds=0.0, limit_s=max(0.0, request.budget.left_s))
    with timeline.noting(opening):
        require_known(request)
    # Optuna takes seconds to import on a slow host, while the workers build the workload.
    threading.Thread(target=importlib.import_module, args=["amptune.search.run"], daemon=True).start()
    prepared = _built(evaluator, request, timeline)
    from amptune.search.run import TuningRun
    from amptune.search.run_start import performer_of, state_of

    observer(WorkloadBuilt(prepared=prepared, left_s=request.budget.left_s))
    if request.objective.name == "energy" and prepared.hardware.gpu is None:
        raise ObjectiveError(f"{NO_ENERGY}: it is read from a GPU, and {prepared.hardware.name} is none")
    request = _accumulating(_saving_memory(request), prepared)
    candidates = candidates_for(prepared, request.wanted)
    with timeline.noting(opening):
        performer = performer_of(evaluator, request, prepared, candidates, observer)
        first = state_of(performer, request, prepared, candidates)
    run = TuningRun(first, performer, timeline, observer)
    try:
        run.find_answer()
        decision = run.decision()
    except KeyboardInterrupt:
        raise TuningInterrupted(run.decision(interrupted=True)) from None
    except Exception as error:
        evaluator.close()  # perhaps there are too few files or threads even to decide
        if (so_far := run.decision(interrupted=True)) is None:
            raise
        raise TuningInterrupted(so_far) from error
    if decision is None:
        raise _nothing_feasible(run.state)
    return decision


def _built(evaluator: Evaluator, request: TuningRequest, timeline: Timeline) -> Prepared:
    """Returns the workload, built; other processes build it too, to compile it."""
    if request.wanted.compile is not False:
        evaluator.build_ahead(GRAPHS_AHEAD)
    limit_s = request.budget.left_to_prepare_s
    with timeline.noting(Job(kind="build", seconds=limit_s, limit_s=limit_s)):
        return evaluator.prepare(limit_s)


def _saving_memory(request: TuningRequest) -> TuningRequest:
    """Returns the request whose candidates also save memory for time, if that is the objective."""
    return replace(request, wanted=replace(request.wanted, saves_memory=request.objective.name == "memory"))


def _accumulating(request: TuningRequest, prepared: Prepared) -> TuningRequest:
    """Returns the request with the global batch of a workload that accumulates, unless another was asked for."""
    subject, wanted = prepared.subject, request.wanted
    if subject.accumulate == 1 or wanted.global_batch is not None:
        return request
    samples = subject.batch_size * subject.accumulate * wanted.devices
    whole = GlobalBatch(samples=samples, devices=wanted.devices)
    return replace(request, wanted=replace(wanted, global_batch=whole))


def _with_artifacts(request: TuningRequest, decision: Decision) -> Decision:
    """Returns the decision with what was compiled for its winner, in this run or in one before."""
    kept = kept_in(request.artifacts, decision.winner)
    return replace(decision, artifacts=kept) if kept.is_file() else decision


def _keep_findings(request: TuningRequest, decision: Decision, *more: Finding) -> None:
    """Keeps the findings for `amptune report`; a storage that fails loses them."""
    from amptune.search.sampler.storage import keep_findings

    with suppress(StudyError):
        keep_findings(request.study, request.run, (*more, *decision.findings))


def _nothing_feasible(state: State) -> Exception:
    """Returns why there is no decision: the user's own error if there is one, else the baseline's failure."""
    trial = state.history.latest.get(state.baseline)
    if trial is None:
        return NothingFeasibleError("the baseline could not be measured within the budget; give more with --budget")
    if not isinstance(trial.outcome, Failure):
        return ObjectiveError(f"{NO_ENERGY}: none could be read while the baseline ran")
    return error_of_baseline(state.baseline, trial.outcome)


def lock_of(device: str | None) -> str:
    """Returns the name of a device's lock: the GPU's among all of the machine, or the first CPU core of this process.

    So several tuners share one CPU only if they were given cores of their own.
    """
    kind, _, index = (device or "cuda").partition(":")
    if kind == "cpu":
        return f".lock-cpu-{min(cores_of_this_process())}"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    place = int(index) if index.isdecimal() else 0
    own = visible[place] if place < len(visible) and visible[place] else place
    return f".lock-{kind}-{own}"


@contextmanager
def locked(folder: Path, device: str | None, ranks: int = 1) -> Iterator[None]:
    """Keeps others that use this device, or one of the first `ranks` GPUs, out of the study's folder meanwhile.

    Raises `StudyError` if there is one, or if the folder cannot be made. A folder made here is removed again if the
    device, space or target that was asked for does not exist, unless another device is used there.
    """
    is_new, is_for_nothing = not folder.exists(), False
    names = {lock_of(device if ranks == 1 or device == "cpu" else f"cuda:{rank}") for rank in range(ranks)}
    with ExitStack() as locks:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name in sorted(names):
                locks.enter_context(FileLock(folder / name).acquire(timeout=0))
        except Timeout:
            raise StudyError(
                f"another amptune is tuning in {folder} on this device; wait for it (two on one device disturb each "
                "other), or choose another with --device"
            ) from None
        except OSError as error:
            raise StudyError(f"the study's folder {folder} cannot be used: {error}") from error
        try:
            yield
        except (DeviceError, SpaceError, TargetError):
            is_for_nothing = is_new and len(list(folder.glob(".lock*"))) == len(names)
            raise
        finally:
            locks.close()
            if is_for_nothing:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                hide_from_git(folder)
