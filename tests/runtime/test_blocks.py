"""Repeated blocks are found by what they are, compiled once for all equal ones, and left as they were."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from taped import TapeRecorder
from torch import nn
from torch.nn import functional as F  # noqa: N812  # the name all of PyTorch's users give it

from amptune import Policy, apply
from amptune.changes.blocks import repeated_blocks, repeated_leaves
from amptune.policy.findings import Finding
from amptune.runtime.graphs.graphed_model import GraphedModel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

COMPILED = Policy(compile="blocks")


class Block(nn.Module):
    def __init__(self, width: int, drop: float = 0.0) -> None:
        super().__init__()
        self.drop = drop
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (1.0 - self.drop) * torch.relu(self.linear(self.norm(x)))


class Tower(nn.Module):
    """Blocks of the given widths and rates, a Linear layer between two widths."""

    def __init__(self, *widths: int, drop: tuple[float, ...] = ()) -> None:
        super().__init__()
        rates = drop or (0.0,) * len(widths)
        self.blocks = nn.ModuleList(map(Block, widths, rates))
        self.between = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, between in zip(self.blocks, [*self.between, nn.Identity()], strict=True):
            x = between(block(x))
        return x


@pytest.fixture(autouse=True)
def _nothing_lies_in_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Has graphs run as they are, in a list."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    with_its_own = torch.compile
    monkeypatch.setattr(torch, "compile", lambda model, **more: with_its_own(model, **{**more, "backend": backend}))
    return graphs


@pytest.mark.parametrize(
    ("model", "alike"),
    [
        (Tower(8, 8, 8), [3]),
        (Tower(8, 8, 4, 4, 4), [2, 3]),
        (Tower(8, 8, 8, drop=(0.0, 0.1, 0.1)), [1, 2]),  # the first is a block too, as it is of their class
        (Tower(8, 8, drop=(0.0, 0.1)), []),
        (nn.Sequential(Tower(8, 8, 8), Tower(4, 4)), [3, 2]),  # inside the two towers, which differ
        (nn.Sequential(Tower(8, 8), Tower(8, 8)), [2]),  # the towers, and not what is in them
        (nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), []),
    ],
)
def test_blocks_are_the_outermost_modules_that_equal_a_sibling(model: nn.Module, alike: list[int]) -> None:
    assert [len(blocks) for blocks in repeated_blocks(model).values()] == alike
    assert repeated_leaves(Tower(8, 8, 8)) == 2 * 2


def test_equal_blocks_are_compiled_once_and_train_as_before(compiled: list[torch.fx.GraphModule]) -> None:
    plain = Tower(8, 8, 8, 4, 4)
    model, x = deepcopy(plain), torch.randn(5, 8, requires_grad=True)
    with apply(COMPILED, model) as tuned:
        assert tuned.model is model
        loss = tuned.model(x).square().mean()
        loss.backward()
        assert len(compiled) == 2  # of width 8, and of width 4
    plain(x).square().mean().backward()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad)


def test_more_kinds_than_pytorch_would_compile_are_compiled(compiled: list[torch.fx.GraphModule]) -> None:
    limit = torch._dynamo.config.recompile_limit
    widths = [width for width in range(2, limit + 4) for _ in range(2)]
    with apply(COMPILED, Tower(*widths)) as tuned:
        tuned.model(torch.randn(3, 2, requires_grad=True))
    assert len(compiled) == len(set(widths)) > limit
    assert torch._dynamo.config.recompile_limit == limit


def test_the_loss_is_compiled_with_the_model_where_training_is_one_call(compiled: list[torch.fx.GraphModule]) -> None:
    """In another loop the model alone is."""

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return F.smooth_l1_loss(model(x), x)

    plain, x = Tower(4, 4), torch.randn(5, 4)
    model, step = deepcopy(plain), Policy(compile="step")
    with apply(step, model) as tuned:
        train = tuned.training_step(loss, torch.optim.SGD(model.parameters(), lr=0.5))
        losses = [train(x) for _ in range(3)]
        assert "smooth_l1_loss" in compiled[0].code
        assert len(compiled) == 1
        tuned.model(x)
        assert "smooth_l1_loss" not in compiled[1].code
    assert model._compiled_call_impl is None
    with apply(Policy(), plain) as tuned:
        train = tuned.training_step(loss, torch.optim.SGD(plain.parameters(), lr=0.5))
        torch.testing.assert_close(losses, [train(x) for _ in range(3)])


@pytest.mark.parametrize("mode", ["default", "step"])
def test_a_whole_step_is_recorded_over_what_is_compiled(compiled: list[torch.fx.GraphModule], mode: Any) -> None:
    losses = []
    for policy in (Policy(), Policy(compile=mode, cuda_graphs="step")):
        torch.manual_seed(0)
        model = Tower(4, 4)
        tuned = apply(policy, model, guard=False)
        if tuned.recordings is not None:
            tuned.recordings.recorder, tuned.recordings.device_type = TapeRecorder, "cpu"
        optimizer = tuned.optimizer(torch.optim.SGD(model.parameters(), lr=0.5, fused=True))
        train = tuned.training_step(lambda model, x: model(x).square().mean(), optimizer)
        losses.append([train(torch.randn(3, 4)) for _ in range(8)])
    assert tuned.recordings is not None
    assert (tuned.recordings.made, tuned.recordings.calls) == (1, 5)
    assert ("square" in compiled[0].code) == (mode == "step")
    torch.testing.assert_close(*losses)


def test_undo_leaves_the_model_as_it_was(compiled: list[torch.fx.GraphModule]) -> None:
    model = Tower(8, 8)
    own = torch.compile(lambda x: x)
    model.blocks[0]._compiled_call_impl = own
    before = [{**vars(module)} for module in model.modules()]
    with apply(COMPILED, model) as tuned:
        copy = deepcopy(model)
    assert [vars(module) for module in model.modules()] == before
    copy(torch.randn(2, 8))
    assert not compiled
    assert not tuned.findings


def test_only_the_compiler_s_own_warning_of_gradients_is_ignored_and_only_until_undo() -> None:
    before, x = [*warnings.filters], torch.ones(2, requires_grad=True) * 2
    with apply(COMPILED, Tower(8, 8)), pytest.warns(UserWarning, match="The .grad attribute"):
        assert x.grad is None
    assert warnings.filters == before


def test_a_model_without_repeated_blocks_gets_a_finding() -> None:
    with apply(COMPILED, Tower(8, 4)) as tuned:
        assert [finding.code for finding in tuned.findings] == ["compile-without-effect"]


class Asking(Tower):
    """Gives another answer if it is recorded, as libraries that must not ask the device then."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if torch.cuda.is_current_stream_capturing() else 1)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_a_model_that_asks_if_it_is_recorded_does_the_same_while_it_is_rehearsed(
    compiled: list[torch.fx.GraphModule], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what a recording meets is compiled within it, which fails; and it waits for the device."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # without CUDA it raises
    model, said, x = Asking(8, 8), list[Finding](), torch.randn(5, 8)
    expected = model(x).detach() * 2
    for block in model.blocks:
        block.compile()
    called = GraphedModel(model, said.append, recorder=TapeRecorder, device_type="cpu")
    kinds = []
    for _ in range(4):
        returned = called(x)
        kinds.append(len(compiled))
        torch.testing.assert_close(returned, expected)
        returned.square().mean().backward()
    assert kinds[0] == kinds[-1]
    assert not said
    assert len(called.recordings) == 1
