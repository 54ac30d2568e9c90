"""The state of a tuning run: everything known at one moment, as a value from which the next job follows. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from amptune.measure.bench.readings import HOST_LOAD
from amptune.measure.results.half_effects import Sensitivity
from amptune.measure.results.loop_timing import LoaderTrial
from amptune.measure.results.outcome import Failure, Measurement
from amptune.measure.results.subject import Prepared
from amptune.policy.settings import Fp32Rule, Policy
from amptune.search.batch_size.batch_sizes import NO_SIZES, BatchSizes
from amptune.search.gate.judgements import Judgements
from amptune.search.request import TuningRequest
from amptune.search.sampler.catalog import History
from amptune.search.space.candidates import Candidates
from amptune.search.table.effects import machine_of
from amptune.search.table.row import Row
from amptune.search.table.trial import Trial
from amptune.search.table.verdict import Verdict, verdict_of

__all__ = ["Graphs", "Rounds", "State"]

# Blocks that other programs disturb are thought to differ by so much.
BUSY_DEVIATION = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Graphs:
    """The graphs that compile in the background: `begun` when, in seconds spent, and `ready` to be measured.

    So many compile `at_once` on this machine; none if that would slow down what is measured. A graph that is ready has
    the seconds that it took, or its failure.
    """

    at_once: int = 0
    begun: Mapping[Policy, float] = field(default_factory=dict)
    ready: Mapping[Policy, float | Failure] = field(default_factory=dict)

    @property
    def known(self) -> set[Policy]:
        return {*self.begun, *self.ready}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounds:
    """The rounds of the comparison so far: how many in fresh processes, and what they cost.

    `running` names the launch of each policy that a process can measure without being started; starting one takes
    `start_s`, and a turn of a policy `costs_s`. `is_over` if the budget ended one.
    """

    count: int = 0
    running: Mapping[Policy, str] = field(default_factory=dict)
    start_s: float = 0.0
    costs_s: Mapping[Policy, float] = field(default_factory=dict)
    loader_failure: Failure | None = None
    is_over: bool = False


@dataclass(frozen=True, kw_only=True)
class State:
    """All that is known of a run.

    `sensed` has the times of modules by memory format and dtypes, `sizes` the batch sizes that were found, None if that
    is to be done. `safeguards` are the rules that each precision needs, None if none were found to help; `uncured` are
    the rejected precisions for which none were looked for. Policies that were `cut` had no time, those `elsewhere` are
    measured by other workers. `loaders` has the settings of the loader that were tried, None before that.
    `free_sampler` is False once the user's sampler has nothing new to propose. `spent_s` and `built_s` count from the
    start of the run.
    """

    request: TuningRequest
    prepared: Prepared
    candidates: Candidates
    history: History
    rows: tuple[Row, ...] = ()
    judgements: Judgements
    judged_s: float = 0.0
    sensed: Mapping[str, Sensitivity] = field(default_factory=dict)
    sizes: BatchSizes | None = NO_SIZES
    safeguards: Mapping[str, tuple[Fp32Rule, ...] | None] = field(default_factory=dict)
    uncured: frozenset[str] = frozenset()
    graphs: Graphs = Graphs()
    rounds: Rounds = Rounds()
    loaders: tuple[LoaderTrial, ...] | None = None
    cut: frozenset[Policy] = frozenset()
    elsewhere: frozenset[Policy] = frozenset()
    free_sampler: bool = True
    built_s: float = 0.0
    spent_s: float = 0.0

    def but(self, **changes: Any) -> State:
        """Returns this state with changes; the verdict stays if nothing that it follows from has changed."""
        changed = replace(self, **changes)
        if "verdict" in self.__dict__ and changed._basis == self._basis:
            changed.__dict__["verdict"] = self.verdict
        return changed

    @property
    def _basis(self) -> tuple[Any, ...]:
        return len(self.history.trials), len(self.rows), self.judgements, self.candidates

    @property
    def left_s(self) -> float:
        return self.request.budget.seconds - self.spent_s

    @cached_property
    def trials_made(self) -> int:
        """The number of trials of this run."""
        return sum(trial.run == self.request.run for trial in self.history.trials)

    @property
    def trials_left(self) -> float:
        return self.request.budget.trials_left(self.trials_made)

    @property
    def baseline(self) -> Policy:
        return self.candidates.baseline

    @property
    def table(self) -> list[Row]:
        """Every timing of the study, of this run and of those before."""
        return [*(trial.row for trial in self.history.trials), *self.rows]

    @cached_property
    def own_baseline(self) -> Row | None:
        """The first timing of the baseline in this run: no two runs are compared with each other."""
        own = (row for row in self.table if row.run == self.request.run and row.policy == self.baseline)
        return next(own, None)

    @property
    def running(self) -> Mapping[Policy, str]:
        """The launch of each policy that a process can measure without being started: the trials', before any round."""
        if self.rounds.count:
            return self.rounds.running
        own = (trial.row for trial in self.history.trials if trial.run == self.request.run)
        return {row.policy: row.launch for row in own}

    @cached_property
    def verdict(self) -> Verdict | None:
        """The verdict on all rows; None if the baseline was not measured, or fails now, whatever former runs had."""
        trial = self.history.latest.get(self.baseline)
        if trial is not None and isinstance(trial.outcome, Failure):
            return None
        machine = machine_of(self.prepared.hardware.device)
        return verdict_of(self.table, self.baseline, machine, self.request.objective, self.bar)

    @property
    def is_for_loaders(self) -> bool:
        """True if settings of the loader are to be tried, since the user's loop waits for it."""
        waits = self.loaders is None and self.prepared.has_data_loader and self.prepared.devices == 1
        return waits and self.verdict is not None and self.verdict.waits_for_data

    @cached_property
    def block_deviation(self) -> float:
        """The standard deviation, on the logarithm, of blocks of one policy in this run.

        Before any policy was measured twice, a block in which other programs kept the host busy counts as
        `BUSY_DEVIATION`.
        """
        own = [row for row in self.table if row.run == self.request.run]
        blocks = [(row.policy, row.outcome) for row in own if isinstance(row.outcome, Measurement)]
        logs: dict[Policy, list[float]] = {}
        for policy, block in blocks:
            if not block.abandoned:
                logs.setdefault(policy, []).append(math.log(block.mean_ms))
        repeated = [some for some in logs.values() if len(some) > 1]
        if not repeated:
            busy = sum(HOST_LOAD in block.contaminated_by for _, block in blocks)
            return BUSY_DEVIATION * busy / max(1, len(blocks))
        squares = sum(statistics.pvariance(some) * len(some) for some in repeated)
        return math.sqrt(squares / sum(len(some) - 1 for some in repeated))

    def bar(self, policy: Policy) -> str | None:
        """Returns why a policy cannot win; None if it can."""
        is_outside = policy not in self.history.catalog.points and not self.candidates.allows(policy)
        return self.judgements.bar(policy, is_outside=is_outside)

    @cached_property
    def scores(self) -> dict[Policy, float]:
        """The score of the baseline and of each policy that may win, in its last trial."""
        yardstick = self.history.yardstick
        able = [one for one in self.history.latest.values() if yardstick.allows(one.outcome)]
        scored = {one.policy: yardstick.score(one.outcome) or 0.0 for one in able}
        may_win = {policy for policy in scored if policy == self.baseline or self.bar(policy) is None}
        return {policy: score for policy, score in scored.items() if score > 0 and policy in may_win}

    @cached_property
    def leader(self) -> Policy:
        """The policy with the best trial of those that may win; the baseline if there is none."""
        return max(self.scores, key=self.scores.__getitem__, default=self.baseline)

    @property
    def best_trial(self) -> Trial | None:
        return self.history.latest.get(self.leader)

    def is_free(self, policy: Policy) -> bool:
        """Returns True if nobody has measured a policy, or is about to, and it may fit into memory and time."""
        begun = self.graphs.known | self.elsewhere | self.cut
        return policy not in self.history.latest and policy not in begun and not self.is_too_large(policy)

    def is_too_large(self, policy: Policy) -> bool:
        index = self.history.catalog.index.get(policy)
        return index is not None and index in self.history.too_large

    def step_ms(self, policy: Policy) -> float | None:
        """Returns the mean step of a policy's last trial; None if there is none."""
        trial = self.history.latest.get(policy)
        return trial.outcome.mean_ms if trial is not None and isinstance(trial.outcome, Measurement) else None
