"""Every module of a step run again by itself, in this process: what is found, and that nobody notices."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from benches import CPU, Called, require_lstm_in_bf16
from benches import workload_of as any_workload
from torch import nn
from torch.utils.checkpoint import checkpoint

from amptune import Workload
from amptune.measure.bench.bench import Bench
from amptune.measure.modules.sensitivity_pass import sense
from amptune.measure.results.half_effects import Half, ModuleSensitivity, Sensitivity
from amptune.policy.settings import STOCK

BOTH: tuple[Half, ...] = ("bf16", "fp16")
Model = nn.Module | Callable[[], nn.Module]
IDS: dict[str, Any] = {"batch": lambda n: torch.randint(10, (n, 3))}


def workload_of(model: Model, shape: tuple[int, ...] = (8,), **more: Any) -> Workload:
    usual: dict[str, Any] = {
        "loss": lambda model, batch: model(batch).float().square().mean(),
        "optimizer": lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
    }
    return any_workload(model, shape, **usual | more)


def sensed(model: Model, shape: tuple[int, ...] = (8,), dtypes: tuple[Half, ...] = BOTH, **more: Any) -> Sensitivity:
    return sense(Bench(workload_of(model, shape, **more), CPU), STOCK, dtypes)


def modules_of(found: Sensitivity) -> dict[str, ModuleSensitivity]:
    return {module.path: module for module in found.modules}


# --- what models may be like ----------------------------------------------------------------------------------------


def test_every_module_without_children_is_looked_at_in_the_order_of_the_calls() -> None:
    found = sensed(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)), nn.LayerNorm(4)))
    assert list(modules_of(found)) == ["0", "1.0", "1.1", "2"]
    assert all(module.calls == 1 and set(module.half_ms) == set(BOTH) for module in found.modules)
    assert found.cast_ms_per_byte > 0
    assert list(modules_of(sensed(nn.Linear(8, 2)))) == [""]


class Repeating(nn.Module):
    """The same Linear under two names, the first of them called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.single = nn.Linear(8, 8), nn.Linear(8, 8)
        self.again = self.linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.single(self.linear(torch.tanh(self.again(torch.tanh(self.linear(x))))))
        return out


def test_all_calls_of_a_module_count_whatever_it_is_called() -> None:
    found = modules_of(sensed(Repeating()))
    assert {path: module.calls for path, module in found.items()} == {"linear": 3, "single": 1}
    shared, single = found["linear"], found["single"]
    assert (shared.input_bytes, shared.output_bytes) == (3 * single.input_bytes, 3 * single.output_bytes)
    assert shared.fp32_ms is not None
    assert single.fp32_ms is not None
    assert shared.fp32_ms == pytest.approx(3 * single.fp32_ms)  # of one shape, so one time


@dataclass
class Two:
    used: torch.Tensor
    unused: torch.Tensor
    name: str = "not a tensor"


class Splitting(nn.Module):
    """Takes its input by name, and gives back more than is used, in a structure of the user's."""

    def __init__(self, packed: Callable[..., Any]) -> None:
        super().__init__()
        self.weight, self.packed = nn.Parameter(torch.randn(8, 8)), packed

    def forward(self, *, x: torch.Tensor) -> Any:
        return self.packed(x @ self.weight, (x * 100) @ self.weight)


class UsesOne(nn.Module):
    def __init__(self, several: nn.Module, used: Callable[[Any], torch.Tensor]) -> None:
        super().__init__()
        self.several, self.used = several, used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(self.several(x=x) if isinstance(self.several, Splitting) else self.several(x))


@pytest.mark.parametrize(
    ("packed", "used"),
    [
        (lambda used, unused: (used, unused), lambda pair: pair[0]),
        (lambda used, unused: [unused, used], lambda pair: pair[1]),
        (Two, lambda pair: pair.used),
        (lambda used, unused: Two(unused, used), lambda pair: pair.unused),
    ],
    ids=["first", "last", "in a dataclass", "last in a dataclass"],
)
def test_of_several_outputs_those_that_are_used_are_looked_at(packed: Any, used: Any) -> None:
    (module,) = modules_of(sensed(UsesOne(Splitting(packed), used))).values()
    assert module.output_bytes == module.input_bytes  # of the one that is used
    assert all(module.half_ms.values())


