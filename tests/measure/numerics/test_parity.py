"""Training under a policy beside FP32, in this process, on small models."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from benches import CPU, Called, Growing, Remembering, Step, require_lstm_in_bf16, step_of
from benches import workload_of as any_workload
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the name all of PyTorch's users give it
from torch.utils.checkpoint import checkpoint

from amptune import Policy, Workload
from amptune.errors import TargetError, UserCodeError
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import NonFiniteError, TooSlowError
from amptune.measure.numerics import parity as parity_module
from amptune.measure.numerics.casts import parameters_in_half
from amptune.measure.numerics.parity import judge
from amptune.measure.numerics.randomness import DrawingInFp32
from amptune.measure.numerics.reference import make_reference
from amptune.measure.numerics.short_training import Training
from amptune.measure.results.training_runs import LossCurve, Parity, Reference
from amptune.policy.settings import STOCK, Fp32Rule, LossScale, amp_recipe
from amptune.search.gate.judgement import judged as held_to_the_limits
from amptune.search.gate.numeric_findings import yardstick_findings

BF16, FP16 = amp_recipe("bf16"), amp_recipe("fp16")
HALF_WEIGHTS = Policy(weights="half")
O2 = Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True)
# By the clock of these tests, on which a step takes a second: for the longest look and for the shortest.
ENOUGH_S, LITTLE_S = 122.0, 17.0

on_a_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
each_device = pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda", 0), marks=on_a_gpu)], ids=str)
each_half = pytest.mark.parametrize("policy", [BF16, FP16], ids=["bf16", "fp16"])


@pytest.fixture(autouse=True)
def _a_step_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Training, "step_s", lambda _: 1.0)


def squares(model: nn.Module, batch: torch.Tensor) -> Any:
    return (model(batch).float() - batch.flatten(1)[:, :1].sin()).square().mean()


def workload_of(model: Callable[[], nn.Module], shape: tuple[int, ...] = (16,), **more: Any) -> Workload:
    usual: dict[str, Any] = {
        "loss": squares,
        "batch_size": 16,
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    }
    return any_workload(model, shape, **usual | more)


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


@dataclass(frozen=True)
class Judged:
    bench: Bench
    reference: Reference
    parity: Parity

    @property
    def failure(self) -> tuple[str, str]:
        assert self.parity.failure is not None
        return self.parity.failure.kind, self.parity.failure.message


def looked_at(workload: Workload, policy: Policy, *, device: torch.device = CPU, seconds: float = LITTLE_S) -> Judged:
    bench = Bench(workload, device)
    reference = make_reference(bench, STOCK, seconds)
    return Judged(bench, reference, judge(bench, policy, reference))


def sound(workload: Workload, policy: Policy, *, seconds: float = LITTLE_S) -> Parity:
    return require_sound(looked_at(workload, policy, seconds=seconds).parity)


def require_sound(parity: Parity) -> Parity:
    assert parity.failure is None, parity.failure
    assert parity.gradients
    return parity


def is_fp32_itself(parity: Parity) -> bool:
    exact = all((m.error, m.bias, m.size, m.vanished) == (0, 0, 1, 0) for m in parity.gradients)
    return exact and (parity.drift, parity.skipped_share) == (0, 0)


def is_close(parity: Parity) -> bool:
    return all(gradient.error < 0.05 and abs(gradient.size - 1) < 0.05 for gradient in parity.gradients)


# --- what is found of a healthy model ---------------------------------------------------------------------------------


@cache
def healthy(device: torch.device = CPU) -> tuple[Bench, Reference]:
    bench = Bench(workload_of(perceptron), device)
    return bench, make_reference(bench, STOCK, ENOUGH_S)


def beside_fp32(policy: Policy, device: torch.device = CPU) -> Parity:
    """The healthy model under the policy, beside the one reference."""
    bench, reference = healthy(device)
    return judge(bench, policy, reference)


@each_device
@each_half
def test_a_healthy_model_is_nearly_the_same_in_half(policy: Policy, device: torch.device) -> None:
    parity = require_sound(beside_fp32(policy, device))
    named = [f"{path}.{what}" for path in (0, 2, 3) for what in ("weight", "bias")]
    assert [gradient.name for gradient in parity.gradients] == named
    assert all(0 < gradient.error < 0.1 for gradient in parity.gradients)
    assert all(0.1 < gradient.noise < 10 for gradient in parity.gradients)
    assert abs(parity.drift) < 1
    assert all(0 < gradient.rounding < 0.1 for gradient in parity.gradients)
    assert parity.all_rounded_because is None
    assert (parity.evaluated, parity.evaluated_fp32, parity.evaluated_at_start) == (None, None, None)


@pytest.mark.parametrize("policy", [replace(O2, fp32_modules=(Fp32Rule(type="LayerNorm"),)), HALF_WEIGHTS])
def test_a_healthy_model_trains_with_half_weights_as_in_fp32(policy: Policy) -> None:
    parity = require_sound(beside_fp32(policy))
    assert is_close(parity)
    assert not is_fp32_itself(parity)


def test_little_time_buys_a_short_look_and_less_none() -> None:
    bench, long = healthy()
    short = make_reference(bench, STOCK, LITTLE_S)
    assert (len(short.run.gradients.sketches), len(short.run.curve.losses), short.thoroughness.replicas) == (3, 3, 1)
    assert (len(long.run.gradients.sketches), len(long.run.curve.losses), long.thoroughness.replicas) == (8, 32, 2)
    assert long.run.curve.losses[-8:] < long.run.curve.losses[:8]  # it trains
    assert not long.after_training, "gradients are compared at the start if all can be"
    with pytest.raises(TooSlowError, match=r"needs 11 s \(1 s a step\), and only 5 s are left for it; raise --budget"):
        make_reference(bench, STOCK, 5.0)


# --- random numbers ---------------------------------------------------------------------------------------------------


def attended_by_hand(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight, bias = torch.eye(4).repeat(3, 1), torch.zeros(12)
    x = x.transpose(0, 1)
    out, _ = F.multi_head_attention_forward(
        x, x, x, 4, 2, weight, bias, None, None, False, 0.5, torch.eye(4), torch.zeros(4), training=module.training
    )
    return out.transpose(0, 1)


attended = F.scaled_dot_product_attention
DROPPING: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: nn.Dropout(0.5),
    "channels": lambda: nn.Dropout1d(0.5),
    "functional, by name": lambda: Called(lambda module, x: F.dropout(x, p=0.5, training=module.training)),
    "torch.dropout": lambda: Called(lambda module, x: torch.dropout(x, 0.5, module.training)),
    "attention, by place": lambda: Called(lambda _, x: attended(x, x, x, None, 0.5)),
    "attention, by an attribute": lambda: Called(lambda own, x: attended(x, x, x, dropout_p=own.dropout), dropout=0.5),
    "attention by hand": lambda: Called(attended_by_hand),
    "MultiheadAttention": lambda: Called(
        lambda own, x: own.inner(x, x, x)[0], inner=nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)
    ),
    "checkpointed": lambda: Called(
        lambda module, x: checkpoint(lambda y: F.dropout(y, 0.5, module.training), x, use_reentrant=False)
    ),
}


@pytest.mark.parametrize("drop", DROPPING.values(), ids=DROPPING)
def test_gradients_are_compared_without_dropout_and_losses_with_it(drop: Callable[[], nn.Module]) -> None:
    """Another seed then changes nothing at all in gradients."""
    mean = Called(lambda _, x: x.mean(1))
    bench = Bench(workload_of(lambda: nn.Sequential(nn.Linear(4, 4), drop(), mean, nn.Linear(4, 1)), (4, 4)), CPU)

    def seeded(_: nn.Module) -> None:
        torch.manual_seed(1)

    with Training.on(bench, STOCK) as training:
        one, other = training.gradients(1), training.gradients(1, prepare=seeded)
        assert (one.sketches == other.sketches).all()
        assert training.curve([0]).losses != training.curve([0], seed=1).losses


OWN, OF_NUMPY, OF_PYTHON = torch.Generator(), np.random.default_rng(5), random.Random(5)
DRAWING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "of a shape": lambda x: torch.randn(x.shape),
    "like a tensor": torch.randn_like,
    "in place": lambda x: torch.empty_like(x).uniform_(),
    "a mask": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "a generator": lambda x: torch.randn(x.shape, generator=OWN),
    "numpy": lambda x: torch.from_numpy(OF_NUMPY.standard_normal(x.shape)),
    "Python": lambda x: torch.full(x.shape, OF_PYTHON.gauss(0.0, 1.0)),
}


def late(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Makes its generator in the first pass."""
    own.made = own.made or torch.Generator().manual_seed(3)
    return x * torch.rand(x.shape, generator=own.made)


