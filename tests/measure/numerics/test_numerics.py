"""Gradients in sketches, and what is said of those of one run beside another's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from amptune.measure.numerics.comparison import compare
from amptune.measure.numerics.sketches import MOST_COLUMNS, MOST_TOGETHER, Sketcher
from amptune.measure.results.training_runs import THOROUGHNESS, Gradients, LossCurve, Parity, Reference, Run
from amptune.policy.settings import STOCK

# Six standard deviations of an inner product in a sketch of some 8000 columns.
CLOSE = 6 * math.sqrt(2 / 8000)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Weights(nn.Module):
    def __init__(self, *weights: torch.Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList(weights)

    def sketch_of(self, sketcher: Sketcher, *gradients: torch.Tensor | None, scale: float = 1.0) -> torch.Tensor:
        for weight, gradient in zip(self.weights, gradients, strict=True):
            weight.grad = gradient
        return sketcher(scale)[0]


def sketched(*gradients: torch.Tensor) -> list[torch.Tensor]:
    """The sketches of several gradients of one parameter."""
    model = Weights(torch.zeros_like(gradients[0]))
    sketcher = Sketcher(model)
    return [model.sketch_of(sketcher, gradient) for gradient in gradients]


@given(
    st.one_of(st.tuples(st.integers(1, 40_000)), st.tuples(st.integers(1, 1024), st.integers(1, 1024))),
    st.integers(0, 2**20),
)
@settings(max_examples=25)
def test_a_sketch_is_linear_and_keeps_lengths_and_inner_products_whatever_the_shape(
    shape: tuple[int, ...], seed: int
) -> None:
    a, b = random(*shape, seed=seed), random(*shape, seed=seed + 1)
    b = b + a / 2
    in_a, in_b, in_sum = sketched(a, b, 2 * a - b)
    assert len(in_a) <= MOST_COLUMNS
    assert in_a.norm() == pytest.approx(float(a.norm()), rel=CLOSE)
    assert in_a @ in_b == pytest.approx(float((a * b).sum()), abs=CLOSE * float(a.norm() * b.norm()))
    assert torch.allclose(in_sum, 2 * in_a - in_b, atol=1e-3)


@pytest.mark.parametrize("width", [1024, 768, 4096])
def test_a_gradient_in_one_column_of_a_matrix_keeps_its_length(width: int) -> None:
    """As where one feature is far larger than all others. Every sum would else hold hundreds of its elements."""
    gradient = torch.zeros(2048, width)
    gradient[:, 5] = random(2048)
    (sketch,) = sketched(gradient)
    assert sketch.norm() == pytest.approx(float(gradient.norm()), rel=CLOSE)


def test_parameters_have_columns_of_their_own_and_the_scale_is_divided_away() -> None:
    small, gradient = Weights(torch.zeros(8, 9)), random(8, 9)  # it is kept as it is
    assert torch.equal(small.sketch_of(Sketcher(small), 1024 * gradient, scale=1024.0), gradient.flatten())
    many = Weights(*(torch.zeros(200, 50) for _ in range(400)))
    assert len(many.sketch_of(Sketcher(many), *(None for _ in range(400)))) <= 2**20
    model = Weights(torch.zeros(50, 40), torch.zeros(100, 100), torch.zeros(3))
    sketcher = Sketcher(model)
    only_the_second = model.sketch_of(sketcher, None, torch.ones(100, 100), None)
    filled = [bool(only_the_second[columns].any()) for columns in sketcher.columns]
    assert filled == [False, True, False]
    assert sketcher.columns[0].start == 0
    assert sketcher.columns[-1].stop == len(only_the_second)
    assert sketcher.parameters_of([0, sketcher.columns[2].start]) == [0, 2]


@pytest.mark.parametrize("unit", [1e-30, 1e30])
def test_elements_that_are_rounding_errors_beside_the_others_do_not_count(unit: float) -> None:
    """As the gradients of queries and keys beside those of values, in a sequence of one token."""
    model = Weights(torch.zeros(30))
    model.weights[0].grad = unit * torch.tensor([1.0, -2.0, 0.01] * 5 + [1e-6] * 10 + [0.0] * 5)
    _, counts = Sketcher(model)()
    assert counts.tolist() == [15]


def test_frozen_parameters_are_left_out_and_the_others_named() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 2)))
    model.register_parameter("own", nn.Parameter(torch.ones(2)))
    next(model.parameters())  # the model's own stands first
    model.get_submodule("0").requires_grad_(False)
    assert Sketcher(model).names == ("own", "1.0.weight", "1.0.bias")


@pytest.mark.parametrize("shape", [(4, 3), (200, 100)], ids=str)
def test_of_complex_gradients_both_parts_are_sketched(shape: tuple[int, int]) -> None:
    gradient = torch.complex(random(*shape), random(*shape, seed=1))
    (sketch,) = sketched(gradient)
    assert sketch.norm() == pytest.approx(float(gradient.norm()), rel=CLOSE)


def test_signs_are_the_same_in_every_instance_whatever_was_drawn_and_draw_nothing() -> None:
    gradient = torch.arange(90_000.0).view(300, 300).cos()
    (one,) = sketched(gradient)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    (other,) = sketched(gradient)
    assert torch.equal(one, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_gradients_of_one_size_are_sketched_as_each_would_be_alone() -> None:
    """Together, in one go, as a step of a small model has hundreds of them; large ones are not copied together."""
    gradients = [random(90, 100, seed=seed) * (seed + 1) for seed in range(5)]
    together = Weights(*(torch.zeros(90, 100) for _ in gradients))
    sketcher = Sketcher(together)
    sketch = together.sketch_of(sketcher, *gradients)
    for gradient, columns in zip(gradients, sketcher.columns, strict=True):
        assert torch.equal(sketch[columns], sketched(gradient)[0])
    large = Weights(*(torch.zeros(MOST_TOGETHER // 2 + 1) for _ in range(2)))
    assert [len(group) for group in Sketcher(large)._alike] == [1, 1]


BATCHES, NUMBERS = 8, 400
Rows = np.ndarray[tuple[int, int], np.dtype[np.float32]]


def rows(seed: int, batches: int = BATCHES, numbers: int = NUMBERS) -> Rows:
    return np.random.default_rng(seed).standard_normal((batches, numbers), dtype=np.float32)


def usual() -> Rows:
    """FP32 gradients of the batches: a common part of about length 20, and as much noise."""
    return (rows(0, 1) + rows(1)).astype(np.float32)


def gradients(sketches: Rows, noticeable: Sequence[int] | None = None) -> Gradients:
    each = [sketches.shape[1]] if noticeable is None else noticeable
    counts = np.array([each] * len(sketches))
    return Gradients(sketches=sketches, noticeable=counts)


def falling(epochs: int = 4, batches: int = BATCHES, by: float = 1.0) -> tuple[float, ...]:
    return tuple(by * (2.0 - 0.3 * epoch + 0.05 * batch) for epoch in range(epochs) for batch in range(batches))


def reference(
    fp32: Gradients,
    *,
    rounded: Rows | None = None,
    repeated: Rows | None = None,
    curve: tuple[float, ...] = falling(),
    replicas: Sequence[tuple[float, ...]] = (falling(by=1.02), falling(by=0.98)),
    names: tuple[str, ...] = ("layer.weight",),
    widths: Sequence[int] = (),
) -> Reference:
    ends = np.cumsum([0, *(widths or [fp32.sketches.shape[1] // len(names)] * len(names))])
    few = fp32.sketches[:2]
    return Reference(
        policy=STOCK,
        run=Run(gradients=fp32, curve=LossCurve(losses=curve)),
        rounded=dict.fromkeys(("bf16", "fp16"), gradients(few if rounded is None else rounded)),
        repeated=gradients(few if repeated is None else repeated),
        replicas=tuple(LossCurve(losses=losses) for losses in replicas),
        columns=tuple(slice(int(start), int(end)) for start, end in pairwise(ends)),
        names=names,
        spread="batches",
        thoroughness=replace(THOROUGHNESS[0], batches=BATCHES),
        fingerprint=(),
    )


def beside(theirs: Gradients, own: Reference, curve: tuple[float, ...] = falling()) -> Parity:
    return compare(own, Run(gradients=theirs, curve=LossCurve(losses=curve)), "bf16")


@given(batches=st.permutations(range(BATCHES)), names=st.permutations(range(3)), power=st.integers(-12, 12))
@settings(max_examples=30)
def test_no_figure_depends_on_the_order_of_batches_or_parameters_or_on_the_unit_of_gradients(
    batches: list[int], names: list[int], power: int
) -> None:
    widths = [100, 60, 240]
    parts = np.split(np.arange(NUMBERS), np.cumsum(widths)[:-1])

    def figures(rows_at: Sequence[int], names_at: Sequence[int], unit: float = 1.0) -> dict[str, list[float]]:
        def shown(some: Rows, counts: Sequence[int] = widths) -> Gradients:
            columns = np.concatenate([parts[i] for i in names_at])
            return gradients(np.float32(unit) * some[list(rows_at)][:, columns], [counts[i] for i in names_at])

        own = usual()
        fp32 = reference(
            shown(own),
            rounded=shown(own + 0.01 * rows(5)).sketches,
            repeated=shown(own + 0.001 * rows(6)).sketches,
            names=tuple(f"{'abc'[i]}.weight" for i in names_at),
            widths=[widths[i] for i in names_at],
        )
        parity = beside(shown(own * np.float32(1.1) + 0.1 * rows(3), [90, 60, 120]), fp32)
        figures = ("error", "bias", "noise", "size", "rounding", "vanished", "slope")
        return {one.name: [getattr(one, figure) for figure in figures] for one in parity.gradients}

    usual_order, other = figures(range(BATCHES), range(3)), figures(batches, names, 10.0**power)
    assert usual_order.keys() == other.keys() == {"a.weight", "b.weight", "c.weight"}
    for name, expected in usual_order.items():
        assert other[name] == pytest.approx(expected, rel=1e-3, abs=1e-5)


OWN = usual()
NOISE = 0.5 * rows(3)
close = partial(pytest.approx, rel=0.2)


@pytest.mark.parametrize(
    ("theirs", "noticeable", "fp32", "figures"),
    [
        (OWN, None, {}, {"error": 0, "bias": 0, "vanished": 0, "size": 1, "noise": close(math.sqrt(1 / 2))}),
        (1.5 * OWN, None, {}, {"error": close(0.5), "bias": close(0.5), "size": close(1.5), "slope": close(1.5)}),
        (0 * OWN, [0], {}, {"error": 1, "vanished": 1, "size": 0}),
        (OWN, [NUMBERS // 4], {}, {"error": 0, "vanished": 0.75}),
        # Elements that are 0 in FP32 alone are nothing that vanished.
        (OWN, None, {"fp32": gradients(OWN, [NUMBERS // 2])}, {"vanished": 0}),
        (OWN, None, {"rounded": OWN[:2] * 1.25}, {"rounding": close(0.25)}),
        (1.5 * OWN[:1], None, {"fp32": gradients(OWN[:1])}, {"noise": 0, "error": close(0.5), "bias": close(0.5)}),
        (OWN + NOISE, None, {}, {"error": close(0.5 / math.sqrt(2))}),
        # What FP32 differs by from itself is no error of the policy's.
        (OWN + NOISE, None, {"repeated": OWN[:2] + 0.5 * rows(4, 2)}, {"error": close(0, abs=0.15)}),
    ],
)
def test_the_figures_of_a_parameter(
    theirs: Rows, noticeable: list[int] | None, fp32: dict[str, Any], figures: dict[str, Any]
) -> None:
    beside_it = reference(**{"fp32": gradients(OWN), **fp32})
    parity = beside(gradients(theirs.astype(np.float32), noticeable), beside_it)
    (module,) = parity.gradients
    assert {name: getattr(module, name) for name in figures} == figures
    assert (parity.drift, parity.drift_share, parity.skipped_share) == (0, 0, 0)


def test_a_gradient_that_is_0_in_the_mean_makes_nothing_look_large_beside_it() -> None:
    own = rows(1)
    (module,) = beside(gradients(own + 0.1 * rows(2)), reference(gradients(own - own.mean(0)))).gradients
    assert module.bias < 1


def test_each_parameter_is_compared_by_itself_and_none_without_a_gradient_in_fp32() -> None:
    """A small one beside a large one too."""
    own = usual()
    own[:, 100:] *= 0.01
    own[:, 300:] = 0
    theirs = own.copy()
    theirs[:, 100:] = 0
    widths = [100, 200, 100]
    names = ("a.weight", "a.table", "unused.weight")
    large, small = beside(
        gradients(theirs, [100, 0, 0]), reference(gradients(own, widths), names=names, widths=widths)
    ).gradients
    assert (large.module, small.name) == ("a", "a.table")
    assert large.error == 0
    assert small.error == pytest.approx(1)
    assert small.share == pytest.approx(0.01 * math.sqrt(2), rel=0.2)


TWO_PERCENT_APART = (falling(by=1.02), falling(by=0.98))


@pytest.mark.parametrize(
    ("curve", "replicas", "share", "drift"),
    [
        (lambda _: 1.06, TWO_PERCENT_APART, 0.06, 3),
        (lambda step: 1.06 if step >= 3 * BATCHES else 1.0, TWO_PERCENT_APART, 0.06, 3),  # the worst epoch
        (lambda _: 1.01, (falling(), falling()), 0.01, 2),  # replicas that are alike leave a floor
        (lambda _: 0.9, TWO_PERCENT_APART, -0.1, -5),
        (lambda step: 1.3 if step % 2 else 0.7, TWO_PERCENT_APART, 0, 0),  # within an epoch they may differ
    ],
)
def test_drift_is_that_of_the_worst_epoch_relative_to_what_replicas_differ_by(
    curve: Callable[[int], float], replicas: Sequence[tuple[float, ...]], share: float, drift: float
) -> None:
    own = gradients(usual())
    losses = tuple(curve(step) * loss for step, loss in enumerate(falling()))
    parity = beside(own, reference(own, replicas=replicas), losses)
    assert (parity.drift_share, parity.drift) == pytest.approx((share, drift), abs=0.5 if drift == 0 else 1e-6)


def test_several_curves_are_held_to_what_they_differ_by() -> None:
    """By chance, two replicas were alike and one curve was far off; the others show that it was chance."""
    own = reference(gradients(usual()), replicas=(falling(by=1.001), falling(by=0.999)))

    def drift(*by: float) -> float:
        first, *more = (LossCurve(losses=falling(by=one)) for one in by)
        return compare(own, Run(gradients=own.run.gradients, curve=first, more=tuple(more)), "bf16").drift

    assert drift(1.2) == pytest.approx(40)
    assert drift(1.2, 1.0, 1.06) < 3
    assert drift(1.2, 1.21, 1.19) > 20
    assert drift(1.01) == drift(1.01, 1.011, 1.009) == pytest.approx(2), "more curves can only acquit"


def test_skipped_steps_are_told_as_a_share_and_evaluations_are_kept() -> None:
    own = reference(gradients(usual()))
    curve = LossCurve(losses=falling(), skipped=8, scale=64.0, evaluated=0.5)
    parity = compare(own, Run(gradients=own.run.gradients, curve=curve), "fp16")
    assert (parity.skipped_share, parity.scale, parity.evaluated, parity.evaluated_fp32) == (0.25, 64.0, 0.5, None)


@pytest.mark.parametrize(
    ("name", "own", "found", "off"),
    [
        ("running_var", [1.0] * 64, [4.0] * 64, 0.5),
        ("running_var", [1e4] + [1.0] * 63, [1e6] + [1.0] * 63, 0.9 / 8),  # one that varies most is one of all
        ("running_var", [1.0] * 64, [math.inf] + [1.0] * 63, math.inf),
        ("running_var", [1.0] * 64, [math.nan] + [1.0] * 63, math.inf),
        ("running_mean", [1e-6] * 64, [0.01] * 64, 0.1),  # in units of a deviation of 0.1
    ],
)
def test_how_far_running_statistics_are_off(name: str, own: list[float], found: list[float], off: float) -> None:
    def run(values: list[float]) -> Run:
        statistics = {"running_var": [0.01] * 64, "running_mean": [0.0] * 64, name: values}
        buffers = {f"norm.{one}": np.array(each, dtype=np.float32) for one, each in statistics.items()}
        return Run(gradients=gradients(usual()), curve=LossCurve(losses=falling(), buffers=buffers))

    (buffer,) = compare(replace(reference(gradients(usual())), run=run(own)), run(found), "bf16").buffers
    assert buffer.path == f"norm.{name}"
    assert buffer.off == pytest.approx(off, rel=1e-3)