@pytest.mark.parametrize("used", [lambda out: out[0], lambda out: out[1][0], lambda out: out[1][1]])
def test_an_lstm_is_looked_at_whichever_of_its_outputs_is_used(used: Callable[[Any], torch.Tensor]) -> None:
    require_lstm_in_bf16()
    (module,) = modules_of(sensed(UsesOne(nn.LSTM(8, 8, batch_first=True), used), (5, 8), ("bf16",))).values()
    assert module.half_ms["bf16"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_looked_at_once(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
            self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(checkpoint(self.block, self.first(x), use_reentrant=reentrant))
            return out

    found = modules_of(sensed(Checkpointed()))
    paths = ("first", "block.0", "block.1", "block.2", "last")
    assert {path: module.calls for path, module in found.items()} == dict.fromkeys(paths, 1)


class FrozenBelow(nn.Module):
    """A frozen embedding, a module that is never called, and one whose output nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8).requires_grad_(False)
        self.never, self.aside, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        self.aside(hidden)
        out: torch.Tensor = self.head(hidden)
        return out


def once_only(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        raise RuntimeError("not a second time")
    return x * 2


class WrittenToLater(nn.Module):
    """The Dropout's input is changed by a sum in place, as residual connections often are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop, self.other = nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        dropped = self.drop(x)
        x += 1000.0
        out: torch.Tensor = x + self.other(dropped)
        return out


def around(call: Callable[..., torch.Tensor]) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Called(call), nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("model", "parts", "looked_at"),
    [
        (FrozenBelow, IDS, ["head"]),
        (lambda: around(once_only), {}, ["0", "2"]),
        (lambda: around(lambda _, x: x.mul_(3.0)), {}, ["0", "2"]),
        (WrittenToLater, {}, ["linear", "other"]),
    ],
    ids=["no gradient", "raises", "writes into its input", "is written to later"],
)
def test_a_module_whose_figures_would_be_wrong_is_left_out_and_the_rest_goes_on(
    model: Model, parts: dict[str, Any], looked_at: list[str]
) -> None:
    found = sensed(model, **parts)
    assert [module.path for module in found.modules] == looked_at


def test_an_activation_in_place_is_looked_at_out_of_place() -> None:
    def figures(*, inplace: bool) -> list[object]:
        found = modules_of(sensed(nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 2))))
        return [(path, one.stream, one.output_bytes) for path, one in found.items()]

    assert figures(inplace=True) == figures(inplace=False)


class KeepsItsMean(nn.Module):
    """Divides by a buffer that it changes in place: autograd refuses if that was changed since the forward pass."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.mul_(0.9).add_(0.1 * x.detach().abs().mean(0))
        return x / self.mean


def test_a_module_that_changes_its_buffers_can_be_run_again() -> None:
    found = modules_of(sensed(nn.Sequential(nn.Linear(8, 8), KeepsItsMean(), nn.Linear(8, 2))))
    assert found["1"].half_ms["bf16"]


def test_several_backward_passes_through_one_graph_count_once() -> None:
    def step(_tuned: object, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        out.mean().backward(retain_graph=True)
        loss: torch.Tensor = out.square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = modules_of(sensed(nn.Sequential(nn.Linear(8, 8), nn.GELU()), loss=None, step=step))
    assert [module.calls for module in found.values()] == [1, 1]


def test_a_module_whose_output_is_where_the_backward_pass_starts_is_looked_at() -> None:
    class ItsOwnLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.criterion = nn.Linear(8, 8), nn.CrossEntropyLoss()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.criterion(self.linear(x), x.argmax(-1))
            return loss

    assert list(modules_of(sensed(ItsOwnLoss, loss=lambda model, x: model(x)))) == ["linear", "criterion"]


# --- training goes on as if nothing had been ------------------------------------------------------------------------


def noisy(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As stochastic depth: what it draws is no effect of half precision."""
    return x * (torch.rand(len(x), 1, device=x.device) < 0.5)


def test_weights_buffers_and_attributes_are_put_back() -> None:
    layers = (nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), KeepsItsMean(), Called(noisy))
    bench = Bench(workload_of(nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 2))), CPU)
    before = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
    sense(bench, STOCK, BOTH)
    assert (vars(layers[1])["inplace"], vars(layers[2])["p"]) == (True, 0.3)
    with bench.on_device(STOCK):
        assert all(torch.equal(tensor, before[name]) for name, tensor in bench.model.state_dict().items())
    assert all(parameter.grad is None for parameter in bench.model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in bench.model.modules())


