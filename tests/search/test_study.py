"""The study: what its workers claim and tell one another, and what it stores."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import optuna
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from measurements import took
from optuna.trial import TrialState
from simulated.clock import SimulatedClock
from simulated.recorded import RecordedEvaluator
from studies import OOM, TUNING

from amptune.errors import StudyError
from amptune.measure.results.half_effects import ModuleSensitivity, Sensitivity
from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.sampler.backend import opened as storage_at
from amptune.search.sampler.claims import GONE_S
from amptune.search.sampler.storage import Store, recall
from amptune.search.sampler.study import Study, open_study
from amptune.search.space.candidates import Candidates, Wanted, candidates_for
from amptune.search.space.knobs import points, with_choices
from amptune.search.table.objective import Objective
from amptune.search.table.trial import Trial

BF16, OUTSIDE = amp_recipe("bf16"), Policy(threads=3)
SMALL = {
    "cudnn_benchmark": "false", "compile": "off", "fp32_exclusions": "0", "cuda_graphs": "false",
    "fused_optimizer": "false",
}  # fmt: skip


def candidates(**pins: str) -> Candidates:
    return candidates_for(RecordedEvaluator("resnet50").prepare(1.0), Wanted(baseline=STOCK, pins=pins))


def opened(where: Path | str, run: str = "0", known: Candidates | None = None, **more: Any) -> Study:
    """A worker of the study."""
    known = known or candidates()
    study = open_study(where, "study", known.space, known.policy_of, baseline=STOCK, **more)
    study.begin(replace(TUNING, run=run))
    return study


def trial_of(policy: Policy, study: Study, outcome: Outcome | None = None) -> Trial:
    outcome = outcome or RecordedEvaluator("resnet50").measure(policy, Effort())
    return Trial(number=len(study.trials), policy=policy, outcome=outcome, seconds=1.0, run=study.run)


def plain(where: Path | str) -> optuna.Study:
    return optuna.load_study(study_name="study", storage=storage_at(where))


TRIED = candidates(**SMALL)
POLICIES = tuple(dict.fromkeys(TRIED.policy_of(point) for point in points(TRIED.space)))[:4]


class Workers(RuleBasedStateMachine):
    """Workers of one study, who claim, tell, give back and die."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.clock, self.runs = SimulatedClock(), 0
        self.told: list[Policy] = []
        self.held: list[set[Policy]] = [set(), set()]
        self.studies = [self.joined(), self.joined()]

    def joined(self) -> Study:
        self.runs += 1
        study = opened(Path(self.folder.name), str(self.runs), TRIED)
        study.end(())
        claims = study._store.claims  # it counts on when the test says so
        claims.worker, claims.clock = f"{self.runs} elsewhere 1", self.clock
        claims.beat()
        return study

    @rule(worker=st.integers(0, 1), policy=st.sampled_from(POLICIES))
    def claims(self, worker: int, policy: Policy) -> None:
        study, other = self.studies[worker], 1 - worker
        study.catch_up()
        if policy in study.history.latest or policy in self.held[worker]:
            return
        is_mine = study.claim(policy)
        if policy == STOCK:
            assert is_mine, "every worker measures the baseline"
        elif policy in self.held[other]:
            assert not is_mine
        else:
            assert is_mine
        self.held[worker] |= {policy} if is_mine else set()

    @rule(worker=st.integers(0, 1), fails=st.booleans())
    def tells(self, worker: int, fails: bool) -> None:
        for policy in sorted(self.held[worker], key=str)[:1]:
            outcome = OOM if fails else took(10.0)
            self.studies[worker].tell(trial_of(policy, self.studies[worker], outcome))
            self.held[worker].remove(policy)
            self.told.append(policy)

    @rule(worker=st.integers(0, 1), policy=st.sampled_from(POLICIES))
    def gives_back(self, worker: int, policy: Policy) -> None:
        self.studies[worker].release(policy)
        self.held[worker].discard(policy)

    @rule(worker=st.integers(0, 1))
    def dies(self, worker: int) -> None:
        """Another comes in its place; what it had is free once its counter has stood still for long."""
        for study in self.studies:
            study._store.claims.beat()
        other, before = self.studies[1 - worker], self.studies[1 - worker].elsewhere
        self.studies[worker] = self.joined()
        alive = self.studies[worker].elsewhere
        self.clock.advance(GONE_S - 1)
        assert other.elsewhere == before, "it may only be slow"
        assert self.studies[worker].elsewhere == alive
        other._store.claims.beat()
        assert self.studies[worker].elsewhere == alive
        self.clock.advance(2.0)
        assert other.elsewhere == frozenset()
        assert self.studies[worker].elsewhere == self.held[1 - worker] - {STOCK}
        self.held[worker] = set()

    @invariant()
    def what_was_told_is_all_that_is_stored(self) -> None:
        measured = [policy for policy in self.told if policy != STOCK]
        assert len(measured) == len(set(measured)), "nothing is measured twice"
        stored = plain(Path(self.folder.name)).trials
        assert len(stored) == len(self.told)
        assert {one.state for one in stored} <= {TrialState.COMPLETE}

    def teardown(self) -> None:
        assert {one.policy for one in self.joined().trials} == set(self.told)
        self.folder.cleanup()


