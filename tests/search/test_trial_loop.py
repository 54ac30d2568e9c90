"""In which order policies are tried: the cheap before the dear, the best of them compiled first."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
from measurements import took
from simulated.recorded import RecordedEvaluator, recorded_ms
from test_pipeline import request_in

from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.decide.decision import Decision
from amptune.search.events import Event, SearchEnded, TrialEnded
from amptune.search.pipeline import tune_with
from amptune.search.sampler.study import Study
from amptune.search.space.candidates import Wanted, candidates_for
from amptune.search.table.objective import THROUGHPUT, Yardstick, objective_of
from amptune.search.table.trial import Trial
from amptune.search.trial_loop import _effort, _least_s, _of_two

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


def searched(
    folder: Path, evaluator: RecordedEvaluator | None = None, budget_s: float = 400, **wanted: Any
) -> tuple[Decision, list[Event]]:
    evaluator = evaluator or Compiling("resnet50", noise=0.002)
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
    best = min(policies[:first], key=lambda policy: recorded_ms("resnet50", policy))
    assert (policies[first].autocast, policies[first].memory_format) == (best.autocast, best.memory_format)
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


@pytest.mark.parametrize(("seconds", "least_s"), [((), 25.0), ((9.0,), 9.0), ((60.0,), 25.0), ((60.0, 40.0), 40.0)])
def test_a_small_model_that_compiles_soon_is_not_thought_dear(seconds: tuple[float, ...], least_s: float) -> None:
    failed = Failure(kind="error", message="")
    compiled = Policy(compile="default")
    trials = [Trial(number=i, policy=compiled, outcome=failed, seconds=each) for i, each in enumerate(seconds)]
    eager = Trial(number=9, policy=Policy(), outcome=failed, seconds=1.0)
    study = SimpleNamespace(trials=[eager, *trials])
    assert _least_s(cast("Study", study), replace(compiled, autocast="bf16"), 25.0) == least_s


def test_a_compiled_policy_that_is_measured_twice_keeps_what_compiling_it_took() -> None:
    first = took(9.0, startup_s=30.0, graph_breaks=("print",))
    kept = _of_two(first, replace(first, step_ms=(5.0,) * 5, startup_s=0.0, graph_breaks=()))
    assert isinstance(kept, Measurement)
    assert (kept.median_ms, kept.startup_s, kept.graph_breaks) == (5.0, 30.0, ("print",))


def test_compiling_is_given_up_where_it_cannot_be_done(tmp_path: Path) -> None:
    evaluator = Compiling(
        "resnet50", noise=0.002, interfere=lambda policy: NO_COMPILER if policy.compile != "off" else None
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
        "resnet50", noise=0.002, interfere=lambda policy: NO_GRAPHS if policy.compile == "reduce-overhead" else None
    )
    decision, _ = searched(tmp_path, evaluator)
    assert decision.policy.compile == "default"


def test_a_pinned_mode_is_tried_on_the_plain_recipes_first(tmp_path: Path) -> None:
    _, events = searched(tmp_path, pins={"compile": "default"})
    compiled = [policy for policy in tried(events) if policy.compile == "default"]
    assert compiled[0] == Policy(compile="default")
    assert {Policy(compile="default", autocast=dtype) for dtype in ("bf16", "fp16")} <= set(compiled[:8])


def test_the_search_ends_when_nothing_that_is_left_is_worth_its_time(tmp_path: Path) -> None:
    _, events = searched(tmp_path, budget_s=4000)
    ended = next(event for event in events if isinstance(event, SearchEnded))
    assert ended.because == "no policy that is left promises to be better"
    assert ended.trials < 120


RECIPES = [amp_recipe(dtype, memory_format=f) for dtype in ("bf16", "fp16") for f in ("contiguous", "channels_last")]


class CompilingBesideOneAnother(Compiling):
    """Five graphs at once take 45 s. Eager steps wait for the host, so that they tell nothing of the graphs."""

    graphs_s = 45.0
    fails_after_s = math.inf
    trial_s = 1.5

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        self.clock.advance(self.trial_s - 1.5)
        return super().measure(policy, effort)

    def compile(self, policies: Sequence[Policy], limit_s: float) -> Mapping[Policy, float]:
        self.compiled.append(tuple(policies))
        self.clock.advance(min(self.graphs_s, self.fails_after_s, limit_s))
        if min(limit_s, self.fails_after_s) < self.graphs_s:
            return {}
        self.measured += policies  # their graphs are known from now on
        return dict.fromkeys(policies, 40.0)


def waiting_for_the_host(policy: Policy) -> float:
    if policy.compile == "off":
        eager = {"off": 8.0, "bf16": 10.0, "fp16": 11.0}
        return eager[policy.autocast] + (policy.memory_format == "contiguous")
    graph = {"off": 6.0, "bf16": 3.0, "fp16": 4.0}
    return graph[policy.autocast] - (policy.memory_format == "contiguous")


def searched_beside(folder: Path, budget_s: float = 180, **wanted: Any) -> tuple[Any, Decision, list[Event]]:
    peak_mib = wanted.pop("peak_mib", lambda _: 5000.0)
    evaluator = CompilingBesideOneAnother("resnet50", noise=0.002, graphs_at_once=5, peak_mib=peak_mib)
    evaluator.graphs_s, evaluator.trial_s = wanted.pop("graphs_s", 45.0), wanted.pop("trial_s", 1.5)
    evaluator.fails_after_s = wanted.pop("fails_after_s", math.inf)
    evaluator.true_ms = waiting_for_the_host
    objective = objective_of(wanted.pop("objective", "throughput"))
    request = request_in(folder, evaluator.clock, trials=wanted.pop("trials", None), **wanted)
    budget = replace(request.budget, seconds=budget_s)
    events: list[Event] = []
    return evaluator, tune_with(evaluator, replace(request, budget=budget, objective=objective), events.append), events


def test_where_there_are_the_cores_a_graph_of_each_kind_is_compiled_behind_the_recipes(tmp_path: Path) -> None:
    evaluator, decision, events = searched_beside(tmp_path)
    (together,) = evaluator.compiled
    kinds = [(policy.autocast, policy.memory_format) for policy in together]
    layers = [(dtype, "channels_last") for dtype in ("bf16", "fp16", "off")]
    assert kinds == [*layers, ("bf16", "contiguous"), ("fp16", "contiguous")]
    assert {(policy.compile, policy.fused_optimizer) for policy in together} == {("reduce-overhead", True)}
    first, graphs, _ = around_the_graphs(events)
    assert graphs == list(together)
    assert first[0] == STOCK
    assert {policy for policy in first[1:] if not policy.cuda_graphs} == set(RECIPES)
    assert {(policy.autocast, policy.memory_format) for policy in first if policy.cuda_graphs} == {
        ("bf16", "channels_last"),
        ("fp16", "channels_last"),
        ("bf16", "contiguous"),
        ("off", "contiguous"),
    }
    winner = decision.policy
    assert (winner.autocast, winner.memory_format, winner.compile) == ("bf16", "contiguous", "reduce-overhead")


def around_the_graphs(events: list[Event]) -> tuple[list[Policy], list[Policy], list[Policy]]:
    """What was tried before the first graphs, those, and what was tried behind them."""
    policies = tried(events)
    first = list(takewhile(lambda policy: policy.compile == "off", policies))
    graphs = list(takewhile(lambda policy: policy.compile != "off", policies[len(first) :]))
    return first, graphs, policies[len(first) + len(graphs) :]


def test_graphs_that_are_not_ready_in_their_time_leave_policies_to_compare(tmp_path: Path) -> None:
    """As on a host so slow that DenseNet-161 lost 95 of 215 s, and had one policy besides stock PyTorch."""
    evaluator, decision, events = searched_beside(tmp_path, budget_s=200, graphs_s=1000.0)
    assert len(evaluator.compiled) == 1
    assert decision.baseline.rows >= 2
    assert decision.speedup.value > 1.1, decision.policy
    assert len(tried(events)) > 12, "what was lost is lost to the comparisons too"


@pytest.mark.parametrize(
    ("budget_s", "graphs_s", "trial_s"),
    [(120, 60, 4), (120, 62, 3), (120, 45, 6), (240, 80, 15), (215, 60, 20)],
)
def test_all_that_was_compiled_is_measured_though_it_took_longer_than_expected(
    tmp_path: Path, budget_s: float, graphs_s: float, trial_s: float
) -> None:
    evaluator, decision, events = searched_beside(tmp_path, budget_s, graphs_s=graphs_s, trial_s=trial_s)
    (together,) = evaluator.compiled
    assert set(together) <= set(tried(events))
    assert (decision.policy.autocast, decision.policy.compile) == ("bf16", "reduce-overhead")


def test_where_trials_take_long_the_graphs_come_right_behind_the_baseline(tmp_path: Path) -> None:
    evaluator, _, events = searched_beside(tmp_path, 215, graphs_s=60, trial_s=20)
    assert tried(events)[:6] == [STOCK, *evaluator.compiled[0]]


def test_no_graphs_are_chosen_before_the_cheap_trials_though_the_recipes_took_as_long(tmp_path: Path) -> None:
    _, _, events = searched_beside(tmp_path, 1200, trial_s=14)
    _, _, behind = around_the_graphs(events)
    assert len(list(takewhile(lambda policy: policy.compile == "off", behind))) >= 3


@pytest.mark.parametrize(("trial_s", "graphs"), [(1.5, 5), (20, 2)])
def test_no_more_are_compiled_than_can_be_measured(tmp_path: Path, trial_s: float, graphs: int) -> None:
    evaluator, _, _ = searched_beside(tmp_path, 100, trial_s=trial_s)
    assert [len(together) for together in evaluator.compiled] == [graphs]


def test_graphs_that_fail_at_once_cost_little_time(tmp_path: Path) -> None:
    """Only what was lost of the time is lost to the rest."""
    failing = searched_beside(tmp_path / "failing", 120, graphs_s=math.inf, fails_after_s=2.0)[1]
    late = searched_beside(tmp_path / "late", 120, graphs_s=math.inf)[1]
    assert failing.seconds < late.seconds


def test_what_was_compiled_ahead_is_not_compiled_once_more_for_being_the_best_of_its_kind(tmp_path: Path) -> None:
    evaluator, _, events = searched_beside(tmp_path, budget_s=100)
    compiled = [policy for policy in tried(events) if policy.compile != "off"]
    assert {(p.autocast, p.memory_format) for p in compiled[5:]} <= {("off", "contiguous")}
    assert len(evaluator.compiled) == 1


def test_the_known_good_policies_are_measured_and_compared_though_graphs_took_the_time(tmp_path: Path) -> None:
    evaluator, decision, events = searched_beside(tmp_path, budget_s=105)
    assert len(evaluator.compiled) == 1
    assert set(RECIPES) <= set(tried(events))
    assert decision.amp_recipe is not None
    assert {STOCK, decision.amp_recipe.policy} < {contender.policy for contender in decision.finalists}


def test_with_little_time_fewer_are_compared_so_that_each_is_measured_several_times(tmp_path: Path) -> None:
    (_, short, _), (_, long, _) = (searched_beside(tmp_path / str(s), budget_s=s) for s in (105, 1500))
    few, many = ([one.rows for one in decision.verdict.contenders if one.rows > 1] for decision in (short, long))
    assert len(few) < len(many)
    assert short.baseline.rows >= 3
    assert min(few) >= 2


def test_cheap_trials_have_their_time_still(tmp_path: Path) -> None:
    """If the graphs had used up the time of cheap trials, none would come before dear ones."""
    _, _, events = searched_beside(tmp_path, budget_s=300)
    _, _, behind = around_the_graphs(events)
    eager = list(takewhile(lambda policy: policy.compile == "off", behind))
    assert len(eager) >= 7


def test_a_study_that_is_resumed_compiles_only_what_it_has_not_measured(tmp_path: Path) -> None:
    searched_beside(tmp_path)
    evaluator, _, _ = searched_beside(tmp_path)
    assert [policy for together in evaluator.compiled for policy in together if policy.autocast != "off"] == []


def test_where_memory_is_to_be_saved_no_graphs_are_compiled_ahead(tmp_path: Path) -> None:
    evaluator, _, _ = searched_beside(tmp_path, objective="memory")
    assert evaluator.compiled == []


def test_what_was_compiled_ahead_is_charged_with_it(tmp_path: Path) -> None:
    evaluator, decision, events = searched_beside(tmp_path)
    trials = [event.trial for event in events if isinstance(event, TrialEnded)]
    ahead = [trial for trial in trials if trial.policy in evaluator.compiled[0]]
    assert [trial.seconds for trial in ahead] == pytest.approx([41.5] * 5)
    assert all(isinstance(trial.outcome, Measurement) and trial.outcome.startup_s == 40.0 for trial in ahead)
    assert next(f for f in decision.findings if f.code == "compile-pays").figures["compile_s"] == 40.0


@pytest.mark.parametrize(("budget_s", "wanted"), [(20, {}), (180, {"trials": 4})])
def test_without_the_time_or_the_trials_for_several_graphs_one_is_compiled(
    tmp_path: Path, budget_s: float, wanted: dict[str, Any]
) -> None:
    evaluator, _, _ = searched_beside(tmp_path, budget_s, **wanted)
    assert evaluator.compiled == []


def test_no_more_are_compiled_beside_one_another_than_fit_into_memory(tmp_path: Path) -> None:
    """Each is reckoned to need 1.5 times its eager peak of 30,000 MiB, of 143,000."""
    evaluator, decision, _ = searched_beside(tmp_path, peak_mib=lambda _: 30_000.0)
    assert [len(together) for together in evaluator.compiled] == [3]
    assert decision.policy.compile == "reduce-overhead"
    evaluator, decision, _ = searched_beside(tmp_path / "large", peak_mib=lambda _: 60_000.0)
    assert evaluator.compiled == []
    assert decision.policy.compile == "reduce-overhead"


def test_what_was_not_done_in_time_is_compiled_in_its_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompilingBesideOneAnother, "compile", lambda *_: {})
    _, decision, events = searched_beside(tmp_path)
    assert [policy for policy in tried(events) if policy.compile != "off"]
    assert decision.policy.compile == "reduce-overhead"


@pytest.mark.parametrize("pins", [{"fused_optimizer": "true"}, {"autocast": "bf16"}])
def test_policies_outside_a_pinned_space_take_time_too(tmp_path: Path, pins: dict[str, str]) -> None:
    _, decision, _ = searched_beside(tmp_path, budget_s=105, pins=pins)
    assert len(decision.finalists) <= 5
    assert decision.amp_recipe is not None


@pytest.mark.parametrize(("step_ms", "warmup_s"), [(10.0, 1.0), (600.0, 2.4), (3000.0, 5.0)])
def test_a_short_budget_still_warms_up_for_some_steps(step_ms: float, warmup_s: float) -> None:
    """Of 60 s a sixtieth, or four steps: a step time is steady where three agree."""
    trial = Trial(number=0, policy=STOCK, outcome=took(step_ms), seconds=2.0)
    study = cast("Study", SimpleNamespace(trials=[trial], yardstick=Yardstick(THROUGHPUT, took(step_ms))))
    assert _effort(study, amp_recipe("bf16"), 60.0, 60.0).warmup_s == pytest.approx(warmup_s)


@pytest.mark.parametrize("fusable", [True, False])
def test_what_is_tried_first_has_the_fused_optimizer_where_there_is_one(*, fusable: bool) -> None:
    prepared = RecordedEvaluator("resnet50").prepare(1.0)
    prepared = replace(prepared, subject=replace(prepared.subject, fusable=fusable))
    first = candidates_for(prepared, Wanted(baseline=STOCK, pins={})).first
    tried = [policy for policy in first if policy.fp32_math == "tf32" and policy.autocast == "off"]
    assert {policy.memory_format for policy in tried} == {"contiguous", "channels_last"}
    assert {policy.fused_optimizer for policy in tried} == {fusable}
