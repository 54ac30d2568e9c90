"""Training under a policy beside FP32, in this process, on small models."""

from __future__ import annotations

import math
import random
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from benches import require_lstm_in_bf16
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
from amptune.measure.numerics.randomness import OwnGenerators
from amptune.measure.numerics.reference import completed, make_reference, order_of
from amptune.measure.numerics.short_training import Training
from amptune.measure.results.training_runs import LossCurve, Parity, Reference
from amptune.policy.settings import STOCK, Fp32Rule, LossScale, amp_recipe
from amptune.runtime.tuned import Tuned
from amptune.search.gate.judgement import judged as held_to_the_limits
from amptune.search.gate.numeric_findings import yardstick_findings

CPU = torch.device("cpu")
BF16, FP16 = amp_recipe("bf16"), amp_recipe("fp16")
# By the clock of these tests, on which a step takes a second: for the longest look and for the shortest.
ENOUGH_S, LITTLE_S = 122.0, 17.0

each_device = pytest.mark.parametrize(
    "device",
    [
        CPU,
        pytest.param(
            torch.device("cuda", 0),
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
    ids=str,
)


@pytest.fixture(autouse=True)
def _a_step_takes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Training, "step_s", lambda _: 1.0)


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = (model(batch).float() - batch.flatten(1)[:, :1].sin()).square().mean()
    return loss


def workload_of(model: Callable[[], nn.Module], shape: tuple[int, ...] = (16,), **more: object) -> Workload:
    parts: dict[str, object] = {
        "model": model,
        "batch": lambda n: torch.randn(n, *shape),
        "loss": squares,
        "optimizer": lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05),
        "batch_size": 16,
    }
    return Workload(**{**parts, **more})  # type: ignore[arg-type]  # parts by name


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))


@dataclass(frozen=True)
class Judged:
    bench: Bench
    reference: Reference
    parity: Parity


def looked_at(workload: Workload, policy: Policy, *, device: torch.device = CPU, seconds: float = LITTLE_S) -> Judged:
    bench = Bench(workload, device)
    reference = make_reference(bench, STOCK, seconds)
    return Judged(bench, reference, judge(bench, policy, reference))


def sound(workload: Workload, policy: Policy, *, device: torch.device = CPU, seconds: float = LITTLE_S) -> Parity:
    parity = looked_at(workload, policy, device=device, seconds=seconds).parity
    assert parity.failure is None, parity.failure
    assert parity.gradients
    return parity


def is_fp32_itself(parity: Parity) -> bool:
    exact = all((m.error, m.bias, m.size, m.vanished) == (0, 0, 1, 0) for m in parity.gradients)
    return exact and (parity.drift, parity.skipped_share) == (0, 0)


def is_close(parity: Parity, most: float = 0.05) -> bool:
    return all(gradient.error < most and abs(gradient.size - 1) < most for gradient in parity.gradients)


# --- what is found of healthy models ------------------------------------------------------------------------------


def test_fp32_beside_itself_is_exactly_the_same() -> None:
    assert is_fp32_itself(sound(workload_of(perceptron), STOCK, seconds=ENOUGH_S))


@each_device
@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bf16", "fp16"])
def test_a_healthy_model_is_nearly_the_same_in_half(policy: Policy, device: torch.device) -> None:
    parity = sound(workload_of(perceptron), policy, device=device, seconds=ENOUGH_S)
    named = [f"{path}.{what}" for path in (0, 2, 3) for what in ("weight", "bias")]
    assert [gradient.name for gradient in parity.gradients] == named
    assert all(0 < gradient.error < 0.1 for gradient in parity.gradients)
    assert all(0.1 < gradient.noise < 10 for gradient in parity.gradients)
    assert all(0 < gradient.rounding < 0.1 for gradient in parity.gradients)
    assert abs(parity.drift) < 1


@pytest.mark.slow
def test_bf16_rounds_more_coarsely_than_fp16() -> None:
    reference = looked_at(workload_of(perceptron), STOCK).reference
    coarse = judge(Bench(workload_of(perceptron), CPU), BF16, reference)
    fine = judge(Bench(workload_of(perceptron), CPU), FP16, reference)
    for of_bf16, of_fp16 in zip(coarse.gradients, fine.gradients, strict=True):
        assert of_bf16.rounding == pytest.approx(8 * of_fp16.rounding, rel=0.2)
        assert of_bf16.error > of_fp16.error


def test_little_time_buys_a_short_look() -> None:
    bench = Bench(workload_of(perceptron), CPU)
    short, long = make_reference(bench, STOCK, LITTLE_S), make_reference(bench, STOCK, ENOUGH_S)
    assert (len(short.run.gradients.sketches), len(short.run.curve.losses), short.thoroughness.replicas) == (3, 3, 1)
    assert (len(long.run.gradients.sketches), len(long.run.curve.losses), long.thoroughness.replicas) == (8, 32, 2)
    assert long.run.curve.losses[-8:] < long.run.curve.losses[:8]  # it trains


