"""Does a policy train like FP32? Made of curves that are made up, and driven by a recorded machine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
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
from amptune.search.gate.long_look import LongLook
from amptune.search.numerics_verification import verify_numerics
from amptune.search.pipeline import locked
from amptune.search.plan.budget import Budget

FP16 = amp_recipe("fp16")
STEPS, SEEDS = 200, 5
SPENT = "the budget was spent"


def curve(seed: int, times: float = 1.0, steps: int = STEPS, *, own: int = 0, **more: Any) -> LossCurve:
    """A loss that falls, with the noise of its batches; another run of the seed, `own`, adds a little of its own."""
    data, rounding = np.random.default_rng(seed), np.random.default_rng((seed, own))
    fall = 0.2 + np.exp(-np.arange(steps) / 40)
    level = 1 + 0.02 * data.standard_normal()
    noise = 0.1 * data.standard_normal(steps) + (0.01 * rounding.standard_normal(steps) if own else 0.0)
    return LossCurve(losses=tuple(times * level * fall * (1 + noise)), **more)


def buffer(value: float) -> dict[str, Any]:
    return {"buffers": {"norm.average": np.array([value], dtype=np.float32)}}


def fp32s(**more: Callable[[int], Any]) -> list[LossCurve]:
    return [curve(seed, **{name: of(seed) for name, of in more.items()}) for seed in range(SEEDS)]


def policys(times: float = 1.0, **more: Callable[[int], Any]) -> list[LossCurve]:
    return [curve(seed, times, own=1, **{name: of(seed) for name, of in more.items()}) for seed in range(SEEDS)]


def look(policy: Sequence[LossCurve], fp32: Sequence[LossCurve] | None = None, **changed: Any) -> LongLook:
    pairs = zip(fp32 or fp32s(), policy, strict=False)
    parts: dict[str, Any] = {
        "policy": FP16,
        "name": "net",
        "hardware": H200,
        "steps": STEPS,
        "seeds": SEEDS,
        "pairs": tuple(CurvePair(seed=seed, fp32=own, policy=other) for seed, (own, other) in enumerate(pairs)),
    }
    return LongLook(**{**parts, **changed})


LATE = [LossCurve(losses=(*one.losses[:180], *(2 * x for x in one.losses[180:]))) for one in policys()]
EVALUATED = fp32s(evaluated=lambda seed: 0.95 + 0.001 * seed)
BUFFERS = [replace(one, **buffer(1 + seed / 100)) for seed, one in enumerate(fp32s())]
RUINED = [replace(one, **buffer(0.5)) for one in policys()]


@pytest.mark.parametrize(
    ("found", "agreement", "words"),
    [
        (look(policys()), "met", "trains like FP32, over 200 steps and 5 seeds; at most, loss in "),
        (look(policys(1.3)), "missed", r"does not train like FP32: loss in .*\(±.* is allowed"),
        # A loss below FP32's is harmless until it must be another loss.
        (look(policys(0.9)), "met", "trains like"),
        (look(policys(0.3)), "missed", "does not"),
        (look(LATE), "missed", "does not train like FP32: loss in steps 181 to 200"),
        (look(policys()[:2], stopped=SPENT), "open", "could not tell: an answer needs 3 seeds .trained: 2.; the bud"),
        # Curves that were cut short can miss but not meet.
        (look(policys(), steps=2000), "open", "could not tell: the first 200 of 2,000 steps are like FP32's"),
        (look(policys(1.3), steps=2000), "missed", "does not"),
        # What evaluate(model) gives is held to FP32's seeds or the tolerance.
        (look(policys(evaluated=lambda _: 0.9), EVALUATED), "missed", r".*evaluate\(model\) is 0.9"),
        (look(policys(evaluated=lambda _: 0.9), EVALUATED, tolerance=0.1), "met", "trains like"),
        (look(RUINED, BUFFERS), "missed", ".*the buffer norm.average ends 51% off FP32's, where FP32's seeds are 3%"),
    ],
)
def test_a_policy_trains_like_fp32_if_its_curves_lie_within_fp32s_seeds(
    found: LongLook, agreement: str, words: str
) -> None:
    assert found.agreement == agreement
    assert len(found.findings) == 1
    assert re.match(words, str(found.findings[0])), str(found.findings[0])


def test_seeds_that_do_not_differ_are_said_so() -> None:
    found = look([curve(0, 1.001)] * SEEDS, [curve(0)] * SEEDS)
    assert [finding.code for finding in found.findings] == ["trains-like-fp32", "no-spread"]
    assert "so 1.5% is allowed" in str(found.findings[1])


# --- on a recorded machine --------------------------------------------------------------------------------------------

Curves = Callable[[Policy, int, int], LossCurve | Failure]


def recorded(policy: Policy, steps: int, seed: int) -> LossCurve | Failure:
    return curve(seed, steps=steps, own=int(policy != STOCK))


def verified(folder: Path, curves: Curves = recorded, *, seconds: float = 100.0, gpu: str | None = None) -> LongLook:
    evaluator = RecordedEvaluator("resnet50", curve=curves)
    return verify_numerics(
        PolicyFile(policy=FP16, valid_for={"nvidia.com/gpu.product": gpu} if gpu else {}),
        "amptune.workload.zoo:resnet50",
        steps=STEPS,
        seeds=SEEDS,
        budget=Budget(seconds=seconds, started=evaluator.clock(), clock=evaluator.clock),
        curves=folder / "study" / "curves.jsonl",
        observer=lambda _: None,
        evaluator=evaluator,
    )


def test_a_policy_is_held_against_fp32_as_the_file_names_it(tmp_path: Path) -> None:
    asked: list[Policy] = []

    def noted(policy: Policy, steps: int, seed: int) -> LossCurve | Failure:
        asked.append(policy)
        return curve(seed, steps=steps)

    verified(tmp_path, noted)
    assert asked[0] == STOCK
    assert set(asked) == {STOCK, FP16}


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "study" / "curves.jsonl").read_text().splitlines()]


def test_each_seed_trains_in_fp32_and_under_the_policy_and_earlier_curves_stay_whoever_comes(tmp_path: Path) -> None:
    found = verified(tmp_path)
    assert found.agreement == "met"
    with locked(tmp_path / "study", None), pytest.raises(StudyError, match="another amptune is tuning"):
        verified(tmp_path)
    runs = [(line["run"], line["seed"]) for line in lines(tmp_path)]
    assert runs == [(run, seed) for seed in range(SEEDS) for run in ("fp32", "policy")]
    assert lines(tmp_path)[1]["losses"] == list(found.pairs[0].policy.losses)


def test_a_budget_for_some_of_the_seeds_answers_from_these(tmp_path: Path) -> None:
    none = verified(tmp_path, seconds=0.0)
    assert (none.agreement, none.pairs) == ("open", ())
    assert "give more with --budget, or fewer --steps" in str(none.findings[0])
    found = verified(tmp_path, seconds=17.0)  # a run takes 2 s
    assert (found.agreement, len(found.pairs)) == ("met", 4)
    assert str(found.findings[1]).startswith("4 of 5 seeds were trained; the budget was spent; give more with --budget")


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
        ("nonfinite", "missed", "does not train like FP32: with seed 2, no, and not in FP32"),
        ("error", "missed", "does not train like FP32: with seed 2 it raises what FP32 does not: error: no"),
        ("crash", "open", "could not tell: training under the policy ended with seed 2: crash: no"),
    ],
)
def test_a_policy_that_breaks_does_not_train_like_fp32_and_a_dead_worker_tells_nothing(
    tmp_path: Path, kind: Any, agreement: str, words: str
) -> None:
    def broken(policy: Policy, steps: int, seed: int) -> LossCurve | Failure:
        return Failure(kind=kind, message="no") if (policy, seed) == (FP16, 1) else recorded(policy, steps, seed)

    found = verified(tmp_path, broken)
    assert found.agreement == agreement
    assert str(found.findings[0]).startswith(words)


RAISED = Failure(kind="error", message="out of range", exception="ValueError", where="train.py:3")


def test_fp32_that_fails_and_another_machine_are_errors(tmp_path: Path) -> None:
    """The user's own code is told apart."""
    with pytest.raises(NothingFeasibleError, match="by SIGKILL"):
        verified(tmp_path, lambda *_: Failure(kind="crash", message="by SIGKILL"))
    with pytest.raises(UserCodeError, match=r"ValueError: out of range \(train\.py:3\)"):
        verified(tmp_path, lambda *_: RAISED)
    with pytest.raises(HardwareMismatchError, match="NVIDIA-A100"):
        verified(tmp_path, gpu="NVIDIA-A100")
