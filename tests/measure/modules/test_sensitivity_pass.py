"""Every module of a step run again by itself, in this process: what is found, and that nobody notices."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from benches import require_lstm_in_bf16
from torch import nn
from torch.utils.checkpoint import checkpoint

from amptune import Workload
from amptune.measure.bench.bench import Bench
from amptune.measure.modules.sensitivity_pass import sense
from amptune.measure.results.half_effects import Half, ModuleSensitivity, Sensitivity
from amptune.policy.settings import STOCK

CPU = torch.device("cpu")
BOTH: tuple[Half, ...] = ("bf16", "fp16")


def workload_of(model: nn.Module | Callable[[], nn.Module], shape: tuple[int, ...] = (8,), **more: object) -> Workload:
    parts: dict[str, object] = {
        "model": (lambda: model) if isinstance(model, nn.Module) else model,
        "batch": lambda n: torch.randn(n, *shape),
        "loss": lambda model, batch: model(batch).float().square().mean(),
        "optimizer": lambda model: torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        "batch_size": 4,
    }
    return Workload(**{**parts, **more})  # type: ignore[arg-type]  # parts by name


def sensed(
    model: nn.Module | Callable[[], nn.Module],
    shape: tuple[int, ...] = (8,),
    dtypes: tuple[Half, ...] = BOTH,
    **more: object,
) -> Sensitivity:
    return sense(Bench(workload_of(model, shape, **more), CPU), STOCK, dtypes)


def modules_of(found: Sensitivity) -> dict[str, ModuleSensitivity]:
    return {module.path: module for module in found.modules}


# --- what models may be like ----------------------------------------------------------------------------------------


def test_every_module_without_children_is_looked_at_in_the_order_of_the_calls() -> None:
    found = sensed(nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 4)), nn.LayerNorm(4)))
    assert list(modules_of(found)) == ["0", "1.0", "1.1", "2"]
    assert found.left_out == {}
    assert all(module.calls == 1 and set(module.half_ms) == set(BOTH) for module in found.modules)
    assert found.step_ms > 0
    assert found.cast_ms_per_byte > 0


def test_a_model_that_is_one_module_has_no_path() -> None:
    assert list(modules_of(sensed(nn.Linear(8, 2)))) == [""]


class Repeating(nn.Module):
    """The same Linear under two names, the first of them called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.again = self.linear
        self.single = nn.Linear(8, 8)

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
    """Takes its input by name, and gives back more than is used; `first` says where in it that stands."""

    def __init__(self, *, first: bool, structured: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.first = first
        self.structured = structured

    def forward(self, *, x: torch.Tensor) -> Any:
        used, unused = x @ self.weight, (x * 100) @ self.weight
        if self.structured:
            return Two(used, unused) if self.first else Two(unused, used)
        return (used, unused) if self.first else [unused, used]


class UsesOne(nn.Module):
    def __init__(self, splitting: Splitting) -> None:
        super().__init__()
        self.splitting = splitting

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.splitting(x=x)
        pair = (out.used, out.unused) if isinstance(out, Two) else tuple(out)
        chosen: torch.Tensor = pair[0] if self.splitting.first else pair[1]
        return chosen


@pytest.mark.parametrize("structured", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_of_several_outputs_those_that_are_used_are_looked_at(first: bool, structured: bool) -> None:
    found = sensed(UsesOne(Splitting(first=first, structured=structured)))
    assert found.left_out == {}
    (module,) = found.modules
    assert module.output_bytes == module.input_bytes  # of the one that is used
    assert all(module.half_ms.values())


class Recurrent(nn.Module):
    def __init__(self, which: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.which = which

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs, (hidden, cell) = self.lstm(x)
        chosen: torch.Tensor = (outputs, hidden, cell)[self.which]
        return chosen


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_lstm_is_looked_at_whichever_of_its_outputs_is_used(which: int) -> None:
    require_lstm_in_bf16()
    found = sensed(Recurrent(which), (5, 8), ("bf16",))
    assert found.left_out == {}
    (module,) = found.modules
    assert module.half_ms["bf16"]


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.block = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.5))
        self.last = nn.Linear(8, 2)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.block, self.first(x), use_reentrant=self.reentrant)
        out: torch.Tensor = self.last(hidden)
        return out


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_are_looked_at_once(reentrant: bool) -> None:
    found = sensed(Checkpointed(reentrant=reentrant))
    assert found.left_out == {}
    assert {path: module.calls for path, module in modules_of(found).items()} == dict.fromkeys(
        ("first", "block.0", "block.1", "block.2", "last"), 1
    )


class FrozenBelow(nn.Module):
    """A frozen embedding, a module that is never called, and one whose output nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.embedding.weight.requires_grad_(False)
        self.never = nn.Linear(8, 8)
        self.aside = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        self.aside(hidden)
        out: torch.Tensor = self.head(hidden)
        return out


def test_modules_that_no_gradient_passes_are_named() -> None:
    found = sensed(FrozenBelow(), batch=lambda n: torch.randint(10, (n, 3)))
    assert list(modules_of(found)) == ["head"]
    assert found.left_out == dict.fromkeys(("embedding", "aside"), "no gradient passes through it")


def test_an_embedding_that_trains_is_looked_at_and_stays_in_fp32() -> None:
    found = sensed(nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 2)), batch=lambda n: torch.randint(10, (n, 3)))
    assert [module.stream for module in found.modules] == ["fp32", "half"]


class OnceOnly(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("not a second time")
        return super().forward(x)


def test_a_module_that_raises_when_it_is_run_again_is_named_and_the_rest_goes_on() -> None:
    found = sensed(nn.Sequential(nn.Linear(8, 8), OnceOnly(8, 8), nn.Linear(8, 2)))
    assert list(modules_of(found)) == ["0", "2"]
    assert found.left_out == {"1": "RuntimeError: not a second time"}


class WritesIntoItsInput(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(3.0)


class WrittenToLater(nn.Module):
    """The Dropout's input is changed by a sum in place, as residual connections often are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.drop = nn.Dropout(0.0)
        self.other = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        dropped = self.drop(x)
        x += 1000.0
        out: torch.Tensor = x + self.other(dropped)
        return out


