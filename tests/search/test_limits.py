"""What the numerics gate allows, and what it says."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from amptune.measure.numerics.limits import is_near_limits
from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import ILL_CONDITIONED, ROUNDING, BufferParity, GradientParity, Parity
from amptune.policy.settings import amp_recipe
from amptune.search.gate.judgement import Judgement, judged

BF16 = amp_recipe("bf16")
# As the gradient of a healthy parameter looks in bf16 (reports/numerics).
HEALTHY = GradientParity(
    name="a.weight", error=0.1, bias=0.02, noise=0.8, rounding=0.02, size=1.0, slope=1.0, vanished=0.0
)
BROKEN = Parity(failure=Failure(kind="nonfinite", message="the loss is nan"), broken=("a", "b"))


def codes(parity: Parity, tolerance: float | None = None) -> list[str]:
    return [finding.code for finding in judged(BF16, parity, tolerance).shortcomings]


def with_gradient(**changed: float) -> Parity:
    return Parity(gradients=(replace(HEALTHY, **changed), replace(HEALTHY, name="b.weight")))  # type: ignore[arg-type]


# A bias before BatchNorm: its true gradient is 0, and in half its noise is a thousand times as large.
NOISE = {"size": 1000.0, "error": 1000.0, "bias": 500.0, "slope": -300.0}
GONE = {"size": 0.0, "error": 1.0, "slope": 0.0, "vanished": 1.0}
RUINED = BufferParity(path="norm.running_var", off=1.0, apart=0.1)
EVALUATED: Any = {"evaluated": 0.71, "evaluated_fp32": 0.72, "evaluated_at_start": 0.1}


@pytest.mark.parametrize(
    ("parity", "tolerance", "expected"),
    [
        (with_gradient(error=0.9), None, "gradient-error"),
        (with_gradient(bias=0.5), None, "gradient-bias"),
        (with_gradient(vanished=0.6), None, "gradient-vanishes"),
        (with_gradient(size=0.0, slope=0.0), None, "gradient-size"),
        (with_gradient(size=9.0), None, "gradient-size"),
        (with_gradient(slope=0.6), None, "gradient-slope"),
        # Noise between batches excuses nothing; what rounding the weights does in FP32 is no fault of the policy.
        (with_gradient(error=0.5, noise=5.0, rounding=0.07), None, "gradient-error"),
        (with_gradient(error=0.5, noise=0.0, rounding=0.09), None, ""),
        (with_gradient(error=1.3, bias=1.3, rounding=ILL_CONDITIONED), None, ""),
        # A gradient that is gone is a fault however ill conditioned it is, and however small, as Adam takes as large a
        # step by it; unless it is noise in FP32 too.
        (with_gradient(size=0.0, vanished=1.0, rounding=1.4), None, "gradient-size"),
        (with_gradient(**GONE, share=1e-5), None, "gradient-size"),
        (with_gradient(**GONE, share=1e-9), None, ""),
        # An error that is small beside the whole gradient does no harm; the finer the rounding, the smaller.
        (with_gradient(**NOISE, rounding=0.1, share=1e-7), None, ""),
        (replace(with_gradient(error=1.0, share=3e-4), precision=ROUNDING["bf16"]), None, ""),
        (replace(with_gradient(error=1.0, share=3e-4), precision=ROUNDING["fp16"]), None, "gradient-error"),
        # What is noise in FP32 may be larger noise, but 20,000 times that is 1 %.
        (with_gradient(share=4e-7, rounding=1.2, size=1900.0, error=1900.0, slope=0.0), None, ""),
        (with_gradient(share=4e-7, rounding=1.2, size=20_000.0, error=20_000.0, slope=0.0), None, "gradient-size"),
        # A loss above FP32's by more than its replicas differ, or far below.
        (Parity(drift=3.5, drift_share=0.07), None, "loss-drifts"),
        (Parity(drift=-3.5, drift_share=-0.07, below=3.5), None, ""),
        (Parity(drift=-30.0, drift_share=-0.7, below=30.0), None, "loss-differs"),
        (Parity(buffers=(RUINED,)), None, "statistics-differ"),
        (Parity(buffers=(replace(RUINED, apart=0.5),)), None, ""),
        (Parity(skipped_share=0.5), None, "steps-skipped"),
        (BROKEN, 1e9, "breaks"),
        # A figure that is no number is a fault.
        (Parity(drift=math.nan), None, "loss-drifts"),
        (with_gradient(vanished=math.nan), None, "gradient-vanishes"),
        # The user's own evaluation joins the other figures, unless FP32 is at chance too.
        (Parity(**EVALUATED), None, ""),
        (Parity(**EVALUATED), 0.02, ""),
        (Parity(**EVALUATED), 0.001, "evaluates-differently"),
        (Parity(**EVALUATED, drift=9.0), 0.02, "loss-drifts"),
        (Parity(evaluated=math.nan, evaluated_fp32=0.7), 1.0, "evaluates-differently"),
        (Parity(evaluated=0.12, evaluated_fp32=0.105, evaluated_at_start=0.1), 0.01, ""),
        (Parity(evaluated=0.12, evaluated_fp32=0.105, evaluated_at_start=0.05), 0.01, "evaluates-differently"),
    ],
)
def test_what_is_a_fault_is_named_by_its_code(parity: Parity, tolerance: float | None, expected: str) -> None:
    judgement = judged(BF16, parity, tolerance)
    assert [finding.code for finding in judgement.shortcomings] == ([expected] if expected else [])
    assert judgement.passes == (not expected)
    if expected.startswith("gradient"):
        assert judgement.shortcomings[0].module == "a"


NEAR, FAR = 2 * 0.3, 4 * 0.3  # errors of a gradient: two and four times what is allowed


def test_what_exceeds_its_limit_in_one_look_of_two_was_chance() -> None:
    once = replace(with_gradient(error=NEAR), again=with_gradient())
    assert judged(BF16, once).passes
    assert judged(BF16, once).used < 0.5
    assert codes(replace(with_gradient(error=NEAR), again=with_gradient(error=NEAR))) == ["gradient-error"]
    other = Parity(gradients=(HEALTHY, replace(HEALTHY, name="b.weight", error=NEAR)))
    assert judged(BF16, replace(with_gradient(error=NEAR), again=other)).passes


def test_a_figure_that_is_no_number_is_the_worst_of_its_module() -> None:
    judgement = judged(BF16, with_gradient(error=math.nan))
    assert not judgement.passes
    assert [one.code for one in judgement.shortcomings] == ["gradient-error"]
    assert judgement.worst[0] == judgement.shortcomings[0]


def test_a_buffer_is_looked_at_again_by_its_own_name() -> None:
    first = Parity(buffers=tuple(BufferParity(path=path, off=0.5, apart=0.0) for path in ("a", "b")))
    again = Parity(buffers=(BufferParity(path="a", off=0.1, apart=0.0), BufferParity(path="b", off=0.4, apart=0.0)))
    (found,) = judged(BF16, replace(first, again=again)).shortcomings
    assert "the buffer b is off by 40%" in found.message


@pytest.mark.parametrize(
    ("parity", "is_near"),
    [
        (with_gradient(), False),
        (with_gradient(error=NEAR), True),
        (with_gradient(error=FAR), False),
        (with_gradient(error=math.nan), False),
        (Parity(drift=4.0), True),
        (BROKEN, False),
    ],
)
def test_a_second_look_is_for_what_chance_can_have_made(parity: Parity, is_near: bool) -> None:
    assert is_near_limits(parity) == is_near


def test_a_study_keeps_the_loss_curves_of_a_judgement_to_six_digits() -> None:
    parity = Parity(losses=(2.34567891, 1.0), losses_fp32=((2.34567891, 1.0), (2.4, 1.1)))
    kept = judged(BF16, parity)
    again = Judgement.from_dict(json.loads(json.dumps(kept.as_dict())))
    assert again == replace(kept, losses=(2.34568, 1.0), losses_fp32=((2.34568, 1.0), (2.4, 1.1)))
    assert Judgement.from_dict({"policy": {}, "passes": True, "used": 0.1, "words": ""}).losses == ()
