"""In which order policies are tried: the cheap before the dear, the best of them compiled first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from measurements import took
from simulated.recorded import RecordedEvaluator, recorded_ms
from test_pipeline import request_in

from amptune.errors import NothingFeasibleError, StudyError
from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.compiled_graphs import CompiledGraphs
from amptune.search.decide.decision import Decision
from amptune.search.events import ComparisonStarted, Event, SearchEnded, TrialEnded
from amptune.search.events import Compiling as GraphBegun
from amptune.search.pipeline import TuningInterrupted, tune_with
from amptune.search.plan.compile_costs import expected_compile_s
from amptune.search.sampler.storage import Handle, Store, open_store
from amptune.search.space.candidates import Wanted, candidates_for
from amptune.search.table.objective import objective_of
from amptune.search.table.trial import Trial
from amptune.search.trials import _of_two

NO_GRAPHS = Failure(kind="error", message="a graph cannot be captured here")
NO_COMPILER = Failure(kind="unsupported", message="no working C++ compiler found")
FACTORS = {
    "off": 1.0,
    "default": 0.85,
    "reduce-overhead": 0.8,
    "max-autotune": 0.79,
    "max-autotune-no-cudagraphs": 0.84,
}
COMPILE_S = {"off": 0.0, "default": 30.0, "reduce-overhead": 30.0}


class Compiling(RecordedEvaluator):
    """Takes simulated time: what it compiles, half a minute for each graph, or five to time its kernels too."""

    takes_s: ClassVar[float] = 0.0  # besides
    launch_s: ClassVar[float] = 2.0
    factors = FACTORS

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        graph = replace(policy, fused_optimizer=False)
        known = any(replace(one, fused_optimizer=False) == graph for one in self.measured)
        seconds = 1.5 + (0.0 if known else COMPILE_S.get(policy.compile, 300.0))
        self.clock.advance(min(seconds, effort.time_limit_s))
        if seconds > effort.time_limit_s:
            return Failure(kind="timeout", message="no answer in time")
        outcome = super().measure(policy, effort)
        return replace(outcome, startup_s=seconds - 1.5) if isinstance(outcome, Measurement) else outcome


class Slow(Compiling):
    """No policy is measured in any time that it is given."""

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        self.measured.append(policy)
        self.clock.advance(effort.time_limit_s)
        return Failure(kind="timeout", message="no answer in time")


def searched(
    folder: Path, evaluator: RecordedEvaluator | None = None, budget_s: float = 400, **wanted: Any
) -> tuple[Decision, list[Event]]:
    evaluator = evaluator or Compiling("resnet50", noise=0.002, graphs_at_once=0)
    evaluator.true_ms = lambda policy: recorded_ms("resnet50", policy) * FACTORS[policy.compile]
    request = request_in(folder, evaluator.clock, trials=None, **wanted)
    request = replace(request, budget=replace(request.budget, seconds=budget_s))
    events: list[Event] = []
    return tune_with(evaluator, request, events.append), events


def tried(events: list[Event]) -> list[Policy]:
    return [event.trial.policy for event in events if isinstance(event, TrialEnded)]


def test_the_best_eager_policy_is_compiled_first_when_the_cheap_trials_are_done(tmp_path: Path) -> None:
    decision, events = searched(tmp_path)
    policies = tried(events)
    modes = [policy.compile for policy in policies]
    first = next(place for place, mode in enumerate(modes) if mode != "off")
    assert first >= 10
    assert modes[first] == "reduce-overhead"
    assert policies[first].autocast != "off"
    assert policies[first].memory_format == "channels_last"
    assert decision.policy.compile == "reduce-overhead"
    finding = next(finding for finding in decision.findings if finding.code == "compile-pays")
    assert finding.figures["compile_s"] == 30
    assert finding.figures["pays_after_steps"] > 1000


def test_kernels_are_not_timed_in_a_budget_that_could_not_hold_it(tmp_path: Path) -> None:
    _, events = searched(tmp_path)
    assert not [policy for policy in tried(events) if policy.compile.startswith("max-autotune")]


@pytest.mark.parametrize("wanted", [{"compile": False}, {"pins": {"compile": "off"}}])
def test_nothing_is_compiled_for_who_wants_nothing_compiled(tmp_path: Path, wanted: dict[str, Any]) -> None:
    decision, events = searched(tmp_path, **wanted)
    assert {policy.compile for policy in tried(events)} == {"off"}
    assert decision.policy.compile == "off"


def test_a_short_budget_compiles_nothing_and_says_so(tmp_path: Path) -> None:
    decision, events = searched(tmp_path, budget_s=60)
    assert {policy.compile for policy in tried(events)} == {"off"}
    assert "compile-not-tried" in {finding.code for finding in decision.findings}


def test_a_baseline_that_takes_longer_than_the_budget_is_measured_once(tmp_path: Path) -> None:
    evaluator = Slow("resnet50", graphs_at_once=0)
    with pytest.raises(NothingFeasibleError, match="could not be measured within the budget; give more with --budget"):
        searched(tmp_path, evaluator, budget_s=60)
    assert evaluator.measured == [STOCK]
    assert evaluator.clock() < 90


def test_where_only_compiling_is_wanted_and_there_is_no_time_for_it_that_is_said(tmp_path: Path) -> None:
    decision, events = searched(tmp_path, budget_s=40, pins={"compile": "max-autotune"})
    assert {policy.compile for policy in tried(events)} == {"off"}
    ended = next(event for event in events if isinstance(event, SearchEnded))
    assert ended.because.startswith("what is left of the space does not fit, takes too much time, or cannot")
    untried = next(finding for finding in decision.findings if finding.code == "compile-not-tried")
    assert untried.message.endswith("there was no time for it; give more with --budget")


def test_compiling_that_the_number_of_trials_left_no_room_for_is_not_put_down_to_time(tmp_path: Path) -> None:
    evaluator = RecordedEvaluator("resnet50", noise=0.002)
    decision = tune_with(evaluator, request_in(tmp_path, evaluator.clock, trials=1), lambda _: None)
    untried = next(finding for finding in decision.findings if finding.code == "compile-not-tried")
    assert "no time" not in untried.message
    assert "--trials" in untried.message


def test_a_compiled_policy_that_is_measured_twice_keeps_what_compiling_it_took() -> None:
    first = took(9.0, startup_s=30.0, graph_breaks=("print",))
    kept = _of_two(first, replace(first, step_ms=(5.0,) * 5, startup_s=0.0, graph_breaks=()))
    assert isinstance(kept, Measurement)
    assert (kept.mean_ms, kept.startup_s, kept.graph_breaks) == (5.0, 30.0, ("print",))


def test_compiling_is_given_up_where_it_cannot_be_done(tmp_path: Path) -> None:
    evaluator = Compiling(
        "resnet50",
        noise=0.002,
        graphs_at_once=0,
        interfere=lambda policy: NO_COMPILER if policy.compile != "off" else None,
    )
    decision, events = searched(tmp_path, evaluator)
    modes = [policy.compile for policy in tried(events) if policy.compile != "off"]
    assert 2 <= len(modes) <= 3
    assert set(modes) == {"reduce-overhead", "default"}
    assert decision.policy.compile == "off"
    assert decision.speedup.value > 2
    failed = next(finding for finding in decision.findings if finding.code == "compile-failed")
    assert "C++ compiler" in failed.message


def test_where_cuda_graphs_fail_the_model_is_compiled_without_them(tmp_path: Path) -> None:
    evaluator = Compiling(
        "resnet50",
        noise=0.002,
        graphs_at_once=0,
        interfere=lambda policy: NO_GRAPHS if policy.compile == "reduce-overhead" else None,
    )
    decision, _ = searched(tmp_path, evaluator)
    assert decision.policy.compile == "default"


def test_only_a_pinned_mode_is_compiled(tmp_path: Path) -> None:
    _, events = searched(tmp_path, pins={"compile": "default"})
    compiled = [policy for policy in tried(events) if policy.compile != "off"]
    assert {policy.compile for policy in compiled} == {"default"}
    assert compiled


def test_the_search_ends_when_nothing_that_is_left_is_worth_its_time(tmp_path: Path) -> None:
    _, events = searched(tmp_path, budget_s=4000)
    ended = next(event for event in events if isinstance(event, SearchEnded))
    assert ended.because == "no policy that is left promises to be better"
    assert ended.trials < 120


class Behind(RecordedEvaluator):
    """Graphs compile in the background, for as long as `compile_s`. Eager steps tell nothing of the graphs."""

    takes_s: ClassVar[float] = 1.5
    launch_s: ClassVar[float] = 2.0
    most_at_once = 0

    def begin_compiling(self, policy: Policy, limit_s: float) -> None:
        super().begin_compiling(policy, limit_s)
        self.most_at_once = max(self.most_at_once, len(self.in_background))


def waiting_for_the_host(policy: Policy) -> float:
    if policy.compile == "off":
        eager = {"off": 8.0, "bf16": 10.0, "fp16": 11.0}
        return eager[policy.autocast] + (policy.memory_format == "contiguous")
    graph = {"off": 6.0, "bf16": 3.0, "fp16": 4.0}
    return graph[policy.autocast] - (policy.memory_format == "contiguous")


def searched_behind(folder: Path, budget_s: float = 180, **wanted: Any) -> tuple[Behind, Decision, list[Event]]:
    evaluator = wanted.pop("evaluator", None) or Behind("resnet50", noise=0.002, graphs_at_once=4)
    evaluator.peak_mib = wanted.pop("peak_mib", lambda _: 5000.0)
    evaluator.compile_s, evaluator.true_ms = wanted.pop("compile_s", 30.0), waiting_for_the_host
    objective = objective_of(wanted.pop("objective", "throughput"))
    request = request_in(folder, evaluator.clock, trials=wanted.pop("trials", None), **wanted)
    budget = replace(request.budget, seconds=budget_s)
    events: list[Event] = []
    return evaluator, tune_with(evaluator, replace(request, budget=budget, objective=objective), events.append), events


def graphs_in(events: list[Event]) -> list[Policy]:
    return [policy for policy in tried(events) if policy.compile != "off"]


def test_the_likeliest_graph_compiles_from_the_first_second_with_cuda_graphs_and_without(tmp_path: Path) -> None:
    evaluator, _, events = searched_behind(tmp_path)
    first = next(event for event in events if isinstance(event, GraphBegun | TrialEnded))
    assert isinstance(first, GraphBegun)
    likeliest = Policy(autocast="bf16", memory_format="channels_last", fused_optimizer=True)
    assert evaluator.compiled_behind[:2] == [likeliest.compiled("reduce-overhead"), likeliest.compiled("default")]


@pytest.mark.parametrize(("repeated", "modes"), [(2, {"blocks", "reduce-overhead"}), (1, {"reduce-overhead"})])
def test_repeated_blocks_compile_first_if_half_of_the_model_is_repeated(
    repeated: int, modes: set[str], tmp_path: Path
) -> None:
    evaluator = Behind("resnet50", noise=0.002, graphs_at_once=4, repeated_leaves=repeated)
    searched_behind(tmp_path, evaluator=evaluator)
    first, second, *_ = [policy.compile for policy in evaluator.compiled_behind]
    assert {first, second} - {"default"} == modes
    assert first == min(modes)


def test_how_long_the_whole_model_compiles_is_not_told_by_its_blocks() -> None:
    policy = Policy(autocast="bf16", compile="blocks")
    compiled = Trial(number=0, policy=policy, outcome=took(startup_s=5.0), seconds=6.0, run="", moment_s=0.0)
    study: Any = SimpleNamespace(trials=[], history=SimpleNamespace(outcomes={}))
    none: Any = None
    graphs = CompiledGraphs(none, none, none, STOCK, none, leaves=400, repeated_leaves=390)
    graphs.study = study
    assert graphs.seconds(policy) == expected_compile_s(10)
    study.trials.append(compiled)
    study.history.outcomes[policy] = compiled.outcome
    assert graphs.seconds(policy) == 0.0  # it lies in the compiler's cache
    assert graphs.seconds(replace(policy, autocast="fp16")) == 5.0
    assert graphs.seconds(policy.compiled("reduce-overhead")) == expected_compile_s(400) > 60


def test_others_are_measured_while_graphs_compile_and_each_graph_once_it_is_ready(tmp_path: Path) -> None:
    evaluator, decision, events = searched_behind(tmp_path)
    eager = list(takewhile(lambda policy: policy.compile == "off", tried(events)))
    assert len(eager) >= 10
    assert graphs_in(events)[:2] == evaluator.compiled_behind[:2]
    assert decision.policy.autocast == "bf16"
    assert decision.policy.compile != "off"


def test_no_graph_that_was_ready_in_time_is_thrown_away(tmp_path: Path) -> None:
    evaluator, _, events = searched_behind(tmp_path)
    late = set(evaluator.compiled_behind) - set(graphs_in(events))
    assert len(late) <= evaluator.graphs_at_once
    assert len(graphs_in(events)) >= 4


def test_the_best_dtype_is_compiled_with_cuda_graphs_and_without(tmp_path: Path) -> None:
    """An encoder-decoder was fastest without, which was never tried (an H200)."""
    _, decision, events = searched_behind(tmp_path)
    modes = {policy.compile for policy in graphs_in(events) if policy.autocast == decision.policy.autocast}
    assert modes == {"reduce-overhead", "default"}


@pytest.mark.parametrize(("peak_mib", "most"), [(5_000.0, 4), (30_000.0, 2), (90_000.0, 1)])
def test_no_more_compile_than_the_cores_and_the_memory_are_enough_for(
    tmp_path: Path, peak_mib: float, most: int
) -> None:
    """Each is thought to need 1.5 times its eager peak, of 143,000 MiB, and so is what is measured beside them."""
    evaluator, _, _ = searched_behind(tmp_path, peak_mib=lambda _: peak_mib)
    assert evaluator.most_at_once <= max(most, 2), "two begin before the peak is known"
    assert len(evaluator.compiled_behind) >= most


def test_graphs_that_are_not_ready_in_time_leave_the_time_to_search_and_compare(tmp_path: Path) -> None:
    """As on a host so slow that DenseNet-161 lost 95 of 215 s, and had one policy besides stock PyTorch."""
    _, decision, events = searched_behind(tmp_path, compile_s=1000.0)
    assert not graphs_in(events)
    assert len(tried(events)) > 12
    assert decision.baseline.rows >= 2


@pytest.mark.slow
@pytest.mark.parametrize(("budget_s", "goes_on"), [(40, True), (600, False)])
def test_graphs_that_would_come_too_late_compile_on_while_eager_steps_are_timed(
    tmp_path: Path, budget_s: float, goes_on: bool
) -> None:
    """Swin-T's graph had not come after 120 s, in which it stood still for 24 trials (reports/h100)."""

    class Watched(Behind):
        efforts: ClassVar[list[tuple[Policy, bool]]] = []

        def measure(self, policy: Policy, effort: Effort) -> Outcome:
            if self.in_background:
                self.efforts.append((policy, effort.beside_compiling))
            return super().measure(policy, effort)

    Watched.efforts.clear()
    evaluator = Watched("resnet50", noise=0.002, graphs_at_once=4)
    _, decision, _ = searched_behind(tmp_path, budget_s=budget_s, compile_s=20.0, evaluator=evaluator)
    quiet = [policy for policy, beside in Watched.efforts if not beside]
    beside = [policy for policy, beside in Watched.efforts if beside]
    assert decision.baseline.policy in quiet
    assert not any(policy.compile != "off" for policy in beside)
    assert bool(beside) == goes_on


