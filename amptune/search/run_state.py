"""The state of a tuning run: all that is known at one moment, as a value from which the decision follows. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from amptune.measure.results.subject import Prepared
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.decide.conclusion import decide, devices_findings
from amptune.search.decide.decision import Decision
from amptune.search.gate.judgement import Judgement
from amptune.search.gate.judgements import Judgements
from amptune.search.request import TuningRequest
from amptune.search.sampler.catalog import History
from amptune.search.space.candidates import Candidates
from amptune.search.table.effects import machine_of
from amptune.search.table.late_start import LateStart, late_starts
from amptune.search.table.objective import NEGLIGIBLE
from amptune.search.table.row import Row
from amptune.search.table.verdict import Verdict, verdict_of

__all__ = ["RunState"]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """All that is known of a run: what is asked of it, the trials, the timings of `rows` besides, the judgements."""

    request: TuningRequest
    prepared: Prepared
    candidates: Candidates
    judgements: Judgements[Judgement]
    history: History
    rows: Sequence[Row]

    @cached_property
    def table(self) -> list[Row]:
        """Every timing of the study, of this run and of those before."""
        return [*(trial.row for trial in self.history.trials), *self.rows]

    @property
    def basis(self) -> tuple[Any, ...]:
        """A key of the verdict: it is the same as long as this is equal."""
        count = len(self.history.trials) + len(self.rows)
        return count, self.judgements, self.candidates

    def verdict(self) -> Verdict | None:
        """Returns the verdict on all rows; None if the baseline was not measured, or failed."""
        machine = machine_of(self.prepared.hardware.device)
        return verdict_of(self.table, self.candidates.baseline, machine, self.request.objective, self.bar)

    @cached_property
    def late(self) -> dict[Policy, LateStart]:
        """The policies that start too late for as many steps as will be trained."""
        return late_starts(self.table, self.candidates.baseline, self.request.objective.steps)

    def bar(self, policy: Policy) -> str | None:
        """Returns why a policy cannot win; None if it can."""
        is_outside = policy not in self.history.catalog.points and not self.candidates.allows(policy)
        late = self.late.get(policy)
        return self.judgements.bar(policy, is_outside=is_outside) or (str(late) if late else None)

    def better_recipe(self, verdict: Verdict) -> list[Policy]:
        """Returns the faster AMP recipe, which everybody would try first."""
        recipes = (one for one in verdict.contenders if one.policy in self.candidates.amp_recipes and not one.failure)
        return [one.policy for one in recipes][:1]

    def decision(
        self,
        verdict: Verdict,
        noticed_before: Sequence[Finding],
        *,
        seconds: float,
        interrupted: bool,
        timeline: Sequence[Mapping[str, Any]],
    ) -> Decision:
        """Returns the decision that the verdict leads to."""
        decision = decide(
            self.prepared,
            self.history.trials,
            self.table,
            verdict,
            self.judgements,
            noticed_before=(*self.prepared.noticed, *noticed_before),
            amp_recipes=self.candidates.amp_recipes,
            seconds=seconds,
            interrupted=interrupted,
            timeline=timeline,
        )
        return decision.with_findings(self._noticed_after(decision.policy, verdict))

    def _noticed_after(self, winner: Policy, verdict: Verdict) -> Iterator[Finding]:
        whole = self.request.wanted.global_batch
        if whole is not None:
            yield whole.kept_by(winner)
        yield from devices_findings(self.request.wanted.devices, self.prepared)
        if winner.fused_optimizer and not self.prepared.subject.fusable:
            message = "the optimizer has no fused kernel here or is fused as it is: fused_optimizer changes nothing"
            yield Finding(code="fused-optimizer-without-effect", message=message)
        yield from self._freed_memory(verdict)
        yield from self._too_late()
        workers = self.request.workers
        if workers > 1 and self.prepared.hardware.gpu is None:
            message = f"{workers} workers shared this CPU, each with its part of the cores: with all, steps are faster"
            yield Finding(code="shared-cpu", message=message, figures={"workers": workers})
        modes = self.candidates.space.choices("compile")
        if set(modes) - {"off"} and all(trial.policy.compile == "off" for trial in self.history.trials):
            spent = "there was no time for it; give more with --budget"
            if self.request.budget.trials is not None:
                spent = "the budget, or the trials allowed, were spent before; give more with --budget or --trials"
            yield Finding(code="compile-not-tried", message=f"torch.compile was not tried: {spent}")

    def _freed_memory(self, verdict: Verdict) -> Iterator[Finding]:
        """Yields how much memory the policy frees, if a larger batch could use it."""
        own, before = verdict.winner, verdict.baseline
        own_mib, before_mib = own.peak_memory_mib, before.peak_memory_mib
        is_alike = own.policy.batch_size == before.policy.batch_size and not verdict.keeps_the_baseline
        if not (self.request.leaves_the_batch and is_alike and own_mib and before_mib):
            return
        if own_mib < (1 - NEGLIGIBLE) * before_mib:
            message = (
                f"the policy frees {before_mib - own_mib:,.0f} of {before_mib:,.0f} MiB: --batch-size auto finds out "
                "if a larger batch is faster (what training learns from it is another question; --global-batch N "
                "keeps it as it is)"
            )
            figures = {"freed_mib": before_mib - own_mib, "peak_memory_mib": own_mib}
            yield Finding(code="memory-freed", message=message, figures=figures)

    def _too_late(self) -> Iterator[Finding]:
        """Yields that the policy with the fastest steps starts too late."""
        able = (one for one in self.late if not self.judgements.bars(one))
        fastest = max(able, key=lambda policy: self.late[policy].speedup, default=None)
        if fastest is not None:
            late = self.late[fastest]
            message = f"steps under {fastest} are {late.speedup:.2f} times as fast, but {late}"
            yield Finding(code="starts-late", message=message, figures={"start_s": late.start_s, "steps": late.steps})