@pytest.mark.parametrize(
    ("model", "path"),
    [(lambda: nn.Sequential(nn.Linear(8, 8), WritesIntoItsInput(), nn.Linear(8, 2)), "1"), (WrittenToLater, "drop")],
    ids=["by itself", "later"],
)
def test_a_module_whose_input_is_written_to_is_named_since_its_figures_would_be_wrong(
    model: Callable[[], nn.Module], path: str
) -> None:
    found = sensed(model)
    assert list(found.left_out) == [path]
    assert "inputs are written to" in found.left_out[path]
    assert len(found.modules) == 2


def test_an_activation_in_place_is_looked_at_out_of_place() -> None:
    def model(*, inplace: bool) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=inplace), nn.Linear(8, 2))

    found, plain = sensed(lambda: model(inplace=True)), sensed(lambda: model(inplace=False))
    assert found.left_out == {}
    assert [(one.path, one.stream, one.output_bytes) for one in found.modules] == [
        (one.path, one.stream, one.output_bytes) for one in plain.modules
    ]


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
    found = sensed(nn.Sequential(nn.Linear(8, 8), KeepsItsMean(), nn.Linear(8, 2)))
    assert found.left_out == {}
    assert modules_of(found)["1"].half_ms["bf16"]


class Noisy(nn.Module):
    """As stochastic depth: what it draws is no effect of half precision."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(len(x), 1, device=x.device) < 0.5)


def test_several_backward_passes_through_one_graph_count_once() -> None:
    def step(_tuned: object, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        out = model(x)
        out.mean().backward(retain_graph=True)
        loss: torch.Tensor = out.square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has not typed it
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = sensed(nn.Sequential(nn.Linear(8, 8), nn.GELU()), loss=None, step=step)
    assert found.left_out == {}
    assert [module.calls for module in found.modules] == [1, 1]


# --- training goes on as if nothing had been ------------------------------------------------------------------------


def everything() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Dropout(0.3),
        KeepsItsMean(),
        Noisy(),
        nn.Linear(8, 2),
    )


def test_weights_buffers_and_attributes_are_put_back() -> None:
    bench = Bench(workload_of(everything()), CPU)
    before = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
    sense(bench, STOCK, BOTH)
    layers = list(bench.model.children())
    assert (vars(layers[2])["inplace"], vars(layers[3])["p"]) == (True, 0.3)
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

    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), KeepsItsMean(), Noisy(), nn.Linear(8, 2))
    sense(Bench(workload_of(model, optimizer=optimizer), CPU), STOCK, BOTH)
    first, _, watched = after  # two are timed, and then the first is taken again
    assert all(torch.equal(a, b) for a, b in zip(first[:-1], watched[:-1], strict=True))


# --- figures --------------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    """x times a weight, whose product is rounded in half as `in_half` says."""

    def __init__(self, weight: float, *, in_half: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]))
        self.in_half = in_half

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_half and torch.is_autocast_enabled(x.device.type):
            return x.to(torch.get_autocast_dtype(x.device.type)) * self.weight.to(x.dtype)
        return x.float() * self.weight


class ItsOwnLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.criterion(self.linear(x), x.argmax(-1))
        return loss


def test_a_module_whose_output_is_where_the_backward_pass_starts_is_looked_at() -> None:
    def step(_tuned: object, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(x)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has not typed it
        optimizer.step()
        optimizer.zero_grad()
        return loss

    found = sensed(ItsOwnLoss, loss=None, step=step)
    assert list(modules_of(found)) == ["linear", "criterion"]


def test_the_stream_says_what_autocast_makes_of_an_output() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Scale(1.0, in_half=False), nn.Identity(), nn.Linear(8, 2))
    assert [module.stream for module in sensed(model).modules] == ["half", "follows", "fp32", "follows", "half"]


def test_the_stream_of_a_layer_norm_is_what_this_torch_does_on_the_cpu() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        follows = nn.LayerNorm(8)(torch.randn(4, 8).bfloat16()).dtype is torch.bfloat16
    stream = modules_of(sensed(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))))["1"].stream
    assert stream == ("follows" if follows else "fp32")


class Added(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b


class Branching(nn.Module):
    """`join` takes what `left` and `right` give, `plain` something that was changed on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.join = Added()
        self.plain = nn.Linear(8, 2)

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


def deep(activation: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(256, 256), activation())))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the CPU's allocator does not say what its peak was")
def test_looking_takes_little_more_memory_than_training() -> None:
    device = torch.device("cuda", 0)
    bench = Bench(workload_of(lambda: deep(nn.GELU), (256,), batch_size=2**16), device)
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

    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(_context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
            gc.collect()
            held.append(sum(isinstance(one, torch.Tensor) and one.shape == (1021, 8) for one in gc.get_objects()))
            return gradient

    class First(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Counts.apply(x)  # type: ignore[no-any-return, no-untyped-call]  # torch's own

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 8)
            self.rest = nn.Sequential(*(nn.GELU() for _ in range(20)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = First.forward(self.rest, self.stem(x))  # type: ignore[arg-type]  # not a module's call
            out: torch.Tensor = self.rest(hidden)
            return out

    sensed(Model(), batch_size=1021)
    assert held[-1] <= held[0] + 5  # the first was a step that nobody watched