def test_steps_that_are_far_too_slow_are_not_judged() -> None:
    with pytest.raises(TooSlowError, match=r"needs 11 s \(1 s a step\), and only 5 s are left for it; raise --budget"):
        make_reference(Bench(workload_of(perceptron), CPU), STOCK, 5.0)


def test_replicas_see_the_same_batches_in_another_order() -> None:
    bench = Bench(workload_of(perceptron), CPU)
    reference, _ = completed(make_reference(bench, STOCK, ENOUGH_S), bench, "bf16", replicas=2)
    own = reference.run.curve.losses
    assert len(reference.replicas) == 2
    for replica in reference.replicas:
        assert replica.losses != own
        assert sum(replica.losses) == pytest.approx(sum(own), rel=0.2)


class WithDropout(nn.Module):
    """A Linear, what drops something, and a Linear; of (batch, 4 tokens, 4 features)."""

    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(4, 4)
        self.drop = drop
        self.after = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.after(self.drop(self.before(x)).mean(1))
        return out


class Called(nn.Module):
    def __init__(self, call: Callable[..., torch.Tensor], **attributes: float) -> None:
        super().__init__()
        self.call = call
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, x)


class Attentive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.attention(x, x, x, need_weights=False)[0]
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lstm(x)[0]
        return out


def attended_by_hand(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    weight, bias = torch.eye(4).repeat(3, 1), torch.zeros(12)
    x = x.transpose(0, 1)
    out, _ = F.multi_head_attention_forward(
        x, x, x, 4, 2, weight, bias, None, None, False, 0.5, torch.eye(4), torch.zeros(4), training=module.training
    )
    return out.transpose(0, 1)


DROPPING: dict[str, Callable[[], nn.Module]] = {
    "module": lambda: nn.Dropout(0.5),
    "in place": lambda: nn.Dropout(0.5, inplace=True),
    "alpha": lambda: nn.AlphaDropout(0.5),
    "channels": lambda: nn.Dropout1d(0.5),
    "functional": lambda: Called(lambda module, x: F.dropout(x, 0.5, module.training)),
    "functional, by name": lambda: Called(lambda module, x: F.dropout(x, p=0.5, training=module.training)),
    "torch.dropout": lambda: Called(lambda module, x: torch.dropout(x, 0.5, module.training)),
    "attention": lambda: Called(lambda _, x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)),
    "attention, by place": lambda: Called(lambda _, x: F.scaled_dot_product_attention(x, x, x, None, 0.5)),
    "attention, by an attribute": lambda: Called(
        lambda module, x: F.scaled_dot_product_attention(x, x, x, dropout_p=module.dropout), dropout=0.5
    ),
    "attention by hand": lambda: Called(attended_by_hand),
    "MultiheadAttention": Attentive,
    "LSTM": Recurrent,
    "checkpointed": lambda: Called(
        lambda module, x: checkpoint(lambda y: F.dropout(y, 0.5, module.training), x, use_reentrant=False)
    ),
}


@pytest.mark.parametrize("drop", DROPPING.values(), ids=DROPPING)
def test_gradients_are_compared_without_dropout(drop: Callable[[], nn.Module]) -> None:
    """Another seed then changes nothing at all."""
    bench = Bench(workload_of(lambda: WithDropout(drop()), (4, 4)), CPU)

    def seeded(_: nn.Module) -> None:
        torch.manual_seed(1)

    with Training.on(bench, STOCK) as training:
        one, other = training.gradients(1), training.gradients(1, prepare=seeded)
    assert (one.sketches == other.sketches).all()


def test_losses_are_those_of_training_with_dropout() -> None:
    bench = Bench(workload_of(lambda: WithDropout(nn.Dropout(0.5)), (4, 4)), CPU)
    with Training.on(bench, STOCK) as training:
        training.gradients(1)
        assert training.curve([0]).losses != training.curve([0], seed=1).losses
    assert bench.model.get_submodule("drop").p == 0.5


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


