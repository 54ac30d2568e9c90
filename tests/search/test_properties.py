"""What holds of every tuning: machines, budgets, objectives and wishes are drawn."""

from __future__ import annotations

import math
import os
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from simulated.clock import SimulatedClock
from simulated.landscape import WORKLOADS, SyntheticEvaluator, Trouble, landscape_of

from amptune.errors import NothingFeasibleError
from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome
from amptune.measure.results.training_runs import Parity
from amptune.measure.workers.source import Source
from amptune.policy.setting_effects import numerics_of
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.decide.decision import Decision
from amptune.search.decide.study_report import study_report_of
from amptune.search.events import Event, TrialEnded
from amptune.search.pipeline import TuningInterrupted, tune_with
from amptune.search.plan.budget import Budget
from amptune.search.request import TuningRequest
from amptune.search.sampler.storage import recall
from amptune.search.space.candidates import Wanted
from amptune.search.space.global_batch import GlobalBatch
from amptune.search.table.objective import objective_of
from amptune.search.table.verdict import Verdict

# A tuning takes a second: few in `make test`, and others, more of them, with HYPOTHESIS_PROFILE=new.
TIMES = 8 if os.environ.get("HYPOTHESIS_PROFILE") == "new" else 1
UNTIMED: Any = {"deadline": None, "suppress_health_check": list(HealthCheck)}
FEW, SOME = (settings(max_examples=TIMES * count, **UNTIMED) for count in (6, 25))

# --- a tuning ----------------------------------------------------------------------------------------------------

Judges = Callable[[Policy], bool]
UNSOUND: Mapping[str, Judges] = {
    "nothing": lambda _: False,
    "fp16": lambda policy: policy.autocast == "fp16",
    "half precision": lambda policy: policy.autocast != "off",
    "channels_last": lambda policy: policy.memory_format == "channels_last" and policy.autocast != "off",
    "graphs": lambda policy: policy.compile != "off",
}
TROUBLES = (
    Trouble(),
    Trouble(oom=0.3),
    Trouble(graphs_at_once=0),
    Trouble(graphs_at_once=4, compile_s=40.0),
    Trouble(throttlings=3.0, busy=0.5),
    Trouble(fp16_breaks=True),
)
WISHES: Sequence[Mapping[str, Any]] = (
    {},
    {"compile": False},
    {"pins": {"autocast": "bf16"}},
    {"pins": {"autocast": "off", "compile": "default"}},
    {"baseline": amp_recipe("bf16")},
    {"baseline": Policy(compile="default")},
    {"batch_size": "auto", "pins": {"fp32_exclusions": "0", "cudnn_benchmark": "false", "cuda_graphs": "false"}},
    {"times_own": 4},
)


@dataclass(frozen=True)
class Question:
    """A question to the machine, when it was asked and what it gave."""

    what: str
    policy: Policy
    began_s: float
    answer: Outcome | Parity