Workers.TestCase.settings = settings(
    max_examples=25, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestWorkers = Workers.TestCase


def test_one_that_another_has_measured_meanwhile_is_not_claimed(tmp_path: Path) -> None:
    study, other = opened(tmp_path, "1"), opened(tmp_path, "2")
    other.tell(trial_of(BF16, other))
    assert not study.claim(BF16)
    assert study.trials[0].outcome == other.trials[0].outcome
    assert study.elsewhere == other.elsewhere == frozenset()


def test_every_worker_measures_the_baseline(tmp_path: Path) -> None:
    study, other = opened(tmp_path, "1"), opened(tmp_path, "2")
    assert study.claim(STOCK)
    assert other.claim(STOCK)
    assert other.elsewhere == frozenset()


def test_plain_optuna_reads_what_ran_and_sees_what_failed(tmp_path: Path) -> None:
    study = opened(tmp_path)
    for policy, outcome in ((STOCK, None), (OUTSIDE, took(1.0)), (BF16, OOM)):
        assert study.claim(policy)
        study.tell(trial_of(policy, study, outcome))
    assert study.claim(amp_recipe("fp16"))
    study.end([{"stage": "search"}])
    baseline, outside, failed = plain(tmp_path).trials
    assert {one.state for one in (baseline, outside, failed)} == {TrialState.COMPLETE}
    assert candidates().policy_of(baseline.params) == STOCK  # type: ignore[arg-type]
    assert [one.value for one in (baseline, failed)] == [study.trials[0].samples_per_s, 0.0]
    assert outside.params == {}
    assert [one.system_attrs["constraints"] for one in (baseline, outside, failed)] == [[0.0], [0.0], [1.0]]
    if hasattr(failed, "constraints"):  # since Optuna 5
        assert list(failed.constraints.values()) == [1.0]
    record = recall(tmp_path)
    assert record.trials == study.trials
    assert record.outside == {OUTSIDE}
    assert record.timeline == ({"stage": "search"},)
    assert opened(tmp_path, "later").elsewhere == frozenset(), "one that has left claims nothing"


def test_one_that_was_killed_from_outside_is_known_here_and_not_stored(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.tell(trial_of(STOCK, study))
    study.tell(trial_of(BF16, study, Failure(kind="killed", message="the worker was ended by SIGKILL")))
    assert BF16 in study.history.latest
    assert [trial.policy for trial in recall(tmp_path).trials] == [STOCK]


def test_a_failed_baseline_is_reconsidered_and_a_measured_one_is_not(tmp_path: Path) -> None:
    study = opened(tmp_path)
    study.tell(trial_of(STOCK, study, OOM))
    study.reconsider(STOCK)
    assert study.history.latest == {}
    study.tell(trial_of(STOCK, study))
    study.reconsider(STOCK)
    assert isinstance(study.history.outcomes[STOCK], Measurement)


def test_a_trial_without_the_figure_of_the_objective_is_a_row(tmp_path: Path) -> None:
    first = opened(tmp_path, "1")
    first.tell(trial_of(STOCK, first, took(10.0)))
    first.tell(trial_of(BF16, first, OOM))
    study = opened(tmp_path, "2", objective=Objective("energy"))
    assert [trial.policy for trial in study.trials] == [BF16]
    assert [row.policy for row in study.rows] == [STOCK]


def test_other_workers_rows_are_read_once_and_own_ones_are_not_read_back(tmp_path: Path) -> None:
    study, other = opened(tmp_path, "1"), opened(tmp_path, "2")
    row = replace(trial_of(STOCK, study, took(10.0)).row, launch="comparison 0")
    for _ in range(2):
        study.add(row)
        study.catch_up()
        other.catch_up()
    assert study.rows == other.rows == (row, row)


def sensitivity(number: int) -> Sensitivity:
    module = ModuleSensitivity(
        path=f"module{number}", calls=1, fp32_ms=1.0, half_ms={"bf16": 0.5, "fp16": None}, stream="half",
        input_bytes=4, output_bytes=4, producers=("stem",),
    )  # fmt: skip
    return Sensitivity(modules=(module,), cast_ms_per_byte=0.1)


def test_the_order_of_modules_is_that_of_the_worker_that_came_first(tmp_path: Path) -> None:
    studies = [opened(tmp_path, str(number)) for number in range(4)]
    with ThreadPoolExecutor(4) as pool:
        kept = list(pool.map(lambda n: studies[n].keep_sensed("contiguous", sensitivity(n)), range(4)))
    assert len({one.modules for one in kept}) == 1
    assert opened(tmp_path, "later").sensed == {"contiguous": kept[0]}
    assert all(study.sensed["contiguous"] == kept[0] for study in studies)
    assert all(study.elsewhere == frozenset() for study in studies)


def test_a_worker_waits_for_another_that_writes_the_order_of_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = opened(tmp_path, "1"), opened(tmp_path, "2")
    keep = Store.keep

    def writes(store: Store, kind: str, name: str, record: Any) -> None:
        if not waited:
            assert second.keep_sensed("contiguous", sensitivity(2)) == sensitivity(1)
        keep(store, kind, name, record)

    def goes_on(_: float) -> None:
        if not waited:
            waited.append(True)
            first._store.claims.give_back("contiguous is sensed")
            keep(first._store, "sensed", "contiguous", sensitivity(1))

    waited: list[bool] = []
    monkeypatch.setattr("time.sleep", goes_on)
    monkeypatch.setattr(Store, "keep", writes)
    assert first.keep_sensed("contiguous", sensitivity(1)) == sensitivity(1)
    assert waited


def fails(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_storage_that_fails_is_remembered_and_loses_no_more_than_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = opened(tmp_path)
    monkeypatch.setattr("amptune.search.sampler.journal.Journal.append_logs", fails)
    study.add(trial_of(STOCK, study).row)
    assert study.keep_sensed("contiguous", sensitivity(1)) == study.sensed["contiguous"] == sensitivity(1)
    assert "No space left" in str(study.lost)
    with pytest.raises(StudyError, match="cannot be read or written"):
        study.tell(trial_of(STOCK, study))
    assert len(study.trials) == len(study.rows) == 1


def test_the_policies_of_another_space_are_adopted_and_trials_stay(tmp_path: Path) -> None:
    known, study = candidates(), opened(tmp_path)
    study.tell(trial_of(STOCK, study))
    space = with_choices(known.space, "batch_size", (32, 64), 32)
    study.adopt(space, known.policy_of)
    assert {policy.batch_size for policy in study.history.catalog.policies} == {32, 64}
    assert STOCK in study.history.latest
    (larger, *_) = study.history.catalog.policies
    study.tell(trial_of(larger, study, took(1.0)))
    assert plain(tmp_path).trials[-1].params == {}, "the study has no such knob"


@pytest.mark.parametrize("kind", ["alive", "worker"])
@pytest.mark.parametrize("is_folder", [True, False])
def test_a_study_that_another_version_wrote_is_a_clear_error(kind: str, is_folder: bool, tmp_path: Path) -> None:
    where = tmp_path if is_folder else f"sqlite:///{tmp_path / 'study.db'}"
    study = opened(where)
    study.tell(trial_of(STOCK, study))
    plain(where).set_user_attr(f"{kind} name", 3)
    reads = recall if kind == "alive" else (lambda where: opened(where).elsewhere)
    with pytest.raises(
        StudyError, match=r"another version of amptune wrote.*choose another( study)? with --study|:\d+: "
    ):
        reads(where)