def drawing(draw: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    return lambda: Called(lambda _, x: x * draw(x).to(x))


@pytest.mark.parametrize(
    "model", [*map(drawing, DRAWING.values()), lambda: Called(late, made=None)], ids=[*DRAWING, "made late"]
)
def test_what_the_model_draws_is_the_same_in_all_runs_that_are_compared(model: Callable[[], nn.Module]) -> None:
    """Else rounded weights seem to change the gradient too much for it to be judged."""
    parity = sound(workload_of(lambda: nn.Sequential(nn.Linear(4, 16), model(), nn.Linear(16, 1)), (4,)), BF16)
    assert is_close(parity)
    assert all(gradient.rounding < 0.05 for gradient in parity.gradients)


@pytest.mark.parametrize(
    "draw",
    [
        lambda dtype: torch.rand(4096, dtype=dtype),
        lambda dtype: torch.randn_like(torch.empty(4096, dtype=dtype)),
        lambda dtype: torch.empty(4096, dtype=dtype).uniform_(),
        lambda dtype: torch.bernoulli(torch.full((4096,), 0.5, dtype=dtype)),
    ],
)
def test_numbers_that_are_drawn_in_half_are_those_of_fp32_rounded(draw: Callable[[torch.dtype], torch.Tensor]) -> None:
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        with DrawingInFp32() as drawing:
            found.append(draw(dtype))
        assert drawing.has_drawn
    assert found[1].dtype is torch.bfloat16
    assert torch.equal(found[0].to(torch.bfloat16), found[1])


# --- where gradients are compared -------------------------------------------------------------------------------------


def gated(inside: Callable[[torch.Tensor], torch.Tensor] = lambda x: x, **more: Any) -> Workload:
    """A branch that starts closed: until the gate moves, nothing in it has a gradient."""

    def to_learn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(model(x), x[:, :4] + x[:, 4:8] * x[:, 8:12])

    def layers() -> nn.Module:
        branch = nn.Sequential(nn.Linear(32, 32), Called(lambda _, x: inside(x)), nn.Linear(32, 32))
        opening = lambda own, x: x + own.gate * own.branch(x).float()  # noqa: E731
        gate = Called(opening, branch=branch, gate=nn.Parameter(torch.zeros(1)))
        return nn.Sequential(nn.Linear(16, 32), gate, nn.Linear(32, 4))

    return workload_of(layers, loss=to_learn, **more)


def test_a_branch_that_starts_closed_is_judged_after_a_moment_of_training() -> None:
    """In FP32 what its fault computes is x; in bf16 the sum has no bits left for it."""
    found = looked_at(gated(lambda x: (x + 1e4) - 1e4), BF16, seconds=ENOUGH_S)
    assert found.reference.after_training
    assert "1.branch.2" in {finding.module for finding in held_to_the_limits(BF16, found.parity).shortcomings}
    sane = looked_at(gated(), BF16, seconds=ENOUGH_S)
    assert {gradient.name for gradient in sane.parity.gradients} == set(dict(sane.bench.model.named_parameters()))
    assert held_to_the_limits(BF16, sane.parity).passes


def hooked(hook: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Changes the gradient under autocast."""

    def call(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        if torch.is_autocast_enabled("cpu") and x.requires_grad:
            x.register_hook(hook)  # type: ignore[no-untyped-call]
        return x

    return Called(call)


@pytest.mark.parametrize(("passes", "is_sound"), [(8, True), (math.inf, False)])
def test_what_is_near_the_limits_is_looked_at_a_second_time_if_there_is_time(passes: float, is_sound: bool) -> None:
    """In so many of its first backward passes the gradient is 1.4 times as long as it should be."""
    stretches = 0

    def stretched(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal stretches
        stretches += 1
        return 1.4 * gradient if stretches <= passes else gradient

    layers = (nn.Linear(16, 32), nn.GELU(), hooked(stretched), nn.LayerNorm(32), nn.Linear(32, 4))
    found = looked_at(workload_of(lambda: nn.Sequential(*layers)), BF16, seconds=ENOUGH_S)
    parity = require_sound(found.parity)
    assert parity.again is not None
    assert parity.losses != parity.again.losses, "the second look is in the same order"
    assert held_to_the_limits(BF16, parity).passes == is_sound
    assert not held_to_the_limits(BF16, replace(parity, again=None)).passes
    stretches = 0
    assert judge(found.bench, BF16, found.reference, limit_s=found.reference.seconds).again is None


# --- the yardstick ----------------------------------------------------------------------------------------------------


def mixed() -> nn.Module:
    """`head` has a weight that is computed from two parameters; `words` and the norms are used in FP32."""
    return Called(
        lambda own, ids: own.head(own.batch_norm(own.lstm(own.norm(own.words(ids)))[0])) * own.scale,
        words=nn.Embedding(20, 16),
        norm=nn.LayerNorm(16),
        batch_norm=nn.BatchNorm1d(6),
        lstm=nn.LSTM(16, 16, batch_first=True),
        head=nn.utils.parametrizations.weight_norm(nn.Linear(16, 20)),
        scale=nn.Parameter(torch.ones(1)),
    )


def next_token(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@each_device
def test_the_yardstick_rounds_what_autocast_rounds(device: torch.device) -> None:
    require_lstm_in_bf16(device)
    workload = workload_of(mixed, batch=lambda n: torch.randint(20, (n, 7)), loss=next_token)
    names, unseen = parameters_in_half(Bench(workload, device), STOCK)
    rounded = set(names)
    assert unseen is None
    assert {f"head.parametrizations.weight.original{i}" for i in (0, 1)} <= rounded
    assert {"head.bias", "lstm.weight_ih_l0"} <= rounded
    assert not rounded & {"words.weight", "norm.weight", "batch_norm.weight", "scale"}


def test_all_parameters_are_rounded_where_autocast_breaks_the_model_or_casts_nothing_and_that_is_said() -> None:
    def refuses_half(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return x

    bench = Bench(gated(refuses_half), CPU)
    names, unseen = parameters_in_half(bench, STOCK)
    assert set(names) == set(dict(bench.model.named_parameters()))
    assert unseen is not None
    assert unseen.startswith("a step under autocast bf16 failed: error")
    (told,) = yardstick_findings(held_to_the_limits(BF16, Parity(all_rounded_because=unseen)))
    assert "its limits for gradients may be too wide" in str(told)
    norm = looked_at(workload_of(lambda: nn.LayerNorm(16)), BF16).parity
    assert norm.all_rounded_because == "autocast casts no parameter"


@pytest.mark.parametrize("odd", [Remembering, Growing, lambda: nn.BatchNorm1d(8).eval()])
def test_what_training_changes_beside_the_weights_is_put_back_before_each_run(odd: Callable[[], nn.Module]) -> None:
    """Bit for bit, as tests of the bench hold: else FP32 would differ from itself."""
    judged = looked_at(workload_of(lambda: nn.Sequential(nn.Linear(16, 8), odd(), nn.Linear(8, 4))), BF16)
    assert is_fp32_itself(judge(judged.bench, STOCK, judged.reference))


def constant(n: int) -> torch.Tensor:
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("samples", "parts", "more"),
    [
        (64, 8, {}),
        (9, 2, {}),
        (7, 1, {}),  # too little for parts
        (16, 1, {"batch": lambda _: constant(5)}),  # without a dimension of samples
        (16, 1, {"loss": lambda model, x: (model(x) - torch.ones(16, 4)).square().mean()}),  # taken whole alone
    ],
)
def test_constant_data_is_taken_in_parts_if_it_can_be(samples: int, parts: int, more: dict[str, Any]) -> None:
    given: dict[str, Any] = {"batch": constant, "batch_size": samples} | more
    judged = looked_at(workload_of(perceptron, **given), BF16, seconds=ENOUGH_S)
    assert (judged.parity.failure, judged.parity.spread) == (None, "parts" if parts > 1 else "none")
    assert len(judged.reference.run.gradients.sketches) == parts
    assert all((gradient.noise > 0.1) == (parts > 1) for gradient in judged.parity.gradients)


# --- a step of the user's own -----------------------------------------------------------------------------------------

FINISH = "scaler-step update zero"
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "fused Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, fused=True),
}


@pytest.mark.parametrize(
    ("step", "policy", "optimizer"),
    [
        (step_of(f"first {FINISH} second {FINISH}", squares), FP16, "SGD"),
        (None, replace(FP16, fused_optimizer=True), "fused Adam"),  # which is given scaled gradients
    ],
)
def test_gradients_are_unscaled_and_whole_whatever_the_users_step_does(
    step: Step | None, policy: Policy, optimizer: str
) -> None:
    own: dict[str, Any] = {} if step is None else {"loss": None, "step": step}
    parity = sound(workload_of(perceptron, optimizer=OPTIMIZERS[optimizer], **own), policy)
    assert is_close(parity)
    assert parity.skipped_share == 0


def test_gradients_are_those_that_the_optimizer_is_given_and_one_that_takes_no_step_is_an_error() -> None:
    clipping = step_of(f"backward unscale clip {FINISH}", squares)
    reference = make_reference(Bench(workload_of(perceptron, loss=None, step=clipping), CPU), STOCK, LITTLE_S)
    lengths = (reference.run.gradients.sketches**2).sum(1) ** 0.5
    assert lengths == pytest.approx(0.01, rel=1e-3)
    bench = Bench(workload_of(perceptron, loss=None, step=step_of("backward", squares)), CPU)
    with pytest.raises(TargetError, match=r"the optimizer that optimizer\(model\) returned took no step"):
        make_reference(bench, STOCK, LITTLE_S)


# --- loss scaling -----------------------------------------------------------------------------------------------------


def loud(by: float, optimizer: str = "SGD", **more: Any) -> Workload:
    """The gradient at the output, in half under autocast, is around `by` times 1/10; the steps do no harm."""

    def slowed(model: nn.Module) -> torch.optim.Optimizer:
        built = OPTIMIZERS[optimizer](model)
        built.param_groups[0]["lr"] = 1e-30
        return built

    parts = {"model": perceptron, "loss": lambda model, x: by * squares(model, x), "optimizer": slowed}
    return workload_of(**parts | more)


def scaled(init: float, growth_interval: int = 2000) -> Policy:
    return replace(FP16, loss_scale=LossScale(init=init, growth_interval=growth_interval))


@pytest.mark.parametrize(("by", "seconds", "optimizer"), [(10_000.0, ENOUGH_S, "SGD"), (1e7, LITTLE_S, "fused Adam")])
def test_the_loss_scale_settles_first(by: float, seconds: float, optimizer: str) -> None:
    parity = sound(loud(by, optimizer), FP16, seconds=seconds)
    assert parity.scale < 65536 / 2
    assert parity.skipped_share == 0
    assert is_close(parity)


@pytest.mark.parametrize("halvings", [8, 9, 19])
def test_however_far_the_scale_comes_down_it_is_no_failure(halvings: int) -> None:
    """In 8 steps, all that fit into so little time here, a scale that was halved as often has skipped none of them."""
    batch = constant(8)
    small = loud(1e5, model=lambda: nn.Linear(16, 4, bias=False), batch=lambda _: batch, batch_size=8)
    judged = looked_at(small, scaled(2.0**halvings), seconds=ENOUGH_S)
    assert len(judged.reference.run.curve.losses) == 8
    assert require_sound(judged.parity).skipped_share == 0


def test_skips_behind_the_settling_are_counted_and_what_overflows_at_every_scale_is_not_finite() -> None:
    for_ever = scaled(2.0**20, growth_interval=2)  # it grows until it skips
    assert 0.05 < sound(loud(1000.0), for_ever, seconds=ENOUGH_S).skipped_share < 0.5
    kind, message = looked_at(loud(1e20), FP16).failure
    assert kind == "nonfinite"
    assert "overflows at every loss scale" in message


# --- buffers, and what breaks -----------------------------------------------------------------------------------------


def beside(own: Any, x: torch.Tensor) -> Any:
    """What a BatchNorm beside the way takes in changes nothing that comes out; squares pass 65504 in fp16."""
    inner = 300 * own.inner(x).detach()
    own.norm(inner * inner)
    return own.head(x)


def test_statistics_poisoned_by_an_overflow_are_noticed_although_losses_and_gradients_are_sound() -> None:
    parts = {"inner": nn.Linear(16, 8), "norm": nn.BatchNorm1d(8), "head": nn.Linear(16, 4)}
    workload = workload_of(lambda: Called(beside, **parts))
    kind, message = looked_at(workload, FP16).failure
    assert kind == "nonfinite"
    assert "buffer norm.running" in message
    buffers = {buffer.path: buffer.off for buffer in sound(workload, BF16).buffers}
    assert all(0 < off < 0.1 for off in buffers.values())


def test_large_buffers_are_compared_too_and_a_mask_is_no_difference() -> None:
    def counting(own: Any, x: torch.Tensor) -> Any:
        y = own.linear(x)
        own.get_buffer("table").add_(1.0 if y.dtype == torch.float32 else 0.5)
        return y

    def with_buffers() -> nn.Module:
        model = Called(counting, linear=nn.Linear(16, 4))
        model.register_buffer("table", torch.zeros(300, 300))  # more than 2**16 elements
        model.register_buffer("mask", torch.full((16, 16), float("-inf")).triu(1))
        model.register_buffer("unknown", torch.full((4,), float("nan")))
        return model

    parity = sound(workload_of(with_buffers), BF16)
    assert {buffer.path: buffer.off for buffer in parity.buffers} == {"table": pytest.approx(0.5)}


def test_modules_whose_gradients_break_are_named() -> None:
    layers = (nn.Linear(16, 8), nn.Linear(8, 8), hooked(lambda gradient: gradient * torch.inf), nn.Linear(8, 4))
    judged = looked_at(workload_of(lambda: nn.Sequential(*layers)), BF16)
    assert judged.parity.broken == ("0", "1")
    assert judged.failure[1] == "the gradient of 0 and those of 1 modules more is not finite"


def failing(*_: object) -> Any:
    raise LookupError("in FP32 too")


@pytest.mark.parametrize(
    ("parts", "error", "words"),
    [
        ({"loss": failing}, LookupError, "in FP32 too"),
        ({"evaluate": failing}, UserCodeError, "in FP32 too"),
        ({"optimizer": lambda m: torch.optim.SGD(m.parameters(), lr=1e30)}, NonFiniteError, r"loss is \w+ at step \d"),
    ],
)
def test_what_breaks_in_fp32_itself_or_in_evaluate_is_raised(
    parts: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make_reference(Bench(workload_of(perceptron, **parts), CPU), STOCK, LITTLE_S)


@pytest.mark.slow
def test_a_process_with_other_weights_makes_a_reference_of_its_own() -> None:
    reference = replace(looked_at(workload_of(perceptron), STOCK).reference, seconds=LITTLE_S)
    elsewhere = Bench(workload_of(perceptron), CPU, seed=1)
    assert is_fp32_itself(judge(elsewhere, STOCK, reference))
    fingerprint = make_reference(Bench(workload_of(perceptron), CPU, seed=1), STOCK, LITTLE_S).fingerprint
    again = Bench(workload_of(perceptron), CPU, seed=1)
    assert not is_fp32_itself(judge(again, STOCK, replace(reference, fingerprint=fingerprint)))


def test_replicas_are_trained_when_a_curve_is_doubtful_and_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time, and can only widen what is allowed."""
    trained: list[int] = []
    orders: set[tuple[int, ...]] = set()
    curve = Training.curve

    def noted(self: Training, order: Sequence[int], seed: int = 0) -> LossCurve:
        trained.append(seed)
        orders.add(tuple(order))
        return curve(self, order, seed)

    monkeypatch.setattr(Training, "curve", noted)
    bench = Bench(workload_of(perceptron), CPU)
    reference = make_reference(bench, STOCK, ENOUGH_S)
    one = judge(bench, BF16, reference)
    assert trained == [0, 0], "FP32's and the policy's"
    assert one.losses_fp32 == (reference.run.curve.losses,)
    assert len(one.losses) == len(one.losses_fp32[0])
    monkeypatch.setattr(parity_module, "SUSPICIOUS", -1.0)
    assert len(judge(bench, BF16, reference).losses_fp32) == 3
    assert trained[2:] == [0, 1, 2, 1, 2], "the policy's, once; the replicas; the policy's in their orders"
    judge(bench, BF16, reference)
    assert trained[7:] == [0, 1, 2]
    assert (len(orders), len({tuple(sorted(order)) for order in orders})) == (3, 1), "the same batches in other orders"


def test_what_evaluate_says_is_kept() -> None:
    asked: list[bool] = []

    def evaluate(model: nn.Module) -> float:
        asked.append(torch.is_grad_enabled())
        model.eval()
        return float(next(model.parameters()).double().sum())

    judged = looked_at(workload_of(perceptron, evaluate=evaluate), BF16)
    assert judged.parity.evaluated_fp32 == judged.reference.run.curve.evaluated
    assert judged.parity.evaluated == pytest.approx(judged.parity.evaluated_fp32, rel=0.01)
    assert judged.parity.evaluated != judged.parity.evaluated_fp32
    with judged.bench.on_device(STOCK), torch.no_grad():
        assert judged.parity.evaluated_at_start == evaluate(judged.bench.model)
    assert set(asked) == {False}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fails", [False, True])
def test_device_memory_is_given_back(fails: bool) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        if fails and torch.is_autocast_enabled("cuda"):
            return squares(model, batch) * torch.empty(2**40, device="cuda").mean()
        return squares(model, batch)

    def big() -> nn.Module:
        return nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096))

    adam = {"optimizer": lambda model: torch.optim.Adam(model.parameters())}
    workload = workload_of(big, (4096,), loss=loss, batch_size=2048, **adam)
    judged = looked_at(workload, BF16, device=torch.device("cuda", 0))
    assert (judged.parity.failure is not None) == fails
    assert not fails or judged.failure[0] == "oom"
    assert torch.cuda.memory_reserved() < 2**20 * 16