@pytest.mark.parametrize("draw", DRAWING.values(), ids=DRAWING)
def test_what_the_model_draws_is_the_same_in_all_runs_that_are_compared(
    draw: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Else rounded weights seem to change the gradient too much for it to be judged."""
    model = lambda: nn.Sequential(nn.Linear(4, 16), Called(lambda _, x: x * draw(x).to(x)), nn.Linear(16, 1))  # noqa: E731
    parity = sound(workload_of(model, (4,)), BF16, seconds=ENOUGH_S)
    assert all(gradient.error < 0.05 for gradient in parity.gradients)
    assert all(gradient.rounding < 0.05 for gradient in parity.gradients)


@pytest.mark.parametrize("draws", [False, True])
def test_a_model_that_draws_nothing_is_watched_for_an_epoch_only(*, draws: bool) -> None:
    """Watching takes microseconds for each call, a third of a small model's step."""
    watched = []

    def forward(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        watched.append(torch._C._len_torch_function_stack() > 0)
        return x * torch.rand_like(x) if draws else x

    bench = Bench(workload_of(lambda: nn.Sequential(Called(forward), nn.Linear(16, 4))), CPU)
    with Training.on(bench, BF16) as training:
        training.step()
        count = len(training.feed)
        watched.clear()
        training.curve(order_of(count, 3))
    assert watched == [True] * count + [draws] * 2 * count


def test_a_generator_that_the_first_pass_makes_is_seeded_too() -> None:
    class Late(nn.Linear):
        made: torch.Generator | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.made = self.made or torch.Generator().manual_seed(3)
            return super().forward(x * torch.rand(x.shape, generator=self.made))

    assert is_close(sound(workload_of(lambda: Late(4, 1), (4,)), BF16, seconds=ENOUGH_S))


def test_a_module_that_is_imported_by_its_first_attribute_stays_as_it_is() -> None:
    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise ModuleNotFoundError(f"{self.__name__}.{name} is not installed")

    lazy, drawn = Lazy("lazy"), random.Random(5)
    found = OwnGenerators(lambda: (lazy, drawn))
    before = drawn.random()
    found.seed(7)
    assert drawn.random() == random.Random(7).random() != before


# --- where gradients are compared -----------------------------------------------------------------------------------


class Gate(nn.Module):
    """A branch that starts closed: until the gate moves, nothing in it has a gradient."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.gate * self.branch(x).float()
        return out


def gated(inside: Callable[[torch.Tensor], torch.Tensor] = nn.Identity()) -> nn.Sequential:  # noqa: B008
    branch = nn.Sequential(nn.Linear(32, 32), Called(lambda _, x: inside(x)), nn.Linear(32, 32))
    return nn.Sequential(nn.Linear(16, 32), Gate(branch), nn.Linear(32, 4))


def learnable(n: int) -> torch.Tensor:
    return torch.randn(n, 16)


def to_learn(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), x[:, :4] + x[:, 4:8] * x[:, 8:12])


def rounded_away(x: torch.Tensor) -> torch.Tensor:
    """In FP32 this is x; in bf16 the sum has no bits left for it."""
    return (x + 1e4) - 1e4


def test_a_branch_that_starts_closed_is_judged_after_a_moment_of_training() -> None:
    workload = workload_of(partial(gated, rounded_away), batch=learnable, loss=to_learn)
    found = looked_at(workload, BF16, seconds=ENOUGH_S)
    assert found.reference.after_training
    assert "1.branch.2" in {finding.module for finding in held_to_the_limits(BF16, found.parity).shortcomings}
    healthy = looked_at(workload_of(gated, batch=learnable, loss=to_learn), BF16, seconds=ENOUGH_S)
    assert {gradient.name for gradient in healthy.parity.gradients} == set(dict(gated().named_parameters()))
    assert held_to_the_limits(BF16, healthy.parity).passes


class TooLong(nn.Module):
    """Under autocast its gradient is 1.4 times as long as it should be, in so many of its first backward passes."""

    def __init__(self, passes: float) -> None:
        super().__init__()
        self.left = passes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        if torch.is_autocast_enabled("cpu") and torch.is_grad_enabled():
            x.register_hook(self._stretched)  # type: ignore[no-untyped-call]
        return x

    def _stretched(self, gradient: torch.Tensor) -> torch.Tensor:
        global _stretches  # a model's own attributes are put back before each run
        _stretches += 1
        return 1.4 * gradient if _stretches <= self.left else gradient


_stretches = 0


@pytest.mark.parametrize(("passes", "is_sound"), [(8, True), (math.inf, False)])
def test_what_is_near_the_limits_is_looked_at_a_second_time(passes: float, is_sound: bool) -> None:
    global _stretches
    _stretches = 0
    model = lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), TooLong(passes), nn.LayerNorm(32), nn.Linear(32, 4))  # noqa: E731
    parity = sound(workload_of(model), BF16, seconds=ENOUGH_S)
    assert parity.again is not None
    assert parity.losses != parity.again.losses, "the second look is in the same order"
    assert held_to_the_limits(BF16, parity).passes == is_sound
    assert not held_to_the_limits(BF16, replace(parity, again=None)).passes


def test_there_is_no_second_look_without_time_for_it() -> None:
    global _stretches
    _stretches = 0
    bench = Bench(workload_of(lambda: nn.Sequential(nn.Linear(16, 32), TooLong(math.inf), nn.Linear(32, 4))), CPU)
    reference = make_reference(bench, STOCK, LITTLE_S)
    assert judge(bench, BF16, reference, limit_s=reference.seconds).again is None


def test_gradients_are_compared_at_the_start_if_all_can_be() -> None:
    assert not looked_at(workload_of(perceptron), BF16).reference.after_training


@pytest.mark.slow
def test_another_process_compares_gradients_at_the_weights_that_its_own_training_ends_at() -> None:
    """On a GPU they differ from those of the process that made the reference."""
    lr = [0.05]
    workload = workload_of(
        gated,
        batch=learnable,
        loss=to_learn,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=lr[0]),
    )
    reference = looked_at(workload, STOCK, seconds=ENOUGH_S).reference
    assert reference.after_training
    elsewhere = Bench(workload, CPU)
    assert is_fp32_itself(judge(elsewhere, STOCK, reference))
    lr[0] = 0.02
    other = judge(Bench(workload, CPU), STOCK, reference)
    assert all((one.error, one.bias, one.size) == (0, 0, 1) for one in other.gradients)


class Mixed(nn.Module):
    """`head` has a weight that is computed from two parameters; `words` and the norms are used in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.norm = nn.LayerNorm(16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(16, 20))
        self.batch_norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.batch_norm(self.lstm(self.norm(self.words(ids)))[0])) * self.scale
        return out


@each_device
def test_the_yardstick_rounds_what_autocast_rounds(device: torch.device) -> None:
    require_lstm_in_bf16(device)
    workload = workload_of(Mixed, batch=lambda n: torch.randint(20, (n, 7)), loss=next_token)
    names, unseen = parameters_in_half(Bench(workload, device), STOCK)
    rounded = set(names)
    assert unseen is None
    assert {f"head.parametrizations.weight.original{i}" for i in (0, 1)} <= rounded
    assert {"head.bias", "lstm.weight_ih_l0"} <= rounded
    assert not rounded & {"words.weight", "norm.weight", "batch_norm.weight", "scale"}


class InFp16(nn.Module):
    """Computes with its weight in fp16 whatever autocast's dtype is, as cuDNN's LSTM does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 16))
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.half() @ self.weight.half().T).float() + self.bias


def test_a_weight_that_becomes_fp16_under_bf16_autocast_is_rounded_too() -> None:
    names, unseen = parameters_in_half(Bench(workload_of(InFp16, (16,)), CPU), STOCK)
    assert unseen is None
    assert set(names) == {"weight"}


def test_all_parameters_are_rounded_where_autocast_breaks_the_model() -> None:
    def refuses_half(x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.float32
        return x

    bench = Bench(workload_of(partial(gated, refuses_half)), CPU)
    names, unseen = parameters_in_half(bench, STOCK)
    assert set(names) == set(dict(bench.model.named_parameters()))
    assert unseen is not None
    assert unseen.startswith("a step under autocast bf16 failed: error")
    (told,) = yardstick_findings(held_to_the_limits(BF16, Parity(all_rounded_because=unseen)))
    assert "its limits for gradients may be too wide" in str(told)


def test_the_judgement_says_that_all_parameters_were_taken_as_rounded() -> None:
    """Nothing here is cast by autocast."""
    workload = workload_of(lambda: nn.LayerNorm(16))
    assert looked_at(workload, BF16).parity.all_rounded_because == "autocast casts no parameter"
    assert looked_at(workload_of(lambda: nn.Linear(16, 4)), BF16).parity.all_rounded_because is None


# --- what a model may be like ---------------------------------------------------------------------------------------


class Own(nn.Module):
    """Has parameters itself, one of them frozen, and one that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 4) / 4)
        self.fixed = nn.Parameter(torch.ones(4), requires_grad=False)
        self.retired = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight) * self.fixed