class Machine(SyntheticEvaluator):
    """Notes what it is asked. Some policies crash whenever they are measured, and some train worse than FP32."""

    def __init__(self, workload: str, seed: int, trouble: Trouble, unsound: Judges, crashing: float) -> None:
        super().__init__(landscape_of(workload), SimulatedClock(), trouble, seed)
        self.unsound, self.crashing = unsound, crashing
        self.questions: list[Question] = []
        self.interrupted_after = math.inf
        self.may_end_s = 0.0

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        began_s = self._begins(effort.time_limit_s)
        outcome = super().measure(policy, effort)
        if random.Random(f"{self._seed} {policy}").random() < self.crashing and policy != STOCK:
            outcome = Failure(kind="crash", message="the worker died")
        self.questions.append(Question("measure", policy, began_s, outcome))
        return outcome

    def measure_alone(self, policy: Policy, effort: Effort) -> Outcome:
        """A probe of the memory that a batch size takes."""
        return super().measure(policy, effort)

    def judge(self, policy: Policy, fp32: Policy, seconds: float, limit_s: float) -> Parity:
        began_s = self._begins(limit_s)
        parity = super().judge(policy, fp32, seconds, limit_s)
        if self.unsound(policy):
            parity = Parity(failure=Failure(kind="nonfinite", message="the loss is nan"))
        self.questions.append(Question("judge", policy, began_s, parity))
        return parity

    def is_sound(self, policy: Policy) -> bool:
        return super().is_sound(policy) and not self.unsound(policy)

    def _begins(self, limit_s: float) -> float:
        self.may_end_s = max(self.may_end_s, self.clock() + limit_s)
        if len(self.questions) >= self.interrupted_after:
            raise KeyboardInterrupt
        return self.clock()

    @property
    def measured(self) -> list[Question]:
        return [question for question in self.questions if question.what == "measure"]


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A tuning to do, and the machine to do it on."""

    workload: str
    seed: int
    trouble: Trouble = field(default_factory=Trouble)
    unsound: str = "nothing"
    crashing: float = 0.0
    budget_s: float = 60.0
    trials: int | None = None
    objective: str = "throughput"
    wishes: Mapping[str, Any] = field(default_factory=dict)

    def machine(self) -> Machine:
        return Machine(self.workload, self.seed, self.trouble, UNSOUND[self.unsound], self.crashing)

    def request(self, folder: Path, clock: SimulatedClock) -> TuningRequest:
        wishes = {"baseline": STOCK, "pins": {}, **self.wishes}
        if times := wishes.pop("times_own", None):
            wishes["global_batch"] = GlobalBatch(samples=times * landscape_of(self.workload).own_batch_size)
        return TuningRequest(
            source=Source(target="simulated"),
            wanted=Wanted(**wishes),
            budget=Budget(seconds=self.budget_s, trials=self.trials, started=clock(), clock=clock),
            folder=folder,
            study=folder,
            seed=self.seed,
            objective=objective_of(self.objective),
        )


TUNINGS = st.builds(
    Tuning,
    workload=st.sampled_from(WORKLOADS),
    seed=st.integers(0, 10**6),
    trouble=st.sampled_from(TROUBLES),
    unsound=st.sampled_from(sorted(UNSOUND)),
    crashing=st.sampled_from([0.0, 0.2, 1.0]),
    budget_s=st.sampled_from([15.0, 40.0, 90.0]),
    trials=st.sampled_from([None, None, 3, 12]),
    objective=st.sampled_from(["throughput", "memory", "energy"]),
    wishes=st.sampled_from(WISHES),
)


@dataclass
class Done:
    """A tuning that was done; without a decision if the baseline was not measured."""

    tuning: Tuning
    machine: Machine
    folder: Path
    decision: Decision | None = None
    interrupted: bool = False
    events: list[Event] = field(default_factory=list)

    @property
    def codes(self) -> set[str]:
        return set() if self.decision is None else {finding.code for finding in self.decision.findings}

    @property
    def tried(self) -> list[Policy]:
        """The policies of this run's trials."""
        return [event.trial.policy for event in self.events if isinstance(event, TrialEnded)]


def done(tuning: Tuning, folder: Path, interrupted_after: float = math.inf) -> Done:
    machine = tuning.machine()
    machine.interrupted_after = interrupted_after
    ended = Done(tuning, machine, folder)
    try:
        ended.decision = tune_with(machine, tuning.request(folder, machine.clock), ended.events.append)
    except TuningInterrupted as interrupted:
        ended.decision, ended.interrupted = interrupted.decision, True
    except NothingFeasibleError:
        pass
    return ended


@FEW
@given(tuning=TUNINGS)
def test_every_tuning_keeps_what_is_promised(tuning: Tuning) -> None:
    """One test, for a tuning takes a second."""
    with tempfile.TemporaryDirectory() as folder:
        ended = done(tuning, Path(folder))
        the_baseline_is_measured_first_and_an_answer_needs_no_more(ended)
        nothing_is_begun_when_the_budget_is_spent(ended)
        no_policy_is_tried_twice_nor_one_that_failed_compared(ended)
        wishes_bind_all_but_what_is_known_to_be_good(ended)
        if ended.decision is not None:
            the_winner_ran_and_is_judged_or_that_is_said(ended, ended.decision)
            the_file_says_what_the_verdict_says(ended.decision)
            the_stored_study_gives_the_same_answer(ended, ended.decision)


def the_baseline_is_measured_first_and_an_answer_needs_no_more(ended: Done) -> None:
    first, baseline = ended.machine.measured[0], ended.tuning.wishes.get("baseline", STOCK)
    assert replace(first.policy, batch_size=None, accumulate=1) == baseline
    ran = any(isinstance(one.answer, Measurement) for one in ended.machine.measured if one.policy == first.policy)
    assert (ended.decision is not None) == ran
    if ended.decision is not None and ended.tuning.crashing == 1.0 and baseline == STOCK:
        assert ended.decision.verdict.keeps_the_baseline, "all else crashes"


def nothing_is_begun_when_the_budget_is_spent(ended: Done) -> None:
    """But for the baseline; and a winner is judged a little later."""
    late = [one for one in ended.machine.questions if one.began_s >= ended.tuning.budget_s]
    assert {one.policy for one in late if one.what == "measure"} <= {ended.machine.measured[0].policy}
    assert all(one.began_s < ended.tuning.budget_s + 5 for one in late)
    policies = {one.policy for one in ended.machine.measured}  # the baseline alone may be tried again
    assert ended.machine.may_end_s <= ended.tuning.budget_s + 10.1 or len(policies) == 1
    if ended.tuning.trials is not None:
        assert len(ended.tried) <= ended.tuning.trials


def no_policy_is_tried_twice_nor_one_that_failed_compared(ended: Done) -> None:
    assert len(set(ended.tried)) == len(ended.tried)
    asked = [one.policy for one in ended.machine.measured]
    for one in ended.machine.measured:
        if isinstance(one.answer, Failure) and one.policy != asked[0]:
            accident = one.answer.kind in ("crash", "timeout")
            assert asked.count(one.policy) <= (2 if accident else 1), str(one)