@pytest.mark.slow
@pytest.mark.parametrize(("budget_s", "beside"), [(40, 0), (600, 1)])
def test_a_graph_that_may_come_too_late_compiles_alone(tmp_path: Path, budget_s: float, beside: int) -> None:
    """Beside another, Swin-T's graph came after the 120 s in which it comes alone (reports/h100/foreign)."""
    _, _, events = searched_behind(tmp_path, budget_s=budget_s, compile_s=20.0)
    first = next(place for place, event in enumerate(events) if isinstance(event, TrialEnded))
    begun = [event for event in events[:first] if isinstance(event, GraphBegun)]
    assert len(begun) == 1 + beside


@pytest.mark.parametrize("compile_s", [63.0, 64.0])
def test_a_graph_that_comes_while_others_are_compared_is_measured_too(tmp_path: Path, compile_s: float) -> None:
    """The graph of Swin-T took 72 s of a budget of 120 s, and trained twice as fast as all that was compared."""
    _, decision, events = searched_behind(tmp_path, budget_s=68, compile_s=compile_s)
    begun = next(place for place, event in enumerate(events) if isinstance(event, ComparisonStarted))
    assert not any(policy.compile != "off" for policy in tried(events[:begun]))
    assert graphs_in(events)
    assert decision.policy.compile != "off"
    last = [event for event in events if isinstance(event, TrialEnded | SearchEnded)][-1]
    assert isinstance(last, SearchEnded)


