"""States of a run, as tests want them: what was measured, what compiles, and how much time is left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from measurements import took
from simulated.recorded import RecordedEvaluator

from amptune.measure.results.outcome import Failure, Measurement, Outcome
from amptune.measure.results.subject import Prepared
from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK, Policy
from amptune.search.gate.judgements import Judgements
from amptune.search.job import Answer, Job
from amptune.search.next_job import next_job
from amptune.search.plan.budget import Budget
from amptune.search.request import TuningRequest
from amptune.search.sampler.catalog import Catalog, History
from amptune.search.space.candidates import Wanted, candidates_for
from amptune.search.state import Graphs, Rounds, State
from amptune.search.table.objective import THROUGHPUT
from amptune.search.table.trial import Trial

__all__ = ["RUN", "job_after", "prepared", "state_of", "trial_of"]

RUN = "this run"


def prepared(**subject: Any) -> Prepared:
    """A small convolutional model on an H200; `subject` are facts about it."""
    found = RecordedEvaluator("resnet50").prepare(1.0)
    return replace(found, subject=replace(found.subject, **subject), start_s=5.0)


def trial_of(policy: Policy, ms: float | Failure, number: int = 0, run: str = RUN, **more: Any) -> Trial:
    outcome: Outcome = ms if isinstance(ms, Failure) else took(ms, **more)
    seconds = 2.0 + (outcome.startup_s if isinstance(outcome, Measurement) else 0.0)
    return Trial(number=number, policy=policy, outcome=outcome, seconds=seconds, run=run, moment_s=2.0 * number)


def state_of(
    measured: Mapping[Policy, float | Failure] | Iterable[Trial] = (),
    *,
    of: Prepared | None = None,
    left_s: float = 300.0,
    budget_s: float = 400.0,
    graphs_at_once: int = 1,
    trials: int | None = None,
    wanted: Mapping[str, Any] | None = None,
    **known: Any,
) -> State:
    """A state of a run with these trials, in ms or as they are; `known` are its other fields."""
    of = of or prepared()
    request = TuningRequest(
        source=Source(target="train.py"),
        wanted=Wanted(**{"baseline": STOCK, "pins": {}, **(wanted or {})}),
        budget=Budget(seconds=budget_s, trials=trials, started=0.0, clock=lambda: budget_s - left_s),
        folder=Path("nowhere"),
        study=Path("nowhere"),
        run=RUN,
    )
    candidates = candidates_for(of, request.wanted)
    made = (
        [trial_of(policy, ms, number) for number, (policy, ms) in enumerate(measured.items())]
        if isinstance(measured, Mapping)
        else list(measured)
    )
    catalog = Catalog(candidates.space, candidates.policy_of)
    first = State(
        request=request,
        prepared=of,
        candidates=candidates,
        history=History(catalog, tuple(made), THROUGHPUT, candidates.baseline),
        judgements=Judgements(candidates.baseline),
        graphs=Graphs(at_once=graphs_at_once),
        rounds=Rounds(start_s=of.start_s),
        built_s=10.0,
        spent_s=budget_s - left_s,
    )
    return first.but(**known)


def job_after(state: State) -> Job:
    """The next job, where the answer is not known yet."""
    job = next_job(state)
    assert not isinstance(job, Answer), job.because
    return job
