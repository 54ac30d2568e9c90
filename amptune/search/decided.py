"""The decision of a run, from all that is known: the verdict's, and what is worth knowing beside it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from amptune.hardware.versions import versions_of
from amptune.measure.results.subject import Prepared
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.decide.caveats import devices_findings
from amptune.search.decide.conclusion import Conclusion
from amptune.search.decide.decision import Decision, decide
from amptune.search.decide.evidence import labels_of
from amptune.search.decide.study_report import tuning_command
from amptune.search.durations import Durations
from amptune.search.measuring import loader_findings
from amptune.search.request import TuningRequest
from amptune.search.sampler.records import TuningRecord, without_password
from amptune.search.space.islands import islands_finding
from amptune.search.state import State
from amptune.search.table.contenders import PROCESSES
from amptune.search.table.verdict import Verdict

__all__ = ["decision_of", "tuning_of"]


def decision_of(
    state: State,
    noticed: Sequence[Finding] = (),
    *,
    interrupted: bool = False,
    timeline: Sequence[Mapping[str, Any]] = (),
) -> Decision | None:
    """Returns the decision as things stand; None if the baseline was not measured, or failed."""
    verdict = state.verdict
    if verdict is None:
        return None
    found = Conclusion(
        verdict=verdict,
        trials=tuple(state.history.trials),
        judgements=state.judgements,
        recipes=state.candidates.amp_recipes,
    )
    sizes = () if state.sizes is None else state.sizes.findings
    return decide(
        found,
        state.prepared,
        state.table,
        findings=(*sizes, *noticed, *loader_findings(state.rounds.loader_failure), *_noticed(state, verdict)),
        seconds=state.spent_s,
        interrupted=interrupted,
        timeline=timeline,
        again=_again(state),
        loaders=state.loaders or (),
    )


def _noticed(state: State, verdict: Verdict) -> Iterator[Finding]:
    wanted, workers, winner = state.request.wanted, state.request.workers, verdict.winner.policy
    if wanted.global_batch is not None:
        yield wanted.global_batch.kept_by(winner)
    yield from devices_findings(wanted.devices, state.prepared)
    islands = (islands_finding(sensed) for sensed in state.sensed.values())
    yield from [found for found in islands if found is not None][:1]
    if winner.fused_optimizer and not state.prepared.subject.fusable:
        message = "the optimizer has no fused kernel here or is fused as it is: fused_optimizer changes nothing"
        yield Finding(code="fused-optimizer-without-effect", message=message)
    if workers > 1 and state.prepared.hardware.gpu is None:
        message = f"{workers} workers shared this CPU, each with its part of the cores: with all, steps are faster"
        yield Finding(code="shared-cpu", message=message, figures={"workers": workers})
    if state.is_for_loaders:
        message = "other settings of the loader were not tried, as there was no time: the same command again tries them"
        yield Finding(code="loader-not-tried", message=message)
    modes = state.candidates.space.choices("compile")
    if set(modes) - {"off"} and all(trial.policy.compile == "off" for trial in state.history.trials):
        spent = "there was no time for it; give more with --budget"
        if state.request.budget.trials is not None:
            spent = "the budget, or the trials allowed, were spent before; give more with --budget or --trials"
        yield Finding(code="compile-not-tried", message=f"torch.compile was not tried: {spent}")


def _again(state: State) -> str:
    """Returns the command with a budget that is enough for a first comparison on this machine."""
    at = Durations(state)
    seconds = state.built_s + 2 * at.typical_s + PROCESSES * at.round_s((state.baseline,) * 2, fresh=True)
    needed_s = 10 * math.ceil(seconds / 10) + 10
    last, where = tuning_of(state.request, state.prepared, state.baseline), without_password(str(state.request.study))
    return tuning_command(last, where=where, budget_s=needed_s)


def tuning_of(request: TuningRequest, prepared: Prepared, baseline: Policy) -> TuningRecord:
    """Returns what a study keeps of a run before its first job."""
    subject = prepared.subject
    return TuningRecord(
        run=request.run,
        began=request.began,
        workload=subject.name,
        target=request.source.target,
        folder=str(request.folder.absolute()),
        hardware=prepared.hardware.name,
        batch_size=subject.batch_size,
        baseline=baseline,
        objective=request.objective,
        options=request.options,
        device=prepared.hardware.device,
        arguments=request.source.arguments,
        software=tuple(versions_of(prepared.hardware).items()),
        memory_mib=prepared.memory_mib,
        valid_for=tuple(labels_of(prepared).items()),
    )
