"""The whole search, driven by recorded trials."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from simulated.recorded import Interference, RecordedEvaluator, grid, recorded_ms

from amptune.errors import AmptuneError, NothingFeasibleError, StudyError, UserCodeError
from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome
from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.report.explanation import explain_for
from amptune.search.api import tune
from amptune.search.decide.decision import Decision
from amptune.search.events import Event, SearchEnded, SearchStarted, TrialEnded
from amptune.search.pipeline import TuningInterrupted, locked, tune_with
from amptune.search.plan.budget import Budget, Clock
from amptune.search.request import TuningRequest
from amptune.search.sampler.storage import recall
from amptune.search.space.candidates import Wanted
from amptune.search.table.objective import THROUGHPUT

OOM = Failure(kind="oom", message="CUDA out of memory")


def request_in(
    folder: Path, clock: Clock, *, trials: int | None = 40, baseline: Policy = STOCK, **wanted: object
) -> TuningRequest:
    """A request whose budget is spent by the clock of its machine."""
    return TuningRequest(
        source=Source(target="recorded"),
        wanted=Wanted(baseline=baseline, **{"pins": {}, **wanted}),  # type: ignore[arg-type]  # by keyword
        budget=Budget(seconds=300, trials=trials, started=clock(), clock=clock),
        folder=folder,
        study=folder,
    )


def tuned_on(evaluator: RecordedEvaluator, folder: Path, **options: object) -> tuple[Decision, list[Event]]:
    events: list[Event] = []
    request = request_in(folder, evaluator.clock, **options)  # type: ignore[arg-type]
    return tune_with(evaluator, request, events.append), events


def failing(*policies: Policy) -> Interference:
    return lambda policy: OOM if replace(policy, batch_size=None) in policies else None


@pytest.mark.parametrize(
    "workload",
    [
        "resnet50",
        "conv1",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("resnet18", "vgg16_cifar", "densenet161_cifar", "seresnext50_cifar", "deeplabv3p")
        ),
    ],
)
def test_the_policy_found_is_within_five_percent_of_the_best_recorded(workload: str, tmp_path: Path) -> None:
    decision, _ = tuned_on(RecordedEvaluator(workload), tmp_path)
    assert recorded_ms(workload, decision.policy) <= 1.05 * min(grid(workload).values())
    assert recorded_ms(workload, decision.policy) <= recorded_ms(workload, STOCK)


def test_what_is_on_record_is_held_against_the_baselines_own_trial(tmp_path: Path) -> None:
    decision, events = tuned_on(RecordedEvaluator("resnet50"), tmp_path)
    trial = next(event.trial for event in events if isinstance(event, TrialEnded) and event.trial.policy == STOCK)
    on_record = decision.policy_file.evidence["baseline"]["trial"]
    assert on_record["samples_per_s"] == pytest.approx(trial.samples_per_s, rel=1e-3)
    chosen, sentences = explain_for(decision.policy_file, THROUGHPUT)
    assert chosen is not None
    assert f"{chosen.samples_per_s / on_record['samples_per_s']:.2f} times the baseline's." in sentences[1]


def test_a_single_convolution_keeps_autocast_off(tmp_path: Path) -> None:
    decision, _ = tuned_on(RecordedEvaluator("conv1"), tmp_path)
    assert decision.policy.autocast == "off" or decision.policy.fp32_modules


def test_stock_and_the_amp_recipes_are_always_compared_in_the_end(tmp_path: Path) -> None:
    decision, _ = tuned_on(RecordedEvaluator("resnet50"), tmp_path)
    finalists = {contender.policy for contender in decision.finalists}
    assert {STOCK, amp_recipe("bf16"), amp_recipe("fp16")} <= finalists
    assert all(contender.rows >= 3 for contender in (decision.baseline, decision.verdict.winner))
    assert decision.amp_recipe is not None
    assert decision.amp_recipe.policy in (amp_recipe("bf16"), amp_recipe("fp16"))


def test_an_amp_recipe_that_fails_stands_in_the_comparison_with_its_failure(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50", interfere=failing(amp_recipe("fp16")))
    decision, _ = tuned_on(evaluator, tmp_path)
    of = {contender.policy: contender for contender in decision.finalists}
    assert of[amp_recipe("fp16")].failure == OOM


def test_a_failed_policy_costs_one_trial_and_is_not_tried_again(tmp_path: Path) -> None:
    broken = amp_recipe("bf16", memory_format="channels_last")
    evaluator = RecordedEvaluator("resnet50", interfere=failing(broken))
    decision, _ = tuned_on(evaluator, tmp_path)
    assert evaluator.measured.count(broken) == 1
    assert decision.policy.autocast == "fp16"


def test_a_crash_that_recurs_everywhere_but_in_the_baseline_keeps_what_there_is(tmp_path: Path) -> None:
    crash = Failure(kind="crash", message="gone")
    evaluator = RecordedEvaluator("resnet50", interfere=lambda policy: None if policy == STOCK else crash)
    decision, _ = tuned_on(evaluator, tmp_path)
    assert replace(decision.policy, batch_size=None) == STOCK
    assert decision.findings[0].code == "keep"


def test_a_baseline_that_fails_ends_the_search_at_once(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50", interfere=failing(STOCK))
    with pytest.raises(NothingFeasibleError, match=r"the baseline \(stock PyTorch\) fails.*oom: CUDA out of memory"):
        tuned_on(evaluator, tmp_path)
    assert evaluator.measured == [STOCK]


def test_a_baseline_whose_worker_dies_once_is_tried_again(tmp_path: Path) -> None:
    accidents = iter([Failure(kind="crash", message="gone")])
    evaluator = RecordedEvaluator("resnet50", interfere=lambda _: next(accidents, None))
    decision, _ = tuned_on(evaluator, tmp_path)
    assert evaluator.measured[:2] == [STOCK, STOCK]
    assert decision.speedup.value > 1


def test_a_baseline_whose_worker_dies_again_is_not_feasible(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50", interfere=lambda _: Failure(kind="crash", message="gone"))
    with pytest.raises(NothingFeasibleError, match="crash: gone"):
        tuned_on(evaluator, tmp_path)
    assert evaluator.measured == [STOCK, STOCK]


@pytest.mark.parametrize(
    ("kind", "message", "said"),
    [
        ("KeyError", "no such key", r"raised KeyError: no such key \(train.py:7\)"),
        ("AssertionError", "AssertionError", r"raised AssertionError \(train.py:7\)"),  # a bare `assert`
    ],
)
def test_a_baseline_that_raises_is_the_users_error(tmp_path: Path, kind: str, message: str, said: str) -> None:
    failure = Failure(kind="error", message=message, exception=kind, where="train.py:7")
    evaluator = RecordedEvaluator("resnet50", interfere=lambda _: failure)
    with pytest.raises(UserCodeError, match=f"the training step {said}"):
        tuned_on(evaluator, tmp_path)


def test_no_policy_is_measured_twice_before_the_comparison(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50")
    _, events = tuned_on(evaluator, tmp_path)
    tried = [event.trial.policy for event in events if isinstance(event, TrialEnded)]
    assert len(tried) == len(set(tried)) >= 20


def test_a_study_resumes_where_it_stopped(tmp_path: Path) -> None:
    first = RecordedEvaluator("resnet50")
    tuned_on(first, tmp_path, trials=12)
    decision, events = tuned_on(RecordedEvaluator("resnet50"), tmp_path, trials=6)
    started = next(event for event in events if isinstance(event, SearchStarted))
    tried = [event.trial.policy for event in events if isinstance(event, TrialEnded)]
    assert started.remembered == 12
    assert len(tried) == 6
    assert not set(tried) & set(first.measured[:12])
    assert len(decision.trials) == 18


@pytest.mark.slow
def test_a_study_killed_between_asking_and_telling_resumes(tmp_path: Path) -> None:
    def die(policy: Policy) -> None:
        if policy == amp_recipe("fp16"):
            raise MemoryError

    with pytest.raises(MemoryError):
        tuned_on(RecordedEvaluator("resnet50", interfere=die), tmp_path)
    decision, _ = tuned_on(RecordedEvaluator("resnet50"), tmp_path)
    assert recorded_ms("resnet50", decision.policy) <= 1.05 * min(grid("resnet50").values())


def test_an_interruption_hands_over_the_best_so_far(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50")

    def interrupt(_: Policy) -> None:
        if len(evaluator.measured) == 8:
            raise KeyboardInterrupt

    evaluator.interfere = interrupt
    with pytest.raises(TuningInterrupted) as caught:
        tuned_on(evaluator, tmp_path)
    decision = caught.value.decision
    assert decision is not None
    assert decision.provisional
    assert decision.policy_file.evidence["provisional"] is True
    assert recorded_ms("resnet50", decision.policy) < recorded_ms("resnet50", STOCK)


def test_an_interruption_before_the_baseline_has_nothing_to_hand_over(tmp_path: Path) -> None:
    def interrupt(_: Policy) -> None:
        raise KeyboardInterrupt

    with pytest.raises(TuningInterrupted) as caught:
        tuned_on(RecordedEvaluator("resnet50", interfere=interrupt), tmp_path)
    assert caught.value.decision is None


def test_a_pinned_knob_is_not_searched_but_stock_is_still_compared(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50")
    decision, events = tuned_on(evaluator, tmp_path, pins={"autocast": "bf16"})
    tried = {event.trial.policy for event in events if isinstance(event, TrialEnded)}
    known = {STOCK, *(amp_recipe("fp16", memory_format=f) for f in ("contiguous", "channels_last"))}
    assert {policy.autocast for policy in tried - known} == {"bf16"}
    assert STOCK in {contender.policy for contender in decision.finalists}


def test_another_baseline_is_what_the_claim_is_held_against(tmp_path: Path) -> None:
    recipe = amp_recipe("fp16")
    decision, _ = tuned_on(RecordedEvaluator("resnet50"), tmp_path, baseline=recipe)
    assert decision.baseline.policy == recipe
    expected = recorded_ms("resnet50", recipe) / recorded_ms("resnet50", decision.policy)
    assert decision.speedup.value == pytest.approx(expected, rel=0.03)


@pytest.mark.slow
def test_the_batch_size_is_the_users_unless_asked_for(tmp_path: Path) -> None:
    decision, _ = tuned_on(RecordedEvaluator("resnet50"), tmp_path / "own")
    assert decision.policy.batch_size == 128
    evaluator = RecordedEvaluator("resnet50")
    tuned_on(evaluator, tmp_path / "auto", batch_size="auto", trials=80)
    assert len({policy.batch_size for policy in evaluator.measured}) > 3


@pytest.mark.slow
def test_cudnn_benchmark_is_tried_on_the_fastest_only_after_the_cheap_trials(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50")
    tuned_on(evaluator, tmp_path, trials=None)
    flags = [policy.cudnn_benchmark for policy in evaluator.measured]
    assert True in flags
    assert not any(flags[:12])


def test_a_small_space_is_measured_to_its_end(tmp_path: Path) -> None:
    pins = {"fp32_exclusions": "0", "cudnn_benchmark": "false", "compile": "off", "fused_optimizer": "false"}
    _, events = tuned_on(RecordedEvaluator("resnet50"), tmp_path, trials=None, pins=pins)
    assert next(e for e in events if isinstance(e, SearchEnded)).because == "every policy of the space is measured"


def test_the_policy_file_says_where_it_holds_and_what_was_measured(tmp_path: Path) -> None:
    decision, _ = tuned_on(RecordedEvaluator("resnet50"), tmp_path)
    file = decision.policy_file
    assert file.valid_for["nvidia.com/gpu.product"] == "NVIDIA-H200"
    assert file.valid_for["model"].startswith("sha256:")
    assert file.evidence["speedup"] == pytest.approx(decision.speedup.value, rel=1e-3)
    assert file.evidence["baseline"]["step_ms"] > file.evidence["step_ms"]
    assert file.evidence["trials"] == len(decision.trials) >= 20


def test_a_second_tuner_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    with locked(tmp_path, None), pytest.raises(StudyError, match="wait for it"):
        tune("amptune.workload.zoo:digits", study=tmp_path, budget_s=5)


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StudyError, match="cannot be used"):
        tune("amptune.workload.zoo:digits", study=tmp_path / "file" / "study", budget_s=5)


def test_a_storage_that_fills_up_ends_the_search_and_loses_nothing(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50")

    def fill(_: Policy) -> None:
        if len(evaluator.measured) == 8:
            journal = tmp_path / "journal.log"
            journal.rename(tmp_path / "journal.gone")
            journal.mkdir()

    evaluator.interfere = fill
    decision, events = tuned_on(evaluator, tmp_path)
    because = next(e for e in events if isinstance(e, SearchEnded)).because
    assert "the study cannot be read or written" in because
    assert len(decision.trials) == 8
    assert recorded_ms("resnet50", decision.policy) < recorded_ms("resnet50", STOCK)


class NeverBuilt(RecordedEvaluator):
    """The workload must not be built: that takes long."""

    def prepare(self, *_: Any, **__: Any) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"pins": {"autcast": "bf16"}}, "'autcast' is no knob of this search; did you mean autocast"),
        ({"pins": {"cuda_graphs": "maybe"}}, "cuda_graphs=maybe: 'maybe' is not one of false, true, step"),
        ({"pins": {"batch_size": "8"}}, "use --batch-size"),
        ({"space": "hoper"}, "did you mean hopper"),
    ],
)
def test_a_wrong_knob_value_or_space_is_told_before_the_workload_is_built(
    wrong: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(AmptuneError, match=said):
        tuned_on(NeverBuilt("resnet50"), tmp_path, **wrong)


@pytest.mark.parametrize(
    ("url", "said"),
    [("oracle+oracledb://u:secret@nowhere/x", "'oracledb'"), ("nodb://u:secret@nowhere/x", "dialects:nodb")],
)
def test_a_database_without_its_driver_is_told_before_the_workload_is_built(
    url: str, said: str, tmp_path: Path
) -> None:
    machine = NeverBuilt("resnet50")
    with pytest.raises(StudyError, match=f"the study cannot be read or written: .*{said}") as caught:
        tune_with(machine, replace(request_in(tmp_path, machine.clock), study=url), lambda _: None)
    assert "secret" not in str(caught.value)


def test_a_database_that_cannot_be_reached_is_told_before_the_workload_is_built(tmp_path: Path) -> None:
    pytest.importorskip("psycopg2", reason="needs the driver of PostgreSQL")
    machine = NeverBuilt("resnet50")
    request = replace(request_in(tmp_path, machine.clock), study="postgresql+psycopg2://u:secret@127.0.0.1:1/x")
    with pytest.raises(StudyError, match=r"the study cannot be read or written: .*refused") as caught:
        tune_with(machine, request, lambda _: None)
    assert "secret" not in str(caught.value)


def test_an_unknown_knob_or_space_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(AmptuneError, match="autocast"):
        tuned_on(RecordedEvaluator("resnet50"), tmp_path, pins={"autcast": "bf16"})
    with pytest.raises(AmptuneError, match="hopper"):
        tuned_on(RecordedEvaluator("resnet50"), tmp_path, space="hoper")


def test_a_pin_binds_the_winner(tmp_path: Path) -> None:
    decision, _ = tuned_on(RecordedEvaluator("resnet50"), tmp_path, pins={"autocast": "off"})
    assert decision.policy.autocast == "off"
    assert amp_recipe("fp16") in {contender.policy for contender in decision.finalists}


def test_a_baseline_that_once_failed_is_measured_again(tmp_path: Path) -> None:
    with pytest.raises(NothingFeasibleError):
        tuned_on(RecordedEvaluator("resnet50", interfere=failing(STOCK)), tmp_path)
    decision, _ = tuned_on(RecordedEvaluator("resnet50"), tmp_path)
    assert decision.speedup.value > 2


def test_half_a_line_in_the_journal_is_dropped(tmp_path: Path) -> None:
    tuned_on(RecordedEvaluator("resnet50"), tmp_path, trials=5)
    with (tmp_path / "journal.log").open("a") as journal:
        journal.write('{"op_code": 3, "wor')
    _, events = tuned_on(RecordedEvaluator("resnet50"), tmp_path, trials=1)
    assert next(event for event in events if isinstance(event, SearchStarted)).remembered == 5


def test_a_journal_that_is_none_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "journal.log").write_text("not a journal\n")
    with pytest.raises(StudyError, match="the study cannot be read or written"):
        tuned_on(RecordedEvaluator("resnet50"), tmp_path)


def test_a_worker_that_dies_once_in_the_comparison_is_tried_again(tmp_path: Path) -> None:
    accidents = iter([Failure(kind="crash", message="gone")])
    evaluator = RecordedEvaluator("resnet50")
    evaluator.interfere = lambda policy: (
        next(accidents, None) if len(evaluator.measured) > 40 and policy == STOCK else None
    )
    decision, _ = tuned_on(evaluator, tmp_path)
    assert not decision.provisional
    assert decision.baseline.failure is None


def test_a_baseline_that_keeps_dying_in_the_comparison_is_judged_by_the_rows_it_has(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50")
    gone = Failure(kind="crash", message="gone")
    searched: list[int] = []
    evaluator.interfere = lambda policy: gone if searched and policy == STOCK else None

    def watch(event: Event) -> None:
        if isinstance(event, SearchEnded):
            searched.append(len(evaluator.measured))

    decision = tune_with(evaluator, request_in(tmp_path, evaluator.clock), watch)
    assert (decision.baseline.failure, decision.baseline.rows) == (None, 1)
    true = recorded_ms("resnet50", STOCK) / recorded_ms("resnet50", decision.policy)
    assert decision.speedup.low < true < decision.speedup.high
    assert decision.speedup.launches == 1


def test_trials_and_comparisons_are_rows_of_one_table_that_gives_every_figure(tmp_path: Path) -> None:
    decision, _ = tuned_on(RecordedEvaluator("resnet50", noise=0.05), tmp_path)
    table = recall(tmp_path).table
    tried = {trial.policy for trial in decision.trials}
    assert {row.launch.split()[0] for row in table} == {"search", "comparison"}
    for contender in decision.verdict.contenders:
        own = [row.outcome for row in table if row.policy == contender.policy]
        times = [outcome.samples_per_s for outcome in own if isinstance(outcome, Measurement)]
        assert contender.rows == len(times) >= 1
        if any(isinstance(outcome, Measurement) and outcome.in_loop for outcome in own):
            assert min(times) <= (contender.samples_per_s or 0.0) * 1.0001
            assert (contender.samples_per_s or 0.0) <= max(times) * 1.0001
        else:  # what only a trial timed is told as in the loop, beside the baseline's
            assert decision.baseline.samples_per_s is not None
            assert contender.samples_per_s == pytest.approx(contender.speedup * decision.baseline.samples_per_s)
    assert {contender.policy for contender in decision.finalists if contender.rows > 1} & tried


def test_a_baseline_file_with_the_workloads_own_batch_size_is_the_same_policy(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50")
    decision, _ = tuned_on(evaluator, tmp_path, baseline=replace(STOCK, batch_size=128))
    assert decision.baseline.policy == STOCK
    assert replace(STOCK, batch_size=128) not in evaluator.measured


def test_a_budget_for_the_baseline_alone_is_said_to_be_too_small(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50")
    request = request_in(tmp_path, evaluator.clock)
    short = replace(request, budget=replace(request.budget, seconds=3.0))
    decision = tune_with(evaluator, short, lambda _: None)
    assert evaluator.measured == [STOCK]
    assert decision.verdict.keeps_the_baseline
    assert decision.findings[0].code == "budget-too-small"


def test_a_single_trial_is_compared_with_what_is_known_to_be_good(tmp_path: Path) -> None:
    decision, events = tuned_on(RecordedEvaluator("resnet50"), tmp_path, trials=1)
    assert [event.trial.policy for event in events if isinstance(event, TrialEnded)] == [STOCK]
    assert {amp_recipe("bf16"), amp_recipe("fp16")} <= {one.policy for one in decision.verdict.contenders}
    assert decision.speedup.value > 2


class Slow(RecordedEvaluator):
    """Takes simulated time: its first trial more than the others."""

    takes_s: ClassVar[float] = 0.0

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        self.clock.advance(1.5 if self.measured else 14.0)
        return super().measure(policy, effort)


def test_a_first_trial_that_pays_for_the_start_does_not_end_the_search(tmp_path: Path) -> None:
    evaluator = Slow("resnet50", noise=0.002)
    request = request_in(tmp_path, evaluator.clock)
    decision = tune_with(evaluator, replace(request, budget=replace(request.budget, seconds=60)), lambda _: None)
    assert len(decision.trials) > 5
    assert decision.speedup.value > 2


def test_another_baseline_is_measured_first_in_an_old_study_whatever_its_kind_took_there(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50", noise=0.002)
    tuned_on(evaluator, tmp_path)
    other = amp_recipe("bf16", cudnn_benchmark=True, fused_optimizer=True)
    again = request_in(tmp_path, evaluator.clock, baseline=other)
    decision = tune_with(evaluator, replace(again, budget=replace(again.budget, seconds=0.5)), lambda _: None)
    assert decision.baseline.policy.fused_optimizer