def test_parameters_of_the_model_itself_frozen_and_unused_ones() -> None:
    judged = looked_at(workload_of(Own), BF16)
    assert [(gradient.name, gradient.module) for gradient in judged.parity.gradients] == [("weight", "")]
    assert judged.reference.names == ("weight", "retired.weight", "retired.bias")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.embedding(ids))
        return out


def next_token(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def test_tied_weights_are_looked_at_once() -> None:
    workload = workload_of(Tied, batch=lambda n: torch.randint(20, (n, 6)), loss=next_token)
    parity = sound(workload, BF16)
    assert [gradient.name for gradient in parity.gradients] == ["embedding.weight"]
    assert is_close(parity)


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bf16", "fp16"])
def test_sparse_gradients_are_compared(policy: Policy) -> None:
    workload = workload_of(
        lambda: nn.Sequential(nn.Embedding(50, 8, sparse=True), nn.Flatten(), nn.Linear(24, 4)),
        batch=lambda n: torch.randint(50, (n, 3)),
        loss=lambda model, ids: (model(ids).float() - 1).square().mean(),
    )
    parity = sound(workload, policy)
    assert [gradient.name for gradient in parity.gradients] == ["0.weight", "2.weight", "2.bias"]
    assert is_close(parity)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(9, dtype=torch.complex64))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.fft.irfft(torch.fft.rfft(x.float()) * self.spectrum, n=16))
        return out


@pytest.mark.filterwarnings("ignore:Casting complex values to real")  # Bench.fingerprint takes the real parts alone
def test_complex_parameters_are_compared() -> None:
    parity = sound(workload_of(Complex), BF16)
    assert [gradient.name for gradient in parity.gradients] == ["spectrum", "head.weight", "head.bias"]
    assert is_close(parity)