def test_a_graph_that_fails_is_a_failed_trial_and_compiling_is_given_up(tmp_path: Path) -> None:
    class Broken(Behind):
        def compiled(self, wait_s: float = 0.0) -> Mapping[Policy, float | Failure]:
            return dict.fromkeys(super().compiled(wait_s), NO_COMPILER)

    evaluator, decision, events = searched_behind(tmp_path, evaluator=Broken("resnet50", graphs_at_once=4))
    assert decision.policy.compile == "off"
    failed = [
        event.trial.outcome for event in events if isinstance(event, TrialEnded) and event.trial.policy.compile != "off"
    ]
    assert failed
    assert set(failed) == {NO_COMPILER}
    assert len(evaluator.compiled_behind) <= 6
    assert any(finding.code == "compile-failed" for finding in decision.findings)


def test_a_graph_that_was_stopped_to_free_memory_is_compiled_again(tmp_path: Path) -> None:
    class Stopping(Behind):
        def measure_alone(self, policy: Policy, effort: Effort) -> Outcome:
            self.in_background.clear()
            return super().measure(policy, effort)

        def measure(self, policy: Policy, effort: Effort) -> Outcome:
            return self.measure_alone(policy, effort) if len(self.measured) == 3 else super().measure(policy, effort)

    evaluator, decision, events = searched_behind(
        tmp_path, evaluator=Stopping("resnet50", noise=0.002, graphs_at_once=2)
    )
    again = [policy for policy in evaluator.compiled_behind if evaluator.compiled_behind.count(policy) > 1]
    assert again
    assert set(again) <= set(graphs_in(events))
    assert decision.policy.compile != "off"


