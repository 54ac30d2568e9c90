"""Does a policy train like FP32? Made of curves that are made up, and driven by a recorded machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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


def pairs_of(policy: Callable[[CurvePair], LossCurve], fp32: Callable[[CurvePair], LossCurve] | None = None) -> Any:
    """The pairs of a look, with other curves."""
    own = fp32 or (lambda pair: pair.fp32)
    return tuple(CurvePair(seed=pair.seed, fp32=own(pair), policy=policy(pair)) for pair in look().pairs)


def with_buffer(one: LossCurve, value: float) -> LossCurve:
    return replace(one, buffers={"norm.average": np.array([value], dtype=np.float32)})


LATE = pairs_of(lambda p: LossCurve(losses=(*p.policy.losses[:180], *(2 * x for x in p.policy.losses[180:]))))
BUFFERS = pairs_of(lambda p: with_buffer(p.policy, 0.5), lambda p: with_buffer(p.fp32, 1 + p.seed / 100))
ALIKE = pairs_of(lambda _: curve(0, 1.001), lambda _: curve(0))
SPENT = "the budget was spent"


def evaluated(policys: float) -> Any:
    return pairs_of(
        lambda p: replace(p.policy, evaluated=policys + 0.001 * p.seed),
        lambda p: replace(p.fp32, evaluated=0.95 + 0.001 * p.seed),
    )


@pytest.mark.parametrize(
    ("found", "agreement", "words"),
    [
        (look(), "met", "trains like FP32, over 200 steps and 5 seeds; at most, loss in "),
        (look(1.3), "missed", r"does not train like FP32: loss in .*\(±.* is allowed"),
        (look(0.3), "missed", "does not"),
        (look(pairs=LATE), "missed", "does not train like FP32: loss in steps 181 to 200"),
        (look(seeds=2, stopped=SPENT), "open", "could not tell: an answer needs 3 seeds .trained: 2.; the budget was"),
        # Curves that were cut short can miss but not meet.
        (look(steps=2000), "open", "could not tell: the first 200 of 2,000 steps are like FP32's"),
        # What evaluate(model) gives is held to FP32's seeds or the tolerance.
        (look(pairs=evaluated(0.9)), "missed", r".*evaluate\(model\) is 0.902"),
        (look(pairs=evaluated(0.95), tolerance=0), "met", "trains like"),
        (
            look(pairs=BUFFERS),
            "missed",
            ".*the buffer norm.average ends 51% off FP32's, where FP32's seeds are 3% apart;",
        ),
    ],
)
def test_a_policy_trains_like_fp32_if_its_curves_lie_within_fp32s_seeds(
    found: LongLook, agreement: str, words: str
) -> None:
    assert found.agreement == agreement
    assert len(found.findings) == 1
    assert re.match(words, str(found.findings[0])), str(found.findings[0])


def test_a_difference_is_told_in_figures_and_seeds_that_do_not_differ_are_said_so() -> None:
    figures = look(1.3).findings[0].figures
    assert figures["difference"] > figures["allowed_above"]
    found = look(pairs=ALIKE)
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


RAISED = Failure(kind="error", message="out of range", exception="ValueError", where="train.py:3")


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
    none = verified(tmp_path, seconds=0.0)
    assert (none.agreement, none.pairs) == ("open", ())
    assert "give more with --budget, or fewer --steps" in str(none.findings[0])
    found = verified(tmp_path, seconds=17.0)  # a run takes 2 s
    assert (found.agreement, len(found.pairs)) == ("met", 4)
    assert str(found.findings[1]).startswith("4 of 5 seeds were trained; the budget was spent; give more with --budget")


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


@pytest.mark.parametrize(
    ("error", "words", "changed"),
    [
        (NothingFeasibleError, r"by SIGKILL", {"curves": lambda *_: Failure(kind="crash", message="by SIGKILL")}),
        (UserCodeError, r"ValueError: out of range \(train\.py:3\)", {"curves": lambda *_: RAISED}),
        (HardwareMismatchError, "NVIDIA-A100", {"labels": {"nvidia.com/gpu.product": "NVIDIA-A100"}}),
    ],
)
def test_fp32_that_fails_and_another_machine_are_errors(
    error: type[Exception], words: str, changed: dict[str, Any], tmp_path: Path
) -> None:
    """The user's own code is told apart."""
    with pytest.raises(error, match=words):
        verified(tmp_path, **changed)