class Replacing(nn.Linear):
    """Replaces a buffer by a longer one at each step, as caches of positions are, and makes one."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__(16, 4)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.zeros(len(self.seen) + 1)
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.zeros(3))
        return super().forward(x) * (1 + len(self.seen))


def test_buffers_that_training_replaces_or_makes_are_put_back() -> None:
    judged = looked_at(workload_of(Replacing), STOCK)
    assert judged.parity.failure is None
    assert is_fp32_itself(judged.parity)
    assert {name: len(buffer) for name, buffer in judged.bench.model.named_buffers()} == {"seen": 1}


class Observing(nn.Linear):
    """Resizes a buffer in place at its first step, as observers of quantization-aware training do."""

    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__(16, 4)
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        largest = self.weight.detach().abs().amax(1)
        if not len(self.largest):
            self.largest.resize_(len(largest)).copy_(largest)
        self.largest.copy_(torch.maximum(self.largest, largest))
        return super().forward(x) / (1 + self.largest)


def test_buffers_that_training_resizes_are_put_back() -> None:
    judged = looked_at(workload_of(Observing), STOCK)
    assert judged.parity.failure is None
    assert is_fp32_itself(judged.parity)


class Replaying(nn.Linear):
    """Trains on what it has seen before too."""

    def __init__(self) -> None:
        super().__init__(16, 4)
        self.replay: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.replay.append(x)
        return super().forward(torch.stack(self.replay[-8:]).mean(0))


def test_what_a_model_remembers_beside_its_buffers_is_put_back() -> None:
    assert is_fp32_itself(looked_at(workload_of(Replaying), STOCK).parity)


def test_weights_buffers_and_modes_are_as_they_were_for_the_next() -> None:
    bench = Bench(workload_of(lambda: nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8).eval(), nn.Linear(8, 4))), CPU)
    before = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
    reference = make_reference(bench, STOCK, LITTLE_S)
    judge(bench, BF16, reference)
    assert is_fp32_itself(judge(bench, STOCK, reference))
    with bench.on_device(STOCK):
        assert all(torch.equal(tensor, before[name]) for name, tensor in bench.model.state_dict().items())
        assert [module.training for module in bench.model.children()] == [True, False, True]
    assert all(parameter.grad is None for parameter in bench.model.parameters())


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # in torch itself
def test_modules_are_named_as_the_user_does_where_the_policy_compiles() -> None:
    bench = Bench(workload_of(perceptron), CPU)
    with Training.on(bench, Policy(compile="default")) as training:  # compiling waits for the first step
        assert training.sketcher.names == tuple(dict(perceptron().named_parameters()))


# --- what data may be like ------------------------------------------------------------------------------------------


def constant(n: int) -> torch.Tensor:
    return torch.randn(n, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("samples", "parts"), [(64, 8), (16, 4), (9, 2)])
def test_constant_data_is_taken_in_parts(samples: int, parts: int) -> None:
    judged = looked_at(workload_of(perceptron, batch=constant, batch_size=samples), BF16, seconds=ENOUGH_S)
    assert (judged.parity.failure, judged.parity.spread) == (None, "parts")
    assert len(judged.reference.run.gradients.sketches) == parts
    assert all(gradient.noise > 0.1 for gradient in judged.parity.gradients)


@pytest.mark.parametrize("samples", [1, 7])
def test_constant_data_that_is_too_little_for_parts_gives_no_spread(samples: int) -> None:
    judged = looked_at(workload_of(perceptron, batch=constant, batch_size=samples), BF16, seconds=ENOUGH_S)
    assert (judged.parity.failure, judged.parity.spread) == (None, "none")
    assert all(gradient.noise == 0 for gradient in judged.parity.gradients)
    assert is_close(judged.parity)


class Sealed:
    """Holds a tensor where nobody looks."""

    def __init__(self, samples: int) -> None:
        self.rows = torch.randn(samples, 16)


def test_batches_that_are_objects_of_ones_own_are_not_taken_as_constant() -> None:
    rows = workload_of(perceptron, batch=Sealed, loss=lambda model, batch: model(batch.rows).square().mean())
    judged = looked_at(rows, BF16, seconds=ENOUGH_S)
    assert (judged.parity.failure, judged.parity.spread) == (None, "batches")


def test_constant_data_without_a_dimension_of_samples_gives_no_spread() -> None:
    parity = sound(workload_of(perceptron, batch=lambda _: constant(5)), BF16)
    assert parity.spread == "none"


def test_constant_data_that_the_workload_takes_whole_alone_gives_no_spread() -> None:
    """As where the targets are not a part of the batch."""
    target = torch.randn(16, 4)
    parity = sound(
        workload_of(perceptron, batch=constant, loss=lambda model, x: (model(x) - target).square().mean()), BF16
    )
    assert parity.spread == "none"


def test_batches_changed_in_place_are_whole_again_the_next_time() -> None:
    def in_place(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return squares(model, batch.mul_(0.5))

    assert is_fp32_itself(sound(workload_of(perceptron, loss=in_place), STOCK, seconds=ENOUGH_S))


def test_a_loss_may_have_one_element_in_a_dimension() -> None:
    workload = workload_of(perceptron, loss=lambda model, batch: squares(model, batch).reshape(1))
    assert is_close(sound(workload, BF16))


# --- a step of the user's own ---------------------------------------------------------------------------------------

Step = Callable[[Tuned, nn.Module, torch.optim.Optimizer, torch.Tensor], torch.Tensor]


def backward(tuned: Tuned, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with tuned.autocast():
        loss = squares(model, batch)
    tuned.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch has not typed it
    return loss


def finish(tuned: Tuned, optimizer: torch.optim.Optimizer) -> None:
    tuned.scaler.step(optimizer)
    tuned.scaler.update()
    optimizer.zero_grad()


def clipping(tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss = backward(tuned, model, batch)
    tuned.scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    finish(tuned, optimizer)
    return loss


def accumulating(tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    for part in batch.chunk(2):
        loss = backward(tuned, model, part)
    finish(tuned, optimizer)
    return loss


def twice(tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    for part in batch.chunk(2):
        loss = backward(tuned, model, part)
        finish(tuned, optimizer)
    return loss


class EveryThird:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, tuned: Tuned, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor
    ) -> torch.Tensor:
        loss = backward(tuned, model, batch)
        self.calls += 1
        if self.calls % 3 == 0:
            finish(tuned, optimizer)
        return loss


STEPS: dict[str, Step] = {
    "clipping": clipping,
    "accumulating": accumulating,
    "twice": twice,
    "every third": EveryThird(),
}
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "fused Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, fused=True),
}


@pytest.mark.parametrize("policy", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_gradients_are_unscaled_and_whole_in_a_step_of_the_users_own(
    step: Step, optimizer: Callable[[nn.Module], torch.optim.Optimizer], policy: Policy
) -> None:
    parity = sound(workload_of(perceptron, loss=None, step=step, optimizer=optimizer), policy)
    assert is_close(parity)
    assert parity.skipped_share == 0


def test_gradients_are_those_that_the_optimizer_is_given() -> None:
    judged = looked_at(workload_of(perceptron, loss=None, step=clipping), STOCK)
    lengths = (judged.reference.run.gradients.sketches**2).sum(1) ** 0.5
    assert lengths == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_fused_optimizers_are_given_scaled_gradients_which_are_unscaled(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
) -> None:
    parity = sound(workload_of(perceptron, optimizer=optimizer), replace(FP16, fused_optimizer=True))
    assert is_close(parity)


def test_a_step_that_leaves_its_optimizer_alone_is_a_clear_error() -> None:
    def step(_tuned: Tuned, model: nn.Module, _: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        return squares(model, batch)

    bench = Bench(workload_of(perceptron, loss=None, step=step), CPU)
    with pytest.raises(TargetError, match=r"the optimizer that optimizer\(model\) returned took no step"):
        make_reference(bench, STOCK, LITTLE_S)


# --- loss scaling ---------------------------------------------------------------------------------------------------


def loud(by: float) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    """The gradient at the model's output, in half under autocast, is around `by` times 1/10."""

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return by * squares(model, batch)

    return loss