def test_a_study_that_is_resumed_compiles_only_what_it_has_not_measured(tmp_path: Path) -> None:
    _, _, events = searched_behind(tmp_path)
    evaluator, _, _ = searched_behind(tmp_path)
    assert not set(graphs_in(events)) & set(evaluator.compiled_behind)


def test_what_compiling_took_stands_with_the_trial_and_in_the_finding(tmp_path: Path) -> None:
    _, decision, events = searched_behind(tmp_path)
    trials = [event.trial for event in events if isinstance(event, TrialEnded) and event.trial.policy.compile != "off"]
    assert [trial.seconds for trial in trials] == pytest.approx([31.5] * len(trials))
    assert all(isinstance(trial.outcome, Measurement) and trial.outcome.startup_s == 30.0 for trial in trials)
    assert next(f for f in decision.findings if f.code == "compile-pays").figures["compile_s"] == 30.0


def test_nothing_compiles_in_the_background_while_the_largest_batch_is_looked_for(tmp_path: Path) -> None:
    beside: list[int] = []

    class Alone(Behind):
        def measure_alone(self, policy: Policy, effort: Effort) -> Outcome:
            beside.append(len(self.in_background))
            return super().measure(policy, effort)

    searched_behind(tmp_path, evaluator=Alone("resnet50", noise=0.002, graphs_at_once=4), batch_size="auto")
    assert beside
    assert not any(beside)


