"""What the numerics gate allows, and what it says."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO

import pytest
import torch
from torch import nn

import amptune
from amptune.measure.numerics.limits import is_near_limits
from amptune.measure.results.outcome import Failure
from amptune.measure.results.training_runs import ILL_CONDITIONED, ROUNDING, BufferParity, GradientParity, Parity
from amptune.policy.settings import amp_recipe
from amptune.search.gate.judgement import judged
from amptune.search.gate.numeric_findings import line_to_look
from amptune.search.sampler.records import GateRecord

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


def test_a_healthy_policy_passes_with_room_to_spare() -> None:
    judgement = judged(BF16, Parity(gradients=(HEALTHY,), drift=0.3))
    assert judgement.passes
    assert judgement.used < 0.5
    assert str(judgement) == "as good as FP32: 33% of what is allowed"


def test_fp32_itself_uses_nothing_of_what_is_allowed() -> None:
    exact = replace(HEALTHY, error=0.0, bias=0.0)
    assert judged(BF16, Parity(gradients=(exact,))).used == 0.0


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({"error": 0.9}, "gradient-error"),
        ({"bias": 0.5}, "gradient-bias"),
        ({"vanished": 0.6}, "gradient-vanishes"),
        ({"size": 0.0, "slope": 0.0}, "gradient-size"),
        ({"size": 9.0}, "gradient-size"),
        ({"slope": 0.6}, "gradient-slope"),
        ({"slope": -1.0}, "gradient-slope"),
    ],
)
def test_one_bad_module_is_enough_and_is_named(changed: dict[str, float], code: str) -> None:
    judgement = judged(BF16, with_gradient(**changed))
    assert [finding.code for finding in judgement.shortcomings] == [code]
    assert judgement.shortcomings[0].module == "a"


def test_noise_between_batches_excuses_no_error_that_rounding_does_not_make() -> None:
    assert codes(with_gradient(error=0.5, noise=5.0, rounding=0.07)) == ["gradient-error"]
    assert codes(with_gradient(error=0.5, noise=0.0, rounding=0.09)) == []


def test_what_rounding_the_weights_does_in_fp32_is_no_fault_of_the_policy() -> None:
    assert codes(with_gradient(error=0.5, bias=0.5, rounding=0.09)) == []
    assert codes(with_gradient(error=1.3, bias=1.3, rounding=ILL_CONDITIONED)) == []


def test_a_gradient_that_is_gone_is_a_fault_however_ill_conditioned() -> None:
    assert codes(with_gradient(size=0.0, vanished=1.0, rounding=1.4)) == ["gradient-size"]


@pytest.mark.parametrize("rounding", [0.1, 1.4])
def test_an_error_that_is_small_beside_the_whole_gradient_does_no_harm(rounding: float) -> None:
    """A bias before BatchNorm: its true gradient is 0, and in half its noise is a thousand times as large."""
    noise = {"size": 1000.0, "error": 1000.0, "bias": 500.0, "slope": -300.0, "rounding": rounding}
    assert codes(with_gradient(**noise, share=1e-7)) == []
    assert codes(with_gradient(**noise, share=1e-3)) != []


def test_a_scale_that_batch_norm_divides_by_has_no_gradient_but_rounding_errors() -> None:
    """The first BatchNorm of SEMNASNet, before a depthwise convolution and another, on 64 pictures of 224 × 224."""
    noise = {"size": 4730.0, "error": 4730.0, "slope": 164.0, "rounding": 0.716}
    assert codes(with_gradient(**noise, share=1.1e-6)) == []
    assert codes(with_gradient(**noise, share=3e-6)) == ["gradient-size"]


def test_the_finer_the_rounding_the_smaller_the_error_that_does_no_harm() -> None:
    off = with_gradient(error=1.0, share=3e-4)
    assert codes(replace(off, precision=ROUNDING["bf16"])) == []
    assert codes(replace(off, precision=ROUNDING["fp16"])) != []


def test_a_gradient_must_not_vanish_however_small_it_is_unless_it_is_noise_in_fp32_too() -> None:
    """Adam takes as large a step by a small gradient as by a large one."""
    gone = {"size": 0.0, "error": 1.0, "slope": 0.0, "vanished": 1.0}
    assert codes(with_gradient(**gone, share=1e-5)) == ["gradient-size"]
    assert codes(with_gradient(**gone, share=1e-9)) == []


def test_a_parameter_that_fails_is_named_with_its_module() -> None:
    small = replace(HEALTHY, name="tables.bias", size=0.0, error=1.0, slope=0.0, vanished=1.0, share=0.02)
    (finding,) = judged(BF16, Parity(gradients=(replace(HEALTHY, name="tables.weight"), small))).shortcomings
    assert finding.module == "tables"
    assert str(finding).startswith("tables: the gradient of bias is 0 times as large as in FP32 (17.2 times what is")


def test_a_figure_that_is_no_number_is_a_fault() -> None:
    assert codes(Parity(drift=float("nan"))) != []
    assert codes(with_gradient(vanished=float("nan"))) != []


def test_the_worst_module_comes_first() -> None:
    parity = Parity(gradients=(replace(HEALTHY, bias=0.4), replace(HEALTHY, name="b.weight", bias=2.0)))
    assert [finding.module for finding in judged(BF16, parity).shortcomings] == ["b", "a"]


@pytest.mark.parametrize(
    ("rounding", "size", "passes"), [(1.2, 1900.0, True), (0.05, 1900.0, False), (1.2, 20_000.0, False)]
)
def test_a_gradient_that_is_noise_in_fp32_may_be_larger_noise(rounding: float, size: float, passes: bool) -> None:
    """The gradient of a convolution's bias before BatchNorm is 0 but for rounding; 20,000 times that is 1 %."""
    parity = with_gradient(share=4e-7, rounding=rounding, size=size, error=size, slope=0.0)
    assert judged(BF16, parity).passes == passes


