"""The decision of a run, from all that is known: the verdict's, and what is worth knowing beside it. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.decide.conclusion import decide, devices_findings
from amptune.search.decide.decision import Decision
from amptune.search.durations import Durations
from amptune.search.measuring import loader_findings
from amptune.search.state import State
from amptune.search.table.objective import NEGLIGIBLE
from amptune.search.table.verdict import Verdict

__all__ = ["decision_of"]


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
    before = (*state.prepared.noticed, *_sizes_found(state), *noticed, *loader_findings(state.rounds.loader_failure))
    decision = decide(
        state.prepared,
        state.history.trials,
        state.table,
        verdict,
        state.judgements,
        noticed_before=before,
        amp_recipes=state.candidates.amp_recipes,
        seconds=state.spent_s,
        interrupted=interrupted,
        timeline=timeline,
    )
    return decision.with_findings(_noticed_after(state, decision.policy, verdict))


def _sizes_found(state: State) -> Iterator[Finding]:
    yield from () if state.sizes is None else state.sizes.findings


def _noticed_after(state: State, winner: Policy, verdict: Verdict) -> Iterator[Finding]:
    wanted, workers = state.request.wanted, state.request.workers
    if len(state.history.trials) == 1:
        yield _needs(state)
    if wanted.global_batch is not None:
        yield wanted.global_batch.kept_by(winner)
    yield from devices_findings(wanted.devices, state.prepared)
    if winner.fused_optimizer and not state.prepared.subject.fusable:
        message = "the optimizer has no fused kernel here or is fused as it is: fused_optimizer changes nothing"
        yield Finding(code="fused-optimizer-without-effect", message=message)
    yield from _freed_memory(state, verdict)
    if workers > 1 and state.prepared.hardware.gpu is None:
        message = f"{workers} workers shared this CPU, each with its part of the cores: with all, steps are faster"
        yield Finding(code="shared-cpu", message=message, figures={"workers": workers})
    modes = state.candidates.space.choices("compile")
    if set(modes) - {"off"} and all(trial.policy.compile == "off" for trial in state.history.trials):
        spent = "there was no time for it; give more with --budget"
        if state.request.budget.trials is not None:
            spent = "the budget, or the trials allowed, were spent before; give more with --budget or --trials"
        yield Finding(code="compile-not-tried", message=f"torch.compile was not tried: {spent}")


def _needs(state: State) -> Finding:
    """Returns how long a first comparison takes here, where there was no time for one."""
    at = Durations(state)
    seconds = state.built_s + 2 * at.typical_s + at.round_s((state.baseline,), fresh=True) * 2
    needed = 10 * -(-int(seconds) // 10) + 10
    message = f"a first comparison takes about {needed} s on this machine: give it with --budget {needed}s"
    return Finding(code="needs-more-time", message=message, figures={"budget_s": needed})


def _freed_memory(state: State, verdict: Verdict) -> Iterator[Finding]:
    """Yields how much memory the policy frees, if a larger batch could use it."""
    own, before = verdict.winner, verdict.baseline
    own_mib, before_mib = own.peak_memory_mib, before.peak_memory_mib
    is_alike = own.policy.batch_size == before.policy.batch_size and not verdict.keeps_the_baseline
    if not (state.request.leaves_the_batch and is_alike and own_mib and before_mib):
        return
    if own_mib < (1 - NEGLIGIBLE) * before_mib:
        message = (
            f"the policy frees {before_mib - own_mib:,.0f} of {before_mib:,.0f} MiB: --batch-size auto finds out "
            "if a larger batch is faster (what training learns from it is another question; --global-batch N "
            "keeps it as it is)"
        )
        figures = {"freed_mib": before_mib - own_mib, "peak_memory_mib": own_mib}
        yield Finding(code="memory-freed", message=message, figures=figures)