@pytest.mark.parametrize("graphs_at_once", [0, 4])
def test_a_baseline_that_is_compiled_is_measured_first(tmp_path: Path, graphs_at_once: int) -> None:
    baseline = Policy(compile="default")
    evaluator = Behind("resnet50", noise=0.002, graphs_at_once=graphs_at_once)
    _, decision, events = searched_behind(tmp_path, evaluator=evaluator, baseline=baseline)
    assert tried(events)[0] == baseline
    assert decision.baseline.policy == baseline


def test_a_graph_that_lacked_memory_beside_others_is_compiled_once_more_in_its_trial(tmp_path: Path) -> None:
    class Crowded(Behind):
        def compiled(self, wait_s: float = 0.0) -> Mapping[Policy, float | Failure]:
            return dict.fromkeys(super().compiled(wait_s), Failure(kind="oom", message="CUDA out of memory"))

    _, decision, events = searched_behind(
        tmp_path, evaluator=Crowded("resnet50", noise=0.002, graphs_at_once=4), compile_s=20.0
    )
    graphs = [
        event.trial for event in events if isinstance(event, TrialEnded) and event.trial.policy in graphs_in(events)
    ]
    assert graphs
    assert all(isinstance(trial.outcome, Measurement) for trial in graphs)
    assert decision.policy.compile != "off"


def test_no_further_graph_is_waited_for_in_the_time_of_the_comparison(tmp_path: Path) -> None:
    """With 300 s three of four answers came from one process: time went by for a ninth graph (reports/h200/foreign)."""
    _, decision, _ = searched_behind(tmp_path, compile_s=30.0)
    assert decision.speedup.launches >= 2
    assert not decision.provisional


