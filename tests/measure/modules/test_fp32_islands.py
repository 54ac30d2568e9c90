"""FP32 products that a model keeps out of autocast: found with their module and line, timed, and nothing else is."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benches import CPU, Called, Checkpointed, workload_of
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the name all of PyTorch's users give it

from amptune.measure.bench.bench import Bench
from amptune.measure.modules.fp32_islands import find_islands
from amptune.measure.modules.sensitivity_pass import sense
from amptune.measure.results.half_effects import Island
from amptune.policy.settings import STOCK

WIDTH = 8


def islands_of(model: nn.Module, **more: Any) -> tuple[Island, ...]:
    return find_islands(Bench(workload_of(model, (WIDTH,), **more), CPU), STOCK, "bf16")


def place_of(code: Callable[..., Any], text: str) -> str:
    """The line in which `code` has `text`, as a finding names it."""
    lines, first = inspect.getsourcelines(code)
    (line,) = [first + i for i, line in enumerate(lines) if text in line]
    return f"{Path(inspect.getfile(code)).relative_to(Path.cwd())}:{line}"


def around(island: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(island, nn.ReLU()), nn.Linear(WIDTH, WIDTH))


def without_autocast(own: Any, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        return own.linear(x.float())


def by_einsum(own: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.einsum("ij,kj->ik", x.float(), own.weight)


def by_matmul(own: Any, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", enabled=False):
        return x.float() @ own.weight


def by_attention(own: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        x = (x.float() @ own.weight)[None, None]
        return F.scaled_dot_product_attention(x, x, x)[0, 0]


def by_convolution(own: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.conv1d(x.float()[:, None], own.kernel, padding=1)[:, 0]


class InBackward(torch.autograd.Function):
    """Computes its gradients in FP32: autocast does not reach the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return gradients[0].float() @ weight.T, x.float().T @ gradients[0].float()


def by_own_backward(own: Any, x: torch.Tensor) -> torch.Tensor:
    return InBackward.apply(x, own.weight)  # type: ignore[no-any-return,no-untyped-call]


@torch.library.custom_op("amptune_tests::projected", mutates_args=())
def projected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.einsum("ij,jk->ik", x.float(), weight)


projected.register_autograd(lambda _, gradient: (None, gradient.mean() * torch.ones(WIDTH, WIDTH)))


def by_custom_operation(own: Any, x: torch.Tensor) -> Any:
    return projected(x, own.weight)


def weight() -> nn.Parameter:
    return nn.Parameter(torch.eye(WIDTH))


@pytest.mark.parametrize(
    ("island", "module", "where"),
    [
        (Called(without_autocast, linear=nn.Linear(WIDTH, WIDTH)), "1.0.linear", (without_autocast, "linear")),
        (Called(by_einsum, weight=weight()), "1.0", (by_einsum, "torch.einsum")),
        (Called(by_matmul, weight=weight()), "1.0", (by_matmul, "@")),
        (Called(by_convolution, kernel=nn.Parameter(torch.ones(1, 1, 3))), "1.0", (by_convolution, "conv1d")),
        (Called(by_custom_operation, weight=weight()), "1.0", (projected._init_fn, "torch.einsum")),
        (Called(by_own_backward, weight=weight()), "1.0", (InBackward, "weight.T")),
    ],
    ids=["autocast off", "einsum", "matmul", "convolution", "a custom operation", "a backward pass of its own"],
)
def test_an_island_is_found_with_its_module_and_line_both_passes_together(
    island: nn.Module, module: str, where: tuple[Callable[..., Any], str]
) -> None:
    (found,) = islands_of(around(island))
    assert (found.module, found.where) == (module, place_of(*where))
    assert found.ms > 0
    assert found.share > 0
    assert found.tf32_ms is None, "a CPU has none"


def test_several_lines_of_one_module_are_islands_of_their_own_the_longest_first() -> None:
    found = islands_of(around(Called(by_attention, weight=weight())))
    assert {island.where for island in found} == {place_of(by_attention, "@"), place_of(by_attention, "scaled")}
    assert [island.ms for island in found] == sorted((island.ms for island in found), reverse=True)


def everything_else(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Operations in FP32 that are no products, and products in half."""
    y = own.norm(own.linear(x)).float().softmax(-1)
    return F.scaled_dot_product_attention(*[own.linear(y)[None, None]] * 3)[0, 0] + torch.outer(y[:, 0], x[0]).exp()


def test_a_model_without_islands_has_none_whatever_else_it_computes_in_fp32() -> None:
    inner = Called(everything_else, norm=nn.LayerNorm(WIDTH), linear=nn.Linear(WIDTH, WIDTH))
    loss = lambda model, x: F.cross_entropy(model(x).float(), x.argmax(-1))  # noqa: E731
    assert islands_of(around(inner), loss=loss) == ()
    assert islands_of(nn.Sequential(nn.Unflatten(1, (1, WIDTH)), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2))) == ()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpointed_island_counts_as_often_as_it_runs(reentrant: bool) -> None:
    def linear() -> nn.Module:
        return Called(without_autocast, linear=nn.Linear(WIDTH, WIDTH))

    (found,) = islands_of(Checkpointed(linear(), reentrant=reentrant))
    assert (found.module, found.where) == ("0.linear", place_of(without_autocast, "linear"))


def test_an_island_of_the_loss_is_outside_all_modules() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        y = model(x).float()
        with torch.autocast("cpu", enabled=False):
            return (y @ y.T).square().mean()

    (found,) = islands_of(nn.Linear(WIDTH, WIDTH), loss=loss)
    assert (found.module, found.where) == (None, place_of(loss, "@"))


def test_a_penalty_on_gradients_is_attributed_to_the_layer_that_they_go_through() -> None:
    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        return gradient.float().square().mean()

    (found,) = islands_of(around(Called(by_matmul, weight=weight())), loss=loss)
    assert (found.module, found.where) == ("1.0", place_of(by_matmul, "@"))


def test_the_step_that_is_watched_is_the_step_that_training_takes() -> None:
    """Islands that are timed again, and draw random numbers, change neither numbers nor weights."""
    after: list[list[torch.Tensor]] = []

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        sgd.register_step_post_hook(lambda *_: after.append([p.detach().clone() for p in model.parameters()]))
        return sgd

    def dropping(own: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            x = (x.float() @ own.weight)[None, None]
            return F.dropout(F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)[0, 0])

    assert islands_of(around(Called(dropping, weight=weight())), optimizer=optimizer)
    first, _, watched = after  # two are timed, and then the first is taken again
    assert all(map(torch.equal, first, watched))


def test_the_instrumented_pass_finds_the_islands_too_and_does_without_them_if_autocast_breaks_the_step() -> None:
    def breaks(_: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu") and x.dtype is torch.bfloat16:
            raise RuntimeError("no half here")
        return x

    for inner, count in ((Called(by_matmul, weight=weight()), 1), (Called(breaks), 0)):
        found = sense(Bench(workload_of(around(inner), (WIDTH,)), CPU), STOCK, ("bf16",))
        assert len(found.islands) == count
        assert found.modules
