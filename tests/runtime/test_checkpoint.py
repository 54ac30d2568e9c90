"""`checkpoint`: modules whose activations the backward pass computes again, to the bit, and for less memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import amptune
from amptune.errors import PolicyApplyError
from amptune.policy.setting_effects import memory_of, numerics_of
from amptune.policy.settings import STOCK, Fp32Rule, HalfRule, LossScale, Policy
from amptune.search.table.ablation import variants_of

WIDTH = 16
LAYERS = Policy(checkpoint=("layers.*",))


class Block(nn.Module):
    """Draws random numbers, keeps statistics, takes an argument by name, and counts the passes through it."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = norm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.3)
        self.passes: list[None] = []

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor | float = 1.0) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.passes.append(None)
        out: torch.Tensor = x + self.drop(self.outer(torch.relu(self.inner(self.norm(x))))) * scale
        return out


class Average(nn.Module):
    """Subtracts an average of what it has seen, which it has in a buffer and moves in each pass."""

    def __init__(self, width: int, *, replaces: bool = False) -> None:
        super().__init__()
        self.replaces = replaces
        self.average: torch.Tensor = nn.Buffer(torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = self.average + (x.detach().mean(dim=0) - self.average) / 2
        if self.replaces:
            self.average = moved
        else:
            self.average.copy_(moved)
        return (x - self.average).square()


class Net(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(norm) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, scale=torch.tensor(0.5))
        return x.square().mean()


def built(norm: Callable[[int], nn.Module] = nn.LayerNorm) -> Net:
    torch.manual_seed(0)
    return Net(norm)


def trained(policy: Policy, model: nn.Module) -> list[torch.Tensor]:
    """All that three steps compute: losses, gradients, buffers."""
    torch.manual_seed(1)
    found = []
    with amptune.apply(policy, model, guard=False) as tuned:
        optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):
            optimizer.zero_grad()
            with tuned.autocast():
                loss = tuned.model(torch.randn(8, WIDTH))
            tuned.scaler.scale(loss).backward()
            tuned.step(optimizer)
            found += [loss.detach(), *(one.grad for one in model.parameters() if one.grad is not None)]
            found += [buffer.clone() for buffer in model.buffers()]
    return found


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) > 0 and all(map(torch.equal, some, others))


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d, Average, lambda width: Average(width, replaces=True)])
@pytest.mark.parametrize(
    "policy",
    [
        STOCK,
        Policy(autocast="bf16"),
        Policy(autocast="fp16", loss_scale=LossScale(init=8.0)),
        Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True, loss_scale=LossScale(init=8.0)),
        Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="layers.1"), Fp32Rule(path="layers.2.norm"))),
    ],
    ids=str,
)
def test_losses_gradients_and_buffers_are_the_models_own_to_the_bit(
    policy: Policy, norm: Callable[[int], nn.Module]
) -> None:
    plain, model = built(norm), built(norm)
    assert are_equal(trained(policy, plain), trained(replace(policy, checkpoint=("layers.*",)), model))
    assert [len(layer.passes) for layer in plain.layers] == [3] * 3  # type: ignore[arg-type]
    assert [len(layer.passes) for layer in model.layers] == [6] * 3  # type: ignore[arg-type]


def test_a_module_can_have_a_precision_and_be_checkpointed() -> None:
    """The rule covers what is computed again: in half, a norm's weights are cast for one pass alone."""
    policy = Policy(autocast="bf16", half_modules=(HalfRule(type="LayerNorm"),))
    assert are_equal(trained(policy, built()), trained(replace(policy, checkpoint=("**.norm", "layers.0")), built()))


def test_without_gradients_and_in_evaluation_nothing_is_computed_twice() -> None:
    model = built()
    layer: Any = model.layers[0]
    with amptune.apply(LAYERS, model) as tuned:
        with torch.no_grad():
            tuned.model(torch.randn(8, WIDTH))
        model.eval()
        tuned.model(torch.randn(8, WIDTH)).backward()
        assert len(layer.passes) == 2
        model.train()
        tuned.model(torch.randn(8, WIDTH)).backward()
        assert len(layer.passes) == 4


def test_of_nested_modules_the_outermost_alone_is_checkpointed() -> None:
    model = built()
    with amptune.apply(Policy(checkpoint=("layers.*.norm", "layers", "layers.1.**")), model):
        swapped = [path for path, module in model.named_modules() if type(module).__mro__[1].__name__ == "Block"]
        assert swapped == [f"layers.{n}" for n in range(3)]
        assert type(model.layers[0].norm) is nn.LayerNorm


@pytest.mark.parametrize(("passes", "backwards"), [(1, 2), (3, 1)])
def test_a_backward_pass_computes_again_from_the_buffers_of_its_own_forward(passes: int, backwards: int) -> None:
    def gradients(policy: Policy) -> list[torch.Tensor]:
        model = built(Average)
        with amptune.apply(policy, model, guard=False):
            torch.manual_seed(2)
            loss: Any = sum(model(torch.randn(8, WIDTH)) for _ in range(passes))
            for _ in range(backwards):
                loss.backward(retain_graph=True)
            return [one.grad for one in model.parameters() if one.grad is not None] + list(model.buffers())

    assert are_equal(gradients(STOCK), gradients(LAYERS))


def test_an_input_that_is_changed_in_place_afterwards_is_an_error() -> None:
    """Given by name too: computed again from another input, gradients would be wrong and nobody would know."""
    model = built()
    scale = torch.ones(())
    with amptune.apply(LAYERS, model, guard=False):
        out = next(model.layers.children())(torch.randn(8, WIDTH), scale=scale)
        scale += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_compiled_it_is_part_of_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a compiler that splits forward and backward pass as PyTorch's does, and writes no programs."""
    with_its_own = partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", lambda model, **_: with_its_own(model))
    policy, ends = Policy(compile="blocks"), []
    for one in (policy, replace(policy, checkpoint=("layers.*",))):
        torch.compiler.reset()
        counters.clear()
        ends.append(trained(one, built(nn.BatchNorm1d)))
        assert not counters["graph_break"]
    assert are_equal(*ends)


def test_numerics_are_the_same_unless_compiled_and_nothing_is_recorded_beside() -> None:
    assert numerics_of(LAYERS) == STOCK
    compiled = replace(LAYERS, compile="default")
    assert numerics_of(compiled) == compiled
    assert memory_of(LAYERS) == LAYERS
    assert LAYERS.compiled("blocks") == replace(LAYERS, compile="blocks")
    assert STOCK.compiled("blocks").cuda_graphs
    assert [(one.setting, one.policy) for one in variants_of(LAYERS)] == [("checkpoint: layers.*", STOCK)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TorchScript, by torch itself
def test_a_module_that_cannot_be_checkpointed_is_named() -> None:
    model = nn.Sequential(nn.Sequential(torch.jit.script(nn.Linear(3, 3))), nn.Linear(3, 3))
    expected = r"not every module can be checkpointed:\n  0 holds a TorchScript module"
    with pytest.raises(PolicyApplyError, match=expected):
        amptune.apply(Policy(checkpoint=("*",)), model)