def slowed(build: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[nn.Module], torch.optim.Optimizer]:
    """At a learning rate at which no gradient does harm."""

    def built(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = build(model)
        optimizer.param_groups[0]["lr"] = 1e-30
        return optimizer

    return built


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("seconds", [LITTLE_S, ENOUGH_S])
@pytest.mark.parametrize("by", [100.0, 10_000.0, 1e7])
def test_the_loss_scale_settles_first(
    by: float, seconds: float, optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    workload = workload_of(perceptron, loss=loud(by), optimizer=slowed(optimizer))
    parity = sound(workload, FP16, seconds=seconds)
    assert parity.scale < 65536 / 2
    assert parity.skipped_share == 0
    assert is_close(parity)


@pytest.mark.parametrize("halvings", range(6, 20))
def test_however_far_the_scale_comes_down_it_is_no_failure(halvings: int) -> None:
    """In 8 steps, all that fit into so little time here, a scale that was halved as often has skipped none of them."""
    policy = replace(FP16, loss_scale=LossScale(init=2.0**halvings, growth_interval=2000))
    batch = constant(8)
    workload = workload_of(
        lambda: nn.Linear(16, 4, bias=False),
        batch=lambda _: batch,
        batch_size=8,
        loss=loud(1e5),
        optimizer=slowed(OPTIMIZERS["SGD"]),
    )
    judged = looked_at(workload, policy, seconds=ENOUGH_S)
    assert len(judged.reference.run.curve.losses) == 8
    assert judged.parity.failure is None, judged.parity.failure
    assert judged.parity.skipped_share == 0


def test_a_gradient_that_overflows_at_every_scale_is_not_finite() -> None:
    judged = looked_at(workload_of(perceptron, loss=loud(1e20), optimizer=slowed(OPTIMIZERS["SGD"])), FP16)
    assert judged.parity.failure is not None
    assert judged.parity.failure.kind == "nonfinite"
    assert "overflows at every loss scale" in judged.parity.failure.message


def test_skips_behind_the_settling_are_counted() -> None:
    policy = replace(FP16, loss_scale=LossScale(init=2.0**20, growth_interval=2))  # grows until it skips, for ever
    workload = workload_of(perceptron, loss=loud(1000.0), optimizer=slowed(OPTIMIZERS["SGD"]))
    parity = sound(workload, policy, seconds=ENOUGH_S)
    assert 0.05 < parity.skipped_share < 0.5


class Poisoned(nn.Module):
    """Squares that pass 65504 in fp16, in front of a BatchNorm; the branch adds nothing to what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.loud = nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        amplitude = self.loud(300 * x)
        self.norm((amplitude * amplitude).detach())
        out: torch.Tensor = self.head(x)
        return out


def test_statistics_poisoned_by_an_overflow_are_noticed() -> None:
    """Although losses and gradients are sound."""
    judged = looked_at(workload_of(Poisoned), FP16)
    assert judged.parity.failure is not None
    assert judged.parity.failure.kind == "nonfinite"
    assert "buffer norm.running" in judged.parity.failure.message
    assert looked_at(workload_of(Poisoned), BF16).parity.failure is None


def test_a_running_mean_that_is_made_of_rounding_errors_is_harmless() -> None:
    """What comes out of a BatchNorm, and so out of the layer behind it, has no mean: MobileNet's linear bottlenecks."""
    layers = [nn.Linear(16, 32, bias=False), nn.BatchNorm1d(32), nn.Linear(32, 8, bias=False), nn.BatchNorm1d(8)]
    parity = sound(workload_of(lambda: nn.Sequential(*layers, nn.Linear(8, 4))), BF16)
    assert {buffer.path for buffer in parity.buffers} >= {"3.running_mean", "3.running_var"}
    assert all(buffer.off < 0.05 for buffer in parity.buffers)


class Displaced(nn.Module):
    """Half precision moves what a BatchNorm takes in; the branch adds nothing to what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.inner(x).detach()
        self.norm(inner.float() + (inner.dtype != torch.float32))
        out: torch.Tensor = self.head(x)
        return out


def test_a_running_mean_is_off_in_units_of_its_deviation() -> None:
    parity = sound(workload_of(Displaced), BF16)
    off = {buffer.path: buffer.off for buffer in parity.buffers}
    assert 0.1 < off["norm.running_mean"] < 3
    assert off["norm.running_var"] < 0.05


class Remembering(nn.Module):
    """A table of more than 2**16 elements in which half precision writes only half of what FP32 does; and a mask."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 300)
        self.head = nn.Linear(300, 4)
        self.register_buffer("table", torch.zeros(300, 300))
        self.register_buffer("mask", torch.full((16, 16), float("-inf")).triu(1))
        self.register_buffer("unknown", torch.full((4,), float("nan")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.layer(x)
        with torch.no_grad():
            self.table += 1.0 if inner.dtype == torch.float32 else 0.5
        out: torch.Tensor = self.head(inner)
        return out


def test_large_buffers_are_compared_too_and_a_mask_is_no_difference() -> None:
    parity = sound(workload_of(Remembering), BF16)
    assert {buffer.path: buffer.off for buffer in parity.buffers} == {"table": pytest.approx(0.5)}


class Breaking(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient if gradient.dtype is torch.float32 else gradient * torch.inf


class BreaksBackward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8))
        self.outer = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = Breaking.apply(self.inner(x))  # type: ignore[no-untyped-call]  # torch's own
        out: torch.Tensor = self.outer(hidden)
        return out


def test_modules_whose_gradients_break_are_named() -> None:
    judged = looked_at(workload_of(BreaksBackward), BF16)
    assert judged.parity.broken == ("inner.0", "inner.1")
    assert judged.parity.failure is not None
    assert judged.parity.failure.message == "the gradient of inner.0 and those of 1 modules more is not finite"


def test_a_curve_that_breaks_says_at_which_step() -> None:
    workload = workload_of(perceptron, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e30))
    with pytest.raises(NonFiniteError, match=r"the loss is (nan|inf) at step \d"):
        make_reference(Bench(workload, CPU), STOCK, LITTLE_S)


# --- another process, evaluation, failures --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_with_other_weights_makes_a_reference_of_its_own() -> None:
    reference = replace(looked_at(workload_of(perceptron), STOCK).reference, seconds=LITTLE_S)
    elsewhere = Bench(workload_of(perceptron), CPU, seed=1)
    assert is_fp32_itself(judge(elsewhere, STOCK, reference))
    fingerprint = _fingerprint(Bench(workload_of(perceptron), CPU, seed=1))
    again = Bench(workload_of(perceptron), CPU, seed=1)
    assert not is_fp32_itself(judge(again, STOCK, replace(reference, fingerprint=fingerprint)))


def _fingerprint(bench: Bench) -> tuple[float, ...]:
    return make_reference(bench, STOCK, LITTLE_S).fingerprint


def test_a_process_with_the_same_weights_and_batches_takes_the_reference_as_it_is() -> None:
    made = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made.append(model)
        return torch.optim.SGD(model.parameters(), lr=0.05)

    reference = make_reference(Bench(workload_of(perceptron), CPU), STOCK, LITTLE_S)
    bench = Bench(workload_of(perceptron, optimizer=optimizer), CPU)
    judge(bench, BF16, reference)
    assert len(made) == 4  # the bench's own, one for the first pass, one for gradients and one for the curve
    judge(bench, FP16, reference)
    assert len(made) > 7, "the rounding of fp16 is new"
    made.clear()
    judge(bench, FP16, reference)
    assert len(made) < 7, "and known by then"


def test_replicas_are_trained_when_a_curve_is_doubtful_and_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take most of the time, and can only widen what is allowed."""
    trained: list[int] = []
    curve = Training.curve

    def noted(self: Training, order: Sequence[int], seed: int = 0) -> LossCurve:
        trained.append(seed)
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
    assert asked
    assert not any(asked)


def test_an_evaluation_that_is_no_number_before_training_is_left_out() -> None:
    seen: list[float] = []

    def evaluate(model: nn.Module) -> float:
        seen.append(float(next(model.parameters()).double().sum()))
        return math.nan if len(seen) == 1 else 1.0

    parity = looked_at(workload_of(perceptron, evaluate=evaluate), BF16).parity
    assert (parity.evaluated_at_start, parity.evaluated, parity.evaluated_fp32) == (None, 1.0, 1.0)


def test_without_evaluate_there_is_nothing_to_keep() -> None:
    parity = sound(workload_of(perceptron), BF16)
    assert (parity.evaluated, parity.evaluated_fp32, parity.evaluated_at_start) == (None, None, None)


def raising_in_half(error: BaseException) -> Callable[[nn.Module, torch.Tensor], torch.Tensor]:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise error
        return squares(model, batch)

    return loss


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (KeyError("key"), "error"),
        (SystemExit(3), "error"),
        (torch.OutOfMemoryError("CUDA out of memory."), "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes"), "oom"),
        (RuntimeError("\"addmm\" not implemented for 'Half'"), "unsupported"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else value,
)
def test_a_step_that_raises_is_a_typed_failure(error: BaseException, kind: str) -> None:
    judged = looked_at(workload_of(perceptron, loss=raising_in_half(error)), BF16)
    assert judged.parity.failure is not None
    assert (judged.parity.failure.kind, judged.parity.failure.exception) == (kind, type(error).__name__)
    assert judged.parity.failure.where is not None
    assert is_fp32_itself(judge(judged.bench, STOCK, judged.reference))


def test_what_fp32_itself_raises_is_raised() -> None:
    def loss(*_: object) -> torch.Tensor:
        raise KeyError("in FP32 too")

    with pytest.raises(KeyError, match="in FP32 too"):
        make_reference(Bench(workload_of(perceptron, loss=loss), CPU), STOCK, LITTLE_S)


def test_an_evaluate_that_raises_is_told_as_such() -> None:
    def evaluate(_: nn.Module) -> float:
        raise LookupError("no test set")

    with pytest.raises(UserCodeError, match="no test set"):
        make_reference(Bench(workload_of(perceptron, evaluate=evaluate), CPU), STOCK, LITTLE_S)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("fails", [False, True])
def test_device_memory_is_given_back(fails: bool) -> None:
    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if fails and torch.is_autocast_enabled("cuda"):
            return squares(model, batch) * torch.empty(2**40, device="cuda").mean()
        return squares(model, batch)

    def big() -> nn.Module:
        return nn.Sequential(nn.Linear(4096, 4096), nn.Linear(4096, 4096))

    adam = {"optimizer": lambda model: torch.optim.Adam(model.parameters())}
    workload = workload_of(big, (4096,), loss=loss, batch_size=2048, **adam)
    judged = looked_at(workload, BF16, device=torch.device("cuda", 0))
    assert (judged.parity.failure is not None) == fails
    assert not fails or (judged.parity.failure is not None and judged.parity.failure.kind == "oom")
    assert torch.cuda.memory_reserved() < 2**20 * 16


O2 = Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True)


@pytest.mark.parametrize(
    "policy", [O2, replace(O2, fp32_modules=(Fp32Rule(type="LayerNorm"),)), Policy(weights="half")]
)
def test_a_healthy_model_trains_with_half_weights_as_in_fp32(policy: Policy) -> None:
    parity = sound(workload_of(perceptron), policy)
    assert is_close(parity)
    assert not is_fp32_itself(parity)


def test_half_weights_that_overflow_are_not_finite() -> None:
    class Large(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 1e5) / 1e5

    found = looked_at(workload_of(lambda: nn.Sequential(nn.Linear(16, 4), Large(), nn.Linear(4, 4))), O2)
    assert found.parity.failure is not None
    assert found.parity.failure.kind == "nonfinite"


@pytest.mark.slow
def test_an_update_that_half_weights_lose_shows_in_the_loss() -> None:
    """Steps of a 2500th of a weight: in FP32 and with master weights it learns, in half it stands still."""
    workload = workload_of(
        lambda: Constant(),
        loss=lambda model, batch: (model(batch) - 2).square().mean(),
        shape=(1,),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=2e-4),
    )
    with_masters, without = (sound(workload, policy, seconds=ENOUGH_S) for policy in (O2, Policy(weights="half")))
    assert abs(with_masters.drift_share) < 1e-3 < without.drift_share


class Constant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight + 0 * x