def test_a_loss_above_that_of_fp32_by_more_than_its_replicas_differ_is_a_fault() -> None:
    assert codes(Parity(drift=3.5, drift_share=0.07)) == ["loss-drifts"]
    assert codes(Parity(drift=-3.5, drift_share=-0.07, below=3.5)) == []
    assert codes(Parity(drift=-30.0, drift_share=-0.7, below=30.0)) == ["loss-differs"]


def test_buffers_that_end_far_from_fp32s_are_a_fault_and_what_replicas_differ_by_is_none() -> None:
    ruined = BufferParity(path="norm.running_var", off=1.0, apart=0.1)
    assert codes(Parity(buffers=(ruined,))) == ["statistics-differ"]
    assert codes(Parity(buffers=(replace(ruined, apart=0.5),))) == []


NEAR, FAR = 2 * 0.3, 4 * 0.3  # errors of a gradient: two and four times what is allowed


def test_what_exceeds_its_limit_in_one_look_of_two_was_chance() -> None:
    once = replace(with_gradient(error=NEAR), again=with_gradient())
    assert judged(BF16, once).passes
    assert judged(BF16, once).used < 0.5
    assert codes(replace(with_gradient(error=NEAR), again=with_gradient(error=NEAR))) == ["gradient-error"]
    other = Parity(gradients=(HEALTHY, replace(HEALTHY, name="b.weight", error=NEAR)))
    assert judged(BF16, replace(with_gradient(error=NEAR), again=other)).passes


def test_what_cannot_be_compared_again_is_not_confirmed() -> None:
    assert judged(BF16, replace(with_gradient(error=NEAR), again=with_gradient(rounding=ILL_CONDITIONED))).passes


def test_a_second_look_that_finds_more_than_chance_makes_is_what_counts() -> None:
    far = Parity(gradients=(HEALTHY, replace(HEALTHY, name="c.weight", error=FAR)), drift=0.1)
    assert codes(replace(with_gradient(error=NEAR), again=far)) == ["gradient-error"]
    assert codes(replace(with_gradient(error=NEAR), again=with_gradient(error=math.nan))) == ["gradient-error"]


def test_an_evaluation_that_says_nothing_in_the_second_look_is_not_acquitted() -> None:
    evaluated = {"evaluated": 0.2, "evaluated_fp32": 0.5, "evaluated_at_start": 0.0}
    first = Parity(gradients=(HEALTHY,), **evaluated)  # type: ignore[arg-type]
    assert is_near_limits(first, tolerance=0.2)
    assert not is_near_limits(first)
    again = Parity(gradients=(HEALTHY,), evaluated=0.1, evaluated_fp32=0.1, evaluated_at_start=0.0)
    assert codes(replace(first, again=again), tolerance=0.2) == ["evaluates-differently"]


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


def test_steps_that_are_skipped_again_and_again_are_a_fault() -> None:
    assert codes(Parity(skipped_share=0.5)) == ["steps-skipped"]


def test_what_breaks_training_is_the_only_thing_said_of_it() -> None:
    judgement = judged(BF16, BROKEN)
    assert [(finding.code, finding.module) for finding in judgement.shortcomings] == [("breaks", "a")]
    assert "the loss is nan" in str(judgement)


