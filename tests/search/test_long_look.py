"""Does a policy train like FP32? Made of curves that are made up, and driven by a recorded machine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulated.recorded import H200, RecordedEvaluator

from amptune.errors import HardwareMismatchError, NothingFeasibleError, StudyError, UserCodeError
from amptune.measure.numerics.long_comparison import CurvePair
from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import LossCurve
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.report.progress import describe
from amptune.search.events import Event
from amptune.search.gate.long_look import LongLook
from amptune.search.numerics_verification import verify_numerics
from amptune.search.pipeline import locked
from amptune.search.plan.budget import Budget

FP16 = amp_recipe("fp16")
STEPS, SEEDS = 200, 5


def curve(seed: int, times: float = 1.0, steps: int = STEPS, *, own: int = 0, **more: float) -> LossCurve:
    """A loss that falls, with the noise of its batches; another run of the seed, `own`, adds a little of its own."""
    data, rounding = np.random.default_rng(seed), np.random.default_rng((seed, own))
    fall = 0.2 + np.exp(-np.arange(steps) / 40)
    level = 1 + 0.02 * data.standard_normal()
    noise = 0.1 * data.standard_normal(steps) + (0.01 * rounding.standard_normal(steps) if own else 0.0)
    return LossCurve(losses=tuple(times * level * fall * (1 + noise)), evaluated=more.get("evaluated"))


def look(times: float = 1.0, seeds: int = SEEDS, **changed: object) -> LongLook:
    pairs = tuple(CurvePair(seed=i, fp32=curve(i), policy=curve(i, times, own=1)) for i in range(seeds))
    parts: dict[str, object] = {"policy": FP16, "fp32": STOCK, "name": "net", "hardware": H200}
    return LongLook(**{**parts, "steps": STEPS, "seeds": seeds, "pairs": pairs, **changed})  # type: ignore[arg-type]


def test_a_policy_whose_curves_lie_within_fp32s_seeds_trains_like_fp32() -> None:
    found = look()
    assert found.agreement == "met"
    assert found.findings[0].code == "trains-like-fp32"
    assert str(found.findings[0]).startswith("trains like FP32, over 200 steps and 5 seeds; at most, loss in ")
    assert len(found.findings) == 1


def test_a_loss_above_what_seeds_differ_by_is_not_like_fp32_and_the_worst_part_is_named() -> None:
    found = look(1.3)
    assert found.agreement == "missed"
    assert str(found.findings[0]).startswith("does not train like FP32: loss in ")
    assert "(±" in str(found.findings[0])
    assert "is allowed" in str(found.findings[0])
    assert found.findings[0].figures["difference"] > found.findings[0].figures["allowed_above"]


def test_a_loss_below_fp32s_is_harmless_until_it_must_be_another_loss() -> None:
    assert look(0.9).agreement == "met"
    assert look(0.3).agreement == "missed"


def test_a_fault_in_the_last_tenth_alone_is_seen() -> None:
    pairs = [
        replace(pair, policy=LossCurve(losses=(*pair.policy.losses[:180], *(2 * x for x in pair.policy.losses[180:]))))
        for pair in look().pairs
    ]
    found = look(pairs=tuple(pairs))
    assert found.agreement == "missed"
    assert "loss in steps 181 to 200" in str(found.findings[0])


def test_in_between_nobody_can_tell_and_more_seeds_are_asked_for() -> None:
    flat = [
        tuple(LossCurve(losses=(level,) * STEPS) for level in three) for three in ((1, 1.02, 0.98), (1.08, 1.04, 1))
    ]
    pairs = tuple(CurvePair(seed=i, fp32=own, policy=theirs) for i, (own, theirs) in enumerate(zip(*flat, strict=True)))
    found = look(pairs=pairs, seeds=3)
    assert found.agreement == "open"
    assert str(found.findings[0]).startswith("could not tell: loss in ")
    assert "the interval reaches beyond; give more --seeds" in str(found.findings[0])


def test_too_few_seeds_tell_nothing() -> None:
    found = look(seeds=2, stopped="the budget was spent")
    assert found.agreement == "open"
    assert str(found.findings[0]) == "could not tell: an answer needs 3 seeds (trained: 2); the budget was spent"


def test_too_few_steps_tell_nothing() -> None:
    pairs = tuple(CurvePair(seed=i, fp32=curve(i, steps=5), policy=curve(i, steps=5, own=1)) for i in range(SEEDS))
    found = look(pairs=pairs, stopped="the budget was spent")
    assert found.agreement == "open"
    assert str(found.findings[0]) == "could not tell: an answer needs 20 steps (trained: 5); the budget was spent"


def test_curves_that_were_cut_short_can_miss_but_not_meet() -> None:
    assert look(steps=2000, stopped="the budget was spent").agreement == "open"
    assert "the first 200 of 2,000 steps are like FP32's" in str(look(steps=2000).findings[0])
    assert look(1.3, steps=2000).agreement == "missed"


@pytest.mark.parametrize(
    ("policys", "tolerance", "agreement"), [(0.9, None, "missed"), (0.9, 0.1, "met"), (0.95, 0, "met")]
)
def test_what_evaluate_gives_is_held_to_fp32s_seeds_or_the_tolerance(
    policys: float, tolerance: float | None, agreement: str
) -> None:
    pairs = tuple(
        CurvePair(
            seed=i, fp32=curve(i, evaluated=0.95 + 0.001 * i), policy=curve(i, own=1, evaluated=policys + 0.001 * i)
        )
        for i in range(SEEDS)
    )
    found = look(pairs=pairs, tolerance=tolerance)
    assert found.agreement == agreement
    assert agreement == "met" or "evaluate(model) is 0.902" in str(found.findings[0])


def test_a_buffer_that_ends_elsewhere_is_not_like_fp32() -> None:
    def with_buffer(one: LossCurve, value: float) -> LossCurve:
        return replace(one, buffers={"norm.average": np.array([value], dtype=np.float32)})

    pairs = tuple(
        CurvePair(seed=p.seed, fp32=with_buffer(p.fp32, 1 + p.seed / 100), policy=with_buffer(p.policy, 0.5))
        for p in look().pairs
    )
    found = look(pairs=pairs)
    assert found.agreement == "missed"
    assert "the buffer norm.average ends 51% off FP32's, where FP32's seeds are 3% apart;" in str(found.findings[0])


def test_seeds_that_do_not_differ_are_said_so() -> None:
    same = tuple(CurvePair(seed=i, fp32=curve(0), policy=curve(0, 1.001)) for i in range(SEEDS))
    found = look(pairs=same)
    assert [finding.code for finding in found.findings] == ["trains-like-fp32", "no-spread"]
    assert "so 1.5% is allowed" in str(found.findings[1])


# --- on a recorded machine --------------------------------------------------------------------------------------------


def recorded(policy: Policy, steps: int, seed: int) -> LossCurve | Failure:
    return curve(seed, steps=steps, own=int(policy != STOCK))


def verified(
    folder: Path,
    curves: Callable[[Policy, int, int], LossCurve | Failure] = recorded,
    *,
    seconds: float = 100.0,
    events: list[Event] | None = None,
    labels: Mapping[str, str] | None = None,
) -> LongLook:
    evaluator = RecordedEvaluator("resnet50", curve=curves)
    return verify_numerics(
        PolicyFile(policy=FP16, valid_for=labels or {}),
        "amptune.workload.zoo:resnet50",
        steps=STEPS,
        seeds=SEEDS,
        budget=Budget(seconds=seconds, started=evaluator.clock(), clock=evaluator.clock),
        curves=folder / "study" / "curves.jsonl",
        observer=(events if events is not None else []).append,
        evaluator=evaluator,
    )


def lines(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "study" / "curves.jsonl").read_text().splitlines()]


def test_each_seed_trains_in_fp32_and_under_the_policy_and_each_curve_is_kept(tmp_path: Path) -> None:
    events: list[Event] = []
    found = verified(tmp_path, events=events)
    assert found.agreement == "met"
    assert [(line["run"], line["seed"]) for line in lines(tmp_path)] == [
        (run, seed) for seed in range(SEEDS) for run in ("fp32", "policy")
    ]
    assert lines(tmp_path)[1]["losses"] == list(found.pairs[0].policy.losses)
    told = [describe(event) or "" for event in events]
    assert any("seed 1 of 5: 200 steps under fp16, the last loss is" in line for line in told)


def test_nobody_trains_beside_a_tuning_in_the_same_folder_and_earlier_curves_stay(tmp_path: Path) -> None:
    verified(tmp_path)
    with locked(tmp_path / "study", None), pytest.raises(StudyError, match="another amptune is tuning"):
        verified(tmp_path)
    assert len(lines(tmp_path)) == 2 * SEEDS


def test_a_budget_for_some_of_the_seeds_answers_from_these(tmp_path: Path) -> None:
    found = verified(tmp_path, seconds=17.0)  # a run takes 2 s
    assert (found.agreement, len(found.pairs)) == ("met", 4)
    assert str(found.findings[1]).startswith("4 of 5 seeds were trained; the budget was spent; give more with --budget")


def test_a_budget_for_too_few_seeds_cannot_tell(tmp_path: Path) -> None:
    found = verified(tmp_path, seconds=0.0)
    assert (found.agreement, found.pairs) == ("open", ())
    assert "give more with --budget, or fewer --steps" in str(found.findings[0])


def test_no_curve_is_longer_than_the_shortest_before_it(tmp_path: Path) -> None:
    asked: list[int] = []

    def slow(policy: Policy, steps: int, seed: int) -> LossCurve | Failure:
        asked.append(steps)
        return recorded(policy, min(steps, 150 if policy == STOCK else 120), seed)

    found = verified(tmp_path, slow)
    assert asked == [200, 150, *[120] * 8]
    assert found.agreement == "open"
    assert "the first 120 of 200 steps are like FP32's" in str(found.findings[0])


def test_ctrl_c_keeps_the_runs_that_have_ended(tmp_path: Path) -> None:
    def interrupted(policy: Policy, steps: int, seed: int) -> LossCurve | Failure:
        if seed == 3:
            raise KeyboardInterrupt
        return recorded(policy, steps, seed)

    found = verified(tmp_path, interrupted)
    assert found.interrupted
    assert (found.agreement, len(found.pairs), len(lines(tmp_path))) == ("met", 3, 6)


@pytest.mark.parametrize(
    ("kind", "agreement", "words"),
    [
        ("nonfinite", "missed", "does not train like FP32: with seed 2, the loss is nan, and not in FP32"),
        (
            "error",
            "missed",
            "does not train like FP32: with seed 2 it raises what FP32 does not: error: the loss is nan",
        ),
        ("crash", "open", "could not tell: training under the policy ended with seed 2: crash: the loss is nan"),
    ],
)
def test_a_policy_that_breaks_does_not_train_like_fp32_and_a_dead_worker_tells_nothing(
    tmp_path: Path, kind: str, agreement: str, words: str
) -> None:
    def broken(policy: Policy, steps: int, seed: int) -> LossCurve | Failure:
        if policy == FP16 and seed == 1:
            return Failure(kind=kind, message="the loss is nan")  # type: ignore[arg-type]
        return recorded(policy, steps, seed)

    found = verified(tmp_path, broken)
    assert found.agreement == agreement
    assert str(found.findings[0]).startswith(words)


def test_fp32_that_fails_is_an_error_whose_own_code_is_told_apart(tmp_path: Path) -> None:
    dead = Failure(kind="crash", message="the worker was ended by SIGKILL; its output is in workers.log")
    raised = Failure(kind="error", message="out of range", exception="ValueError", where="train.py:3")
    with pytest.raises(NothingFeasibleError, match=r"ended by SIGKILL; its output is in workers\.log"):
        verified(tmp_path, lambda *_: dead)
    with pytest.raises(UserCodeError, match=r"ValueError: out of range \(train\.py:3\)"):
        verified(tmp_path, lambda *_: raised)


def test_another_machine_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(HardwareMismatchError):
        verified(tmp_path, labels={"nvidia.com/gpu.product": "NVIDIA-A100"})
