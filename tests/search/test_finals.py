"""The finals choose, the ablation confirms: driven by made-up step times."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from simulated.recorded import RecordedEvaluator, recorded_ms
from test_pipeline import request_in

from amptune.measure.results.outcome import Failure
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.decide.decision import Decision
from amptune.search.decide.samples import FILE_NAME, from_line, keeping_samples
from amptune.search.events import ComparisonStarted, ContenderMeasured, Event
from amptune.search.pipeline import TuningInterrupted, tune_with
from amptune.search.space.candidates import Wanted, candidates_for
from amptune.search.table.ratio import ENOUGH_LAUNCHES

BEST = amp_recipe("fp16", memory_format="channels_last")


def tuned_where(
    true_ms: Callable[[Policy], float], folder: Path, *, noise: float = 0.002, **wanted: object
) -> tuple[Decision, list[Event], RecordedEvaluator]:
    evaluator = RecordedEvaluator("resnet50", noise=noise, true_ms=true_ms)
    events: list[Event] = []
    return tune_with(evaluator, request_in(folder, **wanted), events.append), events, evaluator  # type: ignore[arg-type]


def codes(decision: Decision) -> list[str]:
    return [finding.code for finding in decision.findings]


def test_what_each_setting_of_the_winner_buys_stands_in_the_evidence(tmp_path: Path) -> None:
    decision, _, _ = tuned_where(lambda policy: recorded_ms("resnet50", policy), tmp_path)
    bought = decision.policy_file.evidence["ablation"]
    assert {"autocast", "memory_format"} <= set(bought)
    without = amp_recipe("fp16")
    expected = recorded_ms("resnet50", without) / recorded_ms("resnet50", BEST)
    assert bought["memory_format"]["buys"] == pytest.approx(expected, rel=0.02)
    low, high = bought["memory_format"]["buys_ci95"]
    assert low / 1.005 <= expected <= high * 1.005  # 95 of 100 intervals hold it; all come near


def test_a_setting_that_buys_nothing_is_dropped_and_the_rest_measured_again(tmp_path: Path) -> None:
    """Seen in search and finals as much faster: only the ablation tells that the plan search buys nothing."""
    events: list[Event] = []

    def true_ms(policy: Policy) -> float:
        ablating = any(isinstance(event, ComparisonStarted) and event.stage == "ablation" for event in events)
        base = 20.0 if policy.autocast == "fp16" and policy.memory_format == "channels_last" else 40.0
        return base * (0.9 if policy.cudnn_benchmark and not ablating else 1.0)

    evaluator = RecordedEvaluator("resnet50", noise=0.002, true_ms=true_ms)
    decision = tune_with(evaluator, request_in(tmp_path), events.append)
    assert (decision.policy.autocast, decision.policy.memory_format) == ("fp16", "channels_last")
    assert not decision.policy.cudnn_benchmark
    assert "setting-dropped" in codes(decision)
    stages = [event for event in events if isinstance(event, ComparisonStarted) and event.stage == "ablation"]
    assert len(stages) >= 2
    assert decision.speedup.value == pytest.approx(2.0, rel=0.01)


def test_something_faster_one_step_from_the_winner_is_found_though_the_search_never_tried_it(tmp_path: Path) -> None:
    def true_ms(policy: Policy) -> float:
        base = 20.0 if policy.autocast == "fp16" and policy.memory_format == "channels_last" else 40.0
        return base * (0.9 if policy.cudnn_benchmark else 1.0)

    decision, events, _ = tuned_where(true_ms, tmp_path, trials=6, pins={"cuda_graphs": "false"})
    assert not any(trial.policy.cudnn_benchmark for trial in decision.trials)
    assert replace(decision.policy, batch_size=None) == replace(BEST, cudnn_benchmark=True)
    assert decision.speedup.value == pytest.approx(40 / 18, rel=0.01)
    (refined,) = (finding for finding in decision.findings if finding.code == "refined")
    assert "cudnn benchmark was found to be faster: 1.11×" in str(refined)
    stages = [event.stage for event in events if isinstance(event, ComparisonStarted)]
    assert stages[0] == "finals"
    assert set(stages[1:-1]) == {"refinement"}
    assert stages[-1] == "ablation"


def test_what_is_found_beside_the_winner_claims_nothing_before_it_is_measured_anew(tmp_path: Path) -> None:
    """A neighbour that was only lucky beside the winner does not become the policy."""
    stage = {"now": ""}

    def true_ms(policy: Policy) -> float:
        lucky = policy.cudnn_benchmark and stage["now"] == "refinement"
        return (20.0 if policy.autocast == "fp16" else 40.0) * (0.9 if lucky else 1.0)

    evaluator = RecordedEvaluator("resnet50", noise=0.002, true_ms=true_ms)

    def watch(event: Event) -> None:
        if isinstance(event, ComparisonStarted):
            stage["now"] = event.stage

    decision = tune_with(evaluator, request_in(tmp_path, trials=6), watch)
    assert "refined" in codes(decision)
    assert decision.speedup.value == pytest.approx(2.0, rel=0.01)
    assert not decision.policy.cudnn_benchmark


@pytest.mark.parametrize(
    ("pins", "setting", "value"),
    [
        ({"memory_format": "channels_last"}, "memory_format", "channels_last"),
        ({"autocast": "fp16"}, "autocast", "fp16"),
        ({"cudnn_benchmark": "true"}, "cudnn_benchmark", True),
    ],
)
def test_no_refinement_leaves_what_the_user_pinned(
    tmp_path: Path, pins: dict[str, str], setting: str, value: object
) -> None:
    """Every other choice would be faster."""

    def true_ms(policy: Policy) -> float:
        return (20.0 if getattr(policy, setting) == value else 15.0) if policy != STOCK else 40.0

    decision, _, _ = tuned_where(true_ms, tmp_path, pins=pins)
    assert getattr(decision.policy, setting) == value
    assert decision.speedup.value == pytest.approx(2.0, rel=0.01)


def test_the_baseline_is_no_refinement_of_a_policy_that_was_only_lucky(tmp_path: Path) -> None:
    stage = {"now": ""}

    def true_ms(policy: Policy) -> float:
        lucky = stage["now"] in ("", "finals") and policy.autocast == "bf16"
        return 30.0 if lucky else 40.0 if policy == STOCK else 44.0

    evaluator = RecordedEvaluator("resnet50", noise=0.002, true_ms=true_ms)
    compared: dict[str, set[Policy]] = {"finals": set(), "refinement": set(), "ablation": set()}

    def watch(event: Event) -> None:
        if isinstance(event, ComparisonStarted):
            stage["now"] = event.stage
            compared[event.stage] |= set(event.policies)

    decision = tune_with(evaluator, request_in(tmp_path, trials=20), watch)
    assert compared["refinement"]
    assert STOCK not in compared["refinement"]
    assert decision.verdict.keeps_the_baseline
    assert "not-confirmed" in codes(decision)


def test_a_neighbour_that_fails_does_not_prolong_the_refinement(tmp_path: Path) -> None:
    stage = {"now": ""}
    oom = Failure(kind="oom", message="no memory")

    def interfere(policy: Policy) -> Failure | None:
        return oom if stage["now"] == "refinement" and policy.cudnn_benchmark else None

    evaluator = RecordedEvaluator("resnet50", noise=0.002, interfere=interfere)
    launches: list[int] = []

    def watch(event: Event) -> None:
        if isinstance(event, ComparisonStarted):
            stage["now"] = event.stage
        if isinstance(event, ContenderMeasured) and event.stage == "refinement":
            launches.append(event.launch)

    decision = tune_with(evaluator, request_in(tmp_path, trials=8), watch)
    assert replace(decision.policy, batch_size=None) == BEST
    assert max(launches) < ENOUGH_LAUNCHES


def test_a_winner_that_fails_in_its_refinement_is_not_measured_any_more(tmp_path: Path) -> None:
    stage = {"now": ""}
    broken = Failure(kind="nonfinite", message="the loss is nan")
    ablated: list[Policy] = []

    def interfere(policy: Policy) -> Failure | None:
        return broken if stage["now"] in ("refinement", "ablation") and policy == BEST else None

    evaluator = RecordedEvaluator("resnet50", noise=0.002, interfere=interfere)

    def watch(event: Event) -> None:
        if isinstance(event, ComparisonStarted):
            stage["now"] = event.stage
            ablated.extend(event.policies if event.stage == "ablation" else ())

    pins = {"fused_optimizer": "false", "cuda_graphs": "false"}
    decision = tune_with(evaluator, request_in(tmp_path, trials=8, pins=pins), watch)
    assert BEST not in ablated
    assert decision.policy.autocast == "bf16"
    assert decision.speedup.value > 1.9


def test_a_winner_that_was_only_lucky_is_not_confirmed(tmp_path: Path) -> None:
    """The claim comes from measurements that had no part in choosing."""
    stage = {"now": ""}

    def true_ms(policy: Policy) -> float:
        lucky = stage["now"] != "ablation" and policy.autocast == "bf16"
        return 36.0 if lucky else 40.0

    evaluator = RecordedEvaluator("resnet50", noise=0.002, true_ms=true_ms)

    def watch(event: Event) -> None:
        if isinstance(event, ComparisonStarted):
            stage["now"] = event.stage

    decision = tune_with(evaluator, request_in(tmp_path), watch)
    assert decision.verdict.keeps_the_baseline
    assert "not-confirmed" in codes(decision)
    assert decision.policy_file.evidence["speedup"] == 1.0


def test_a_pinned_setting_is_kept_even_where_it_buys_nothing(tmp_path: Path) -> None:
    def true_ms(policy: Policy) -> float:
        return 20.0 if policy.autocast == "fp16" else 40.0

    decision, _, _ = tuned_where(true_ms, tmp_path, pins={"memory_format": "channels_last"})
    assert decision.policy.memory_format == "channels_last"
    assert decision.policy_file.evidence["ablation"]["memory_format"]["buys"] == pytest.approx(1.0, rel=0.01)


def test_stock_pytorch_is_compared_where_the_baseline_is_something_else(tmp_path: Path) -> None:
    decision, _, _ = tuned_where(
        lambda policy: recorded_ms("resnet50", policy), tmp_path, baseline=amp_recipe("bf16"), trials=20
    )
    assert STOCK in {contender.policy for contender in decision.finalists}


def test_every_contender_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    _, _, evaluator = tuned_where(lambda policy: recorded_ms("resnet50", policy), tmp_path)
    assert all(len(set(contenders)) == len(contenders) >= 2 for contenders in evaluator.launched)
    assert len(evaluator.launched) >= 6


def test_the_raw_samples_of_the_comparisons_are_kept(tmp_path: Path) -> None:
    events: list[Event] = []
    evaluator = RecordedEvaluator("resnet50")
    tune_with(evaluator, request_in(tmp_path), keeping_samples(tmp_path, events.append))
    import json

    kept = [from_line(json.loads(line)) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert kept == [event for event in events if event in kept]
    assert len(kept) > 20
    assert {one.stage for one in kept} == {"finals", "refinement", "ablation"}


@pytest.mark.parametrize(
    ("pins", "least"),
    [
        ({"autocast": "bf16"}, 1.9),
        ({"autocast": "off"}, 1.35),
        ({"fp32_exclusions": "2"}, 1.8),
    ],
)
def test_a_pin_keeps_what_it_excludes_from_knocking_out_what_it_allows(
    tmp_path: Path, pins: dict[str, str], least: float
) -> None:
    decision, _, _ = tuned_where(lambda policy: recorded_ms("resnet50", policy), tmp_path, pins=pins)
    assert decision.speedup.value > least
    if "autocast" in pins:
        assert decision.policy.autocast == pins["autocast"]


def test_a_winner_that_fails_in_its_ablation_leaves_it_to_the_next_of_the_finals(tmp_path: Path) -> None:
    stage = {"now": ""}
    broken = Failure(kind="nonfinite", message="the loss is nan")

    def interfere(policy: Policy) -> Failure | None:
        return broken if stage["now"] == "ablation" and policy.autocast == "fp16" else None

    evaluator = RecordedEvaluator("resnet50", noise=0.002, interfere=interfere)

    def watch(event: Event) -> None:
        if isinstance(event, ComparisonStarted):
            stage["now"] = event.stage

    decision = tune_with(evaluator, request_in(tmp_path), watch)
    assert decision.policy.autocast == "bf16"
    assert decision.speedup.value > 1.9
    assert "failed-in-ablation" in codes(decision)


def test_what_failed_in_the_finals_does_not_come_back_with_its_trial(tmp_path: Path) -> None:
    stage = {"now": ""}
    broken_ones: set[Policy] = set()
    broken = Failure(kind="nonfinite", message="the loss is nan")

    def interfere(policy: Policy) -> Failure | None:
        if not stage["now"] or policy.autocast == "bf16":
            return None
        broken_ones.add(policy)
        return broken

    evaluator = RecordedEvaluator("resnet50", noise=0.002, interfere=interfere)

    def watch(event: Event) -> None:
        if isinstance(event, ComparisonStarted):
            stage["now"] = event.stage

    decision = tune_with(evaluator, request_in(tmp_path), watch)
    assert decision.provisional
    assert replace(decision.policy, batch_size=None) not in broken_ones
    assert BEST in broken_ones


def test_a_machine_that_breaks_in_the_finals_loses_nothing(tmp_path: Path) -> None:
    def interfere(_: Policy) -> Failure | None:
        return Failure(kind="oom", message="gone") if len(evaluator.launched) > 5 else None

    evaluator = RecordedEvaluator("resnet50", noise=0.05, interfere=interfere)
    decision = tune_with(evaluator, request_in(tmp_path), lambda _: None)
    assert decision.policy_file.policy is not None


def test_an_interruption_early_in_the_finals_keeps_the_best_trial(tmp_path: Path) -> None:
    blocks: list[Event] = []

    def watch(event: Event) -> None:
        if isinstance(event, ContenderMeasured):
            blocks.append(event)
            if len(blocks) == 9:
                raise KeyboardInterrupt

    evaluator = RecordedEvaluator("resnet50", noise=0.002)
    with pytest.raises(TuningInterrupted) as caught:
        tune_with(evaluator, request_in(tmp_path), watch)
    decision = caught.value.decision
    assert decision is not None
    assert decision.provisional
    assert recorded_ms("resnet50", decision.policy) < 0.5 * recorded_ms("resnet50", STOCK)


def test_what_the_space_forbids_is_no_variant_to_end_with() -> None:
    candidates = candidates_for(RecordedEvaluator("resnet50").prepare(1.0), Wanted(baseline=STOCK, pins={}))
    assert candidates.allows(amp_recipe("bf16"))
    assert not candidates.allows(Policy(autocast="bf16", fp32_math="tf32"))