def test_the_users_own_evaluation_joins_the_other_figures() -> None:
    evaluated = Parity(evaluated=0.71, evaluated_fp32=0.72, evaluated_at_start=0.1)
    assert codes(evaluated, tolerance=0.02) == []
    assert judged(BF16, evaluated, 0.02).used == pytest.approx(0.5)
    assert codes(evaluated, tolerance=0.001) == codes(evaluated, tolerance=0) == ["evaluates-differently"]
    assert codes(replace(evaluated, drift=9.0), tolerance=0.02) == ["loss-drifts"]
    assert codes(evaluated) == []


def test_an_evaluation_that_is_still_at_chance_decides_nothing() -> None:
    at_chance = Parity(evaluated=0.12, evaluated_fp32=0.105, evaluated_at_start=0.1)
    assert codes(at_chance, tolerance=0.01) == []
    assert codes(replace(at_chance, evaluated_at_start=0.05), tolerance=0.01) == ["evaluates-differently"]


def test_an_evaluation_that_only_the_policy_moves_counts() -> None:
    """Fine-tuning: FP32 is as good after a moment as before it."""
    ruined = Parity(evaluated=0.4, evaluated_fp32=0.905, evaluated_at_start=0.9)
    assert codes(ruined, tolerance=0.02) == ["evaluates-differently"]


def test_a_tolerance_excuses_neither_a_break_nor_an_evaluation_that_is_no_number() -> None:
    assert codes(BROKEN, tolerance=1e9) == ["breaks"]
    assert codes(Parity(evaluated=float("nan"), evaluated_fp32=0.7), tolerance=1.0) == ["evaluates-differently"]


@pytest.mark.parametrize(
    ("parity", "allowed"),
    [
        (
            with_gradient(error=0.9),
            "where rounding the weights changes it by 2.0% (3 times what is allowed: 30%)",
        ),
        (with_gradient(error=0.9, rounding=0.09), "(1.67 times what is allowed: 54%)"),
        (with_gradient(slope=0.6), "along FP32's direction (2 times what is allowed: 80% to 120%)"),
        (with_gradient(size=9.0), "times what is allowed: 0.3 to 3.3)"),
        (with_gradient(vanished=0.6), "times what is allowed: 25%)"),
        (Parity(drift=6.0), "(2 times what is allowed: 3 times)"),
        (Parity(buffers=(BufferParity(path="a.b", off=0.9, apart=0.15),)), "(2 times what is allowed: 45%)"),
    ],
)
def test_a_refusal_says_how_much_is_allowed(parity: Parity, allowed: str) -> None:
    assert allowed in str(judged(BF16, parity))


def test_a_refusal_for_a_gradient_comes_with_a_line_of_python_that_shows_it() -> None:
    line = line_to_look(judged(amp_recipe("fp16"), with_gradient(error=0.9))).split("`")[1]
    torch.manual_seed(0)
    model = nn.Sequential(OrderedDict(a=nn.Linear(4, 1)))
    names = {
        "amptune": amptune,
        "model": model,
        "loss": lambda model, batch: model(batch).mean(),
        "batch": torch.ones(2, 4),
    }
    with redirect_stdout(StringIO()) as shown:
        exec(line, names)  # noqa: S102  # the line is for users to run
    assert shown.getvalue().startswith("tensor([[1., 1., 1., 1.]]")


def test_a_refusal_for_a_loss_that_is_no_number_shows_that_loss() -> None:
    line = line_to_look(judged(amp_recipe("fp16"), BROKEN)).split("`")[1]
    names = {"amptune": amptune, "model": nn.Linear(4, 1), "loss": lambda _model, _batch: math.nan, "batch": None}
    with redirect_stdout(StringIO()) as shown:
        exec(line, names)  # noqa: S102  # the line is for users to run
    assert shown.getvalue() == "nan\n"


def test_a_refusal_of_a_workload_with_a_step_of_its_own_names_no_loss() -> None:
    line = line_to_look(judged(BF16, replace(with_gradient(error=0.9), own_step=True)))
    assert line == "`amptune verify amp-bf16 TARGET --numerics`"


def test_a_refusal_for_a_loss_curve_comes_with_the_command_that_draws_it() -> None:
    assert line_to_look(judged(BF16, Parity(drift=6.0))) == "`amptune verify amp-bf16 TARGET --numerics`"


def test_a_study_keeps_the_loss_curves_of_a_judgement_to_six_digits() -> None:
    parity = Parity(losses=(2.34567891, 1.0), losses_fp32=((2.34567891, 1.0), (2.4, 1.1)))
    kept = GateRecord.of(judged(BF16, parity))
    again = GateRecord.from_dict(json.loads(json.dumps(kept.as_dict())))
    assert again == replace(kept, losses=(2.34568, 1.0), losses_fp32=((2.34568, 1.0), (2.4, 1.1)))
    assert GateRecord.from_dict({"policy": {}, "passes": True, "used": 0.1, "words": ""}).losses == ()