def wishes_bind_all_but_what_is_known_to_be_good(ended: Done) -> None:
    wishes, policies = ended.tuning.wishes, [one.policy for one in ended.machine.measured]
    if wishes.get("compile") is False:
        assert {policy.compile for policy in policies} == {"off"}
    if "times_own" in wishes:
        whole = wishes["times_own"] * ended.machine.landscape.own_batch_size
        own = ended.machine.landscape.own_batch_size
        assert {(policy.batch_size or own) * policy.accumulate for policy in policies} == {whole}
    if ended.decision is not None and not ended.decision.verdict.keeps_the_baseline:
        pins = wishes.get("pins", {})
        chosen = {name: getattr(ended.decision.winner, name) for name in pins if name in ("autocast", "compile")}
        assert chosen == {name: pins[name] for name in chosen}


def the_winner_ran_and_is_judged_or_that_is_said(ended: Done, decision: Decision) -> None:
    winner = decision.winner
    answers = [one.answer for one in ended.machine.measured if one.policy == winner]
    assert any(isinstance(answer, Measurement) for answer in answers)
    assert "oom" not in [answer.kind for answer in answers if isinstance(answer, Failure)]
    if decision.verdict.keeps_the_baseline:
        return
    if not ended.machine.is_sound(winner):
        assert ended.codes & {"not-judged", "graph-not-judged"}
    judged = {numerics_of(one.policy) for one in ended.machine.questions if one.what == "judge"}
    if winner.autocast != "off" and "not-judged" not in ended.codes:
        own = numerics_of(winner), numerics_of(replace(winner, compile="off"))
        baseline = numerics_of(decision.baseline.policy)
        assert judged & {*own} or baseline in own
    assert decision.provisional == (decision.verdict.confidence == "likely" or "not-judged" in ended.codes)


def the_file_says_what_the_verdict_says(decision: Decision) -> None:
    verdict, evidence = decision.verdict, decision.policy_file.evidence
    assert evidence["confidence"] == verdict.confidence
    assert evidence.get("provisional", False) is decision.provisional
    assert evidence["speedup"] == pytest.approx(verdict.speedup.value, rel=1e-3)
    assert evidence.get("gain", verdict.gain.value) == pytest.approx(verdict.gain.value, rel=1e-3)
    assert evidence["trials"] == len(decision.trials)
    for contender, figures in zip(decision.finalists, evidence["finalists"], strict=True):
        assert figures.get("lost", "") == contender.lost or contender.failure is not None
    assert [finding["code"] for finding in evidence["findings"]] == [finding.code for finding in decision.findings]


def the_stored_study_gives_the_same_answer(ended: Done, decision: Decision) -> None:
    record = recall(ended.folder)
    assert told(study_report_of(record, decision.objective).verdict) == told(decision.verdict)
    measured = [one.policy for one in ended.machine.measured if isinstance(one.answer, Measurement)]
    kept = [one.policy for one in record.table if isinstance(one.outcome, Measurement)]
    assert set(kept) == set(measured)
    assert decision.baseline.rows == kept.count(decision.baseline.policy)


def told(verdict: Verdict) -> dict[str, Any]:
    """What a verdict says, its figures to five digits: a stored moment is rounded to a millisecond."""
    figures = {one.policy: (one.lost, one.rows, float(f"{one.speedup:.5g}")) for one in verdict.contenders}
    ratios = [float(f"{x:.5g}") for one in (verdict.gain, verdict.speedup) for x in (one.value, one.low, one.high)]
    codes = [finding.code for finding in verdict.findings]  # of equal rivals the words may name another
    named = (verdict.winner.policy, verdict.baseline.policy, verdict.confidence, *codes)
    return {"named": named, "figures": figures, "ratios": ratios}


@FEW
@given(tuning=TUNINGS.map(lambda one: replace(one, crashing=0.0)), questions=st.integers(0, 40))
def test_an_interrupted_tuning_keeps_what_it_measured_and_goes_on(tuning: Tuning, questions: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = done(tuning, folder, questions)
        ran = [one.policy for one in first.machine.measured if isinstance(one.answer, Measurement)]
        assert (first.decision is None) == (not ran)
        if first.decision is None:
            return
        assert first.decision.provisional or not first.interrupted
        kept = recall(folder)
        assert [one.policy for one in kept.table if isinstance(one.outcome, Measurement)]
        assert told(study_report_of(kept, first.decision.objective).verdict) == told(first.decision.verdict)
        again = done(tuning, folder)
        assert again.decision is not None
        assert not set(again.tried) & set(first.tried), "what was measured is remembered"
        assert {trial.policy for trial in again.decision.trials} >= set(first.tried)
        assert again.decision.baseline.rows > ran.count(first.decision.baseline.policy), "measured anew in each run"