def test_the_step_that_is_looked_at_is_the_step_that_training_takes() -> None:
    """Its running statistics, its random numbers and its new weights are those of a step that nobody watched."""
    after: list[list[torch.Tensor]] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        sgd.register_step_post_hook(
            lambda *_: after.append([*(t.clone() for t in model.state_dict().values()), torch.rand(3)])
        )
        return sgd

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), KeepsItsMean(), Called(noisy), nn.Linear(8, 2))
    sense(Bench(workload_of(model, optimizer=optimizer), CPU), STOCK, BOTH)
    first, _, watched = after  # two are timed, and then the first is taken again
    assert all(torch.equal(a, b) for a, b in zip(first[:-1], watched[:-1], strict=True))


# --- figures --------------------------------------------------------------------------------------------------------


def test_the_stream_says_what_autocast_makes_of_an_output() -> None:
    in_fp32 = Called(lambda _, x: x.float() * 2)
    layers = (nn.Linear(8, 8), nn.ReLU(), in_fp32, nn.Identity(), nn.Linear(8, 8), nn.LayerNorm(8))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as this torch does it on the CPU
        follows = nn.LayerNorm(8)(torch.randn(4, 8).bfloat16()).dtype is torch.bfloat16
    streams = ["half", "follows", "fp32", "follows", "half", "follows" if follows else "fp32"]
    assert [one.stream for one in modules_of(sensed(nn.Sequential(*layers))).values()] == streams
    embedded = modules_of(sensed(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 2)), **IDS))
    assert [one.stream for one in embedded.values()] == ["fp32", "half"]


class Added(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


class Branching(nn.Module):
    """`join` takes what `left` and `right` give, `plain` something that was changed on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.plain = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)
        self.join = Added()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.plain(torch.tanh(self.join(self.left(x), self.right(x))))
        return out


def test_producers_are_the_modules_whose_outputs_are_taken_as_they_are() -> None:
    producers = {path: module.producers for path, module in modules_of(sensed(Branching())).items()}
    assert producers == {"left": (), "right": (), "join": ("left", "right"), "plain": ()}


def test_times_are_those_of_every_dtype_and_dropout_has_none() -> None:
    found = modules_of(sensed(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 2))))
    linear, dropout = found["0"], found["1"]
    assert linear.fp32_ms is not None
    assert linear.fp32_ms > 0
    assert all(ms is not None and ms > 0 for ms in linear.half_ms.values())
    assert (dropout.fp32_ms, dropout.half_ms["bf16"]) == (None, None)


def test_the_whole_batch_is_looked_at_although_data_are_constant() -> None:
    constant = torch.randn(32, 8)
    (module,) = sensed(nn.Linear(8, 2), batch=lambda _: constant, batch_size=32).modules
    assert module.input_bytes == 4 * constant.numel()


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CPU's allocator does not say what its peak was")
def test_looking_takes_little_more_memory_than_training() -> None:
    def deep() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.GELU())))

    device = torch.device("cuda", 0)
    bench = Bench(workload_of(deep, (256,), batch_size=2**16), device)
    torch.cuda.reset_peak_memory_stats()
    with bench.on_device(STOCK) as (_, stepper):
        stepper()
        training = torch.cuda.max_memory_allocated()
    del stepper, _  # they hold batches
    bench.release()
    torch.cuda.reset_peak_memory_stats()
    sense(bench, STOCK, BOTH)
    assert torch.cuda.max_memory_allocated() < 1.5 * training
    assert torch.cuda.memory_reserved() < 2**20 * 16


def test_what_is_held_for_a_module_goes_once_it_was_looked_at() -> None:
    """Else all inputs would be there still when the backward pass ends, beside all gradients."""
    held: list[int] = []

    def count(_: torch.Tensor) -> None:
        gc.collect()
        held.append(sum(isinstance(one, torch.Tensor) and one.shape == (1021, 8) for one in gc.get_objects()))

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.rest = nn.Linear(8, 8), nn.Sequential(*(nn.GELU() for _ in range(20)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.stem(x).clone()
            hidden.register_hook(count)
            out: torch.Tensor = self.rest(hidden)
            return out

    sensed(Deep(), batch_size=1021)
    assert held[-1] <= held[0] + 5  # the first was a step that nobody watched