def test_no_graph_is_waited_for_that_may_not_be_measured(tmp_path: Path) -> None:
    _, decision, events = searched_behind(tmp_path, trials=3, compile_s=60.0)
    assert len(tried(events)) == 3
    assert "wait" not in {step["stage"] for step in decision.timeline}


@pytest.mark.parametrize("graphs_at_once", [0, 4])
def test_a_storage_that_fails_leaves_the_answer_from_memory(
    tmp_path: Path, graphs_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, forget = Store.tell, Store.forget
    kept: list[Trial] = []

    def full() -> None:
        if len(kept) >= 6:
            raise StudyError("the study cannot be read or written: No space left on device")

    def tell(store: Store, handle: Handle, trial: Trial) -> None:
        full()
        kept.append(trial)
        told(store, handle, trial)

    def give_back(store: Store, handle: Handle) -> None:
        full()
        forget(store, handle)

    monkeypatch.setattr(Store, "tell", tell)
    monkeypatch.setattr(Store, "forget", give_back)
    evaluator = Behind("resnet50", noise=0.002, graphs_at_once=graphs_at_once)
    _, decision, events = searched_behind(tmp_path, evaluator=evaluator, compile_s=60.0)
    assert len(decision.trials) >= 6
    assert "No space left" in next(event.because for event in events if isinstance(event, SearchEnded))


def test_one_that_is_interrupted_leaves_nothing_running_in_the_study(tmp_path: Path) -> None:
    evaluator = Behind("resnet50", noise=0.002, graphs_at_once=4)
    count = 0

    def interrupt(_: Policy) -> None:
        nonlocal count
        count += 1
        if count == 6:
            raise KeyboardInterrupt

    evaluator.interfere = interrupt
    with pytest.raises(TuningInterrupted) as interrupted:
        searched_behind(tmp_path, evaluator=evaluator, compile_s=60.0)
    assert interrupted.value.decision is not None
    tried_on = candidates_for(evaluator.prepare(1.0), Wanted(baseline=STOCK, pins={}))
    assert not open_store(tmp_path, tried_on.study_name, tried_on.stored or tried_on.space).running()


def test_the_known_good_policies_are_measured_and_compared_with_little_time_too(tmp_path: Path) -> None:
    _, decision, events = searched_behind(tmp_path, budget_s=60)
    recipes = {
        amp_recipe(dtype, memory_format=f) for dtype in ("bf16", "fp16") for f in ("contiguous", "channels_last")
    }
    assert recipes <= set(tried(events))
    assert decision.amp_recipe is not None
    assert decision.baseline.rows >= 2


def test_with_more_time_more_are_compared(tmp_path: Path) -> None:
    (_, short, _), (_, long, _) = (searched_behind(tmp_path / str(s), budget_s=s) for s in (60, 1500))
    few, many = ([one.rows for one in decision.verdict.contenders if one.rows > 1] for decision in (short, long))
    assert len(few) < len(many)
    assert min(few) >= 2


def test_interrupted_at_any_moment_there_is_the_best_answer_so_far(tmp_path: Path) -> None:
    class Interrupted(Behind):
        def measure(self, policy: Policy, effort: Effort) -> Outcome:
            if len(self.measured) == 9:
                raise KeyboardInterrupt
            return super().measure(policy, effort)

    with pytest.raises(TuningInterrupted) as caught:
        searched_behind(tmp_path, evaluator=Interrupted("resnet50", noise=0.002, graphs_at_once=4), compile_s=5.0)
    decision = caught.value.decision
    assert decision is not None
    assert decision.policy.compile != "off"
    assert decision.provisional


@pytest.mark.parametrize("fusable", [True, False])
def test_what_is_tried_first_has_the_fused_optimizer_where_there_is_one(*, fusable: bool) -> None:
    prepared = RecordedEvaluator("resnet50").prepare(1.0)
    prepared = replace(prepared, subject=replace(prepared.subject, fusable=fusable))
    first = candidates_for(prepared, Wanted(baseline=STOCK, pins={})).first
    tried = [policy for policy in first if policy.fp32_math == "tf32" and policy.autocast == "off"]
    assert {policy.memory_format for policy in tried} == {"contiguous", "channels_last"}
    assert {policy.fused_optimizer for policy in tried} == {fusable}
