"""Every module of a step run again by itself, in this process: what is found, and that nobody notices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from benches import CPU, Called, Checkpointed, workload_of
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the name all of PyTorch's users give it

from amptune.measure.bench.bench import Bench
from amptune.measure.modules.sensitivity_pass import sense
from amptune.measure.results.half_effects import Half, ModuleSensitivity, Sensitivity
from amptune.policy.settings import STOCK

BOTH: tuple[Half, ...] = ("bf16", "fp16")
Model = nn.Module | Callable[[], nn.Module]
IDS: dict[str, Any] = {"batch": lambda n: torch.randint(10, (n, 3))}


def sensed(model: Model, shape: tuple[int, ...] = (8,), dtypes: tuple[Half, ...] = BOTH, **more: Any) -> Sensitivity:
    return sense(Bench(workload_of(model, shape, **more), CPU), STOCK, dtypes)


def modules_of(found: Sensitivity) -> dict[str, ModuleSensitivity]:
    return {module.path: module for module in found.modules}


def test_every_module_without_children_is_looked_at_in_the_order_of_the_calls() -> None:
    layers = nn.Sequential(nn.ReLU(), nn.Linear(8, 4))
    found = modules_of(sensed(nn.Sequential(nn.Linear(8, 8), layers, nn.LayerNorm(4), nn.Dropout(0.5))))
    assert list(found) == ["0", "1.0", "1.1", "2", "3"]
    assert (found["3"].fp32_ms, found["3"].half_ms["bf16"]) == (None, None), "dropout differs without half precision"
    for module in list(found.values())[:-1]:
        assert (module.calls, set(module.half_ms)) == (1, set(BOTH))
        assert all(ms is not None and ms > 0 for ms in (module.fp32_ms, *module.half_ms.values()))
    whole = sensed(nn.Linear(8, 2))
    assert list(modules_of(whole)) == [""]
    assert whole.cast_ms_per_byte > 0


def test_all_calls_of_a_module_count_whatever_it_is_called() -> None:
    linear, single = nn.Linear(8, 8), nn.Linear(8, 8)
    found = modules_of(sensed(nn.Sequential(linear, nn.Tanh(), linear, nn.Tanh(), linear, single)))
    assert {path: found[path].calls for path in ("0", "5")} == {"0": 3, "5": 1}
    shared, once = found["0"], found["5"]
    assert (shared.input_bytes, shared.output_bytes) == (3 * once.input_bytes, 3 * once.output_bytes)
    assert once.fp32_ms is not None
    assert shared.fp32_ms == pytest.approx(3 * once.fp32_ms)  # of one shape, so one time


@dataclass
class Two:
    one: torch.Tensor
    other: torch.Tensor
    name: str = "not a tensor"


@pytest.mark.parametrize(
    ("packed", "used"),
    [(lambda *two: two, lambda pair: pair[0]), (Two, lambda pair: pair.other)],
    ids=["first", "last in a dataclass"],
)
def test_of_several_outputs_those_that_are_used_are_looked_at(packed: Any, used: Any) -> None:
    giving = Called(lambda own, x: packed(x @ own.weight, 100 * x @ own.weight), weight=nn.Parameter(torch.eye(8)))
    module = modules_of(sensed(nn.Sequential(giving, Called(lambda _, two: used(two)))))["0"]
    assert module.output_bytes == module.input_bytes  # of the one that is used
    assert all(module.half_ms.values())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_looked_at_once(reentrant: bool) -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5))
    found = modules_of(sensed(Checkpointed(nn.Linear(8, 8), block, reentrant=reentrant)))
    assert {path: module.calls for path, module in found.items()} == dict.fromkeys(("0", "1.0", "1.1", "1.2"), 1)


def frozen_below() -> nn.Module:
    """A frozen embedding, a module that is never called, one whose output nobody uses, and one called by name."""

    def call(own: Any, ids: torch.Tensor) -> Any:
        hidden = own.embedding(ids)
        own.aside(hidden)
        return own.head(input=hidden)

    embedding = nn.Embedding(10, 8).requires_grad_(False)
    return Called(call, embedding=embedding, never=nn.Linear(8, 8), aside=nn.Linear(8, 8), head=nn.Linear(8, 2))


def once_only(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled("cpu"):
        raise RuntimeError("not a second time")
    return x * 2


def written_to_later() -> nn.Module:
    """The Dropout's input is changed by a sum in place, as residual connections often are."""

    def call(own: Any, x: torch.Tensor) -> Any:
        x = own.linear(x)
        dropped = own.drop(x)
        x += 1000.0
        return x + own.other(dropped)

    return Called(call, linear=nn.Linear(8, 8), drop=nn.Dropout(0.0), other=nn.Linear(8, 8))


def around(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *modules, nn.Linear(8, 2))


@pytest.mark.parametrize(
    ("model", "parts", "looked_at"),
    [
        (frozen_below, IDS, ["head"]),
        (lambda: around(Called(once_only)), {}, ["0", "2"]),
        (lambda: around(Called(lambda _, x: x.mul_(3.0))), {}, ["0", "2"]),
        (written_to_later, {}, ["linear", "other"]),
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
        found = modules_of(sensed(around(nn.ReLU(inplace=inplace))))
        return [(path, one.stream, one.output_bytes) for path, one in found.items()]

    assert figures(inplace=True) == figures(inplace=False)


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
    criterion = Called(lambda _, x: F.cross_entropy(x, x.argmax(-1)))
    model = nn.Sequential(nn.Linear(8, 8), criterion)
    assert list(modules_of(sensed(model, loss=lambda model, x: model(x)))) == ["0", "1"]


def keeping_its_mean() -> nn.Module:
    """Divides by a buffer that it changes in place: autograd refuses if that was changed since the forward pass."""

    def call(own: Any, x: torch.Tensor) -> Any:
        own.mean.mul_(0.9).add_(0.1 * x.detach().abs().mean(0))
        return x / own.mean

    model = Called(call)
    model.register_buffer("mean", torch.ones(8))
    return model


def noisy(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """As stochastic depth: what it draws is no effect of half precision."""
    return x * (torch.rand(len(x), 1, device=x.device) < 0.5)


def test_weights_buffers_and_attributes_are_put_back() -> None:
    layers = (nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), keeping_its_mean(), Called(noisy))
    bench = Bench(workload_of(around(*layers)), CPU)
    before = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
    assert modules_of(sense(bench, STOCK, BOTH))["4"].half_ms["bf16"]
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
        sgd.register_step_post_hook(lambda *_: after.append([t.clone() for t in model.state_dict().values()]))
        return sgd

    model = around(nn.BatchNorm1d(8), keeping_its_mean(), Called(noisy))
    sense(Bench(workload_of(model, optimizer=optimizer), CPU), STOCK, BOTH)
    first, _, watched, *_ = after  # two are timed, and then the first is taken again
    assert all(map(torch.equal, first, watched))


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


def test_producers_are_the_modules_whose_outputs_are_taken_as_they_are() -> None:
    def call(own: Any, x: torch.Tensor) -> Any:
        return own.plain(torch.tanh(own.join(own.left(x), own.right(x))))

    linears = {name: nn.Linear(8, 8) for name in ("left", "right", "plain")}
    found = modules_of(sensed(Called(call, join=Added(), **linears)))
    producers = {path: module.producers for path, module in found.items()}
    assert producers == {"left": (), "right": (), "join": ("left", "right"), "plain": ()}


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
