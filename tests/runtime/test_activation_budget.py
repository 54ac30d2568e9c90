"""`activation_budget`: the share of the activations that torch.compile keeps for the backward pass."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config

import amptune
from amptune.errors import FileFormatError
from amptune.measure.bench.compilation import Compilations
from amptune.policy.file_io import parse_policy
from amptune.policy.policy_file import PolicyFile
from amptune.policy.serialization import schema_of
from amptune.policy.setting_effects import changes_graph, graph_of, memory_of, numerics_of, rounding_of, tensors_of
from amptune.policy.settings import STOCK, CompileMode, Policy
from amptune.policy.yaml_text import parse
from amptune.report.explanation import explain
from amptune.search.table.ablation import variants_of

WIDTH, ROWS = 32, 128
WHOLE = Policy(compile="default")
HALF = replace(WHOLE, activation_budget=0.5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 4 * WIDTH),
            nn.Linear(4 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.outer(nn.functional.gelu(self.inner(self.norm(x))).sin())
        return out


def built() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(3)))


def kept_and_gradients(policy: Policy, model: nn.Module) -> tuple[int, list[torch.Tensor]]:
    """Returns the bytes that are kept for the backward pass, weights aside, and the gradients."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    with amptune.apply(policy, model, guard=False) as tuned:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = tuned.model(x).square().mean()
        loss.backward()
    found = [one.grad for one in model.parameters() if one.grad is not None]
    model.zero_grad()
    own = {one.untyped_storage().data_ptr() for one in model.parameters()}
    return sum(size for place, size in kept.items() if place not in own), found


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("mode", ["default", "blocks"])
def test_less_is_kept_and_the_gradients_are_the_same(mode: CompileMode) -> None:
    """One model, policy after policy: graphs of another budget are not used again."""
    model = built()
    every, plain = kept_and_gradients(Policy(compile=mode), model)
    half, same = kept_and_gradients(Policy(compile=mode, activation_budget=0.5), model)
    least, again = kept_and_gradients(Policy(compile=mode, activation_budget=0.0), model)
    once_more, _ = kept_and_gradients(Policy(compile=mode), model)
    assert least < half < 0.7 * every
    assert once_more == every
    for found in (same, again):
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-7)


def test_the_compilers_setting_is_put_back() -> None:
    model = built()
    before = config.activation_memory_budget
    tuned = amptune.apply(HALF, model)
    assert config.activation_memory_budget == 0.5
    tuned.undo()
    assert config.activation_memory_budget == before


@pytest.mark.slow
def test_policies_of_one_budget_share_the_graphs_and_others_do_not() -> None:
    amptune.apply(STOCK, built()).undo()  # graphs of the tests before may be of another budget
    compiled, x = torch.compile(built()), torch.randn(4, WIDTH)
    compiled(x)
    for policy, graphs in ((STOCK, 0), (HALF, 1), (HALF, 0), (STOCK, 1)):
        counters.clear()
        with amptune.apply(policy, built()):
            compiled(x)
        assert counters["stats"]["unique_graphs"] == graphs


def test_budgets_of_several_models_are_undone_in_any_order() -> None:
    before = config.activation_memory_budget
    first, second = amptune.apply(HALF, built()), amptune.apply(STOCK, built())
    assert config.activation_memory_budget == 1.0
    first.undo()
    assert config.activation_memory_budget == 1.0
    second.undo()
    assert config.activation_memory_budget == before


@pytest.mark.slow
def test_who_listens_for_graphs_goes_on_listening() -> None:
    bench = Compilations()
    bench.begin(HALF)
    compiled = torch.compile(built())
    with amptune.apply(HALF, built()):
        compiled(torch.randn(4, WIDTH))
    assert bench.begun > 0
    bench.forget()


def test_a_file_has_a_share() -> None:
    read = parse_policy(parse("schema: amptune.policy/1\ncompile: default\nactivation_budget: 0.5\n", "x.yaml"))
    assert isinstance(read, PolicyFile)
    assert read.policy == HALF
    assert schema_of("policy")["properties"]["activation_budget"] == {
        "default": 1.0,
        "title": "Activation Budget",
        "type": "number",
    }
    assert str(HALF) == "activation budget 0.5, compile default"
    assert "activation_budget 0.5: of the memory that activations take" in "\n".join(explain(read))


@pytest.mark.parametrize("share", ["1.5", "-0.1", ".nan"])
def test_a_share_outside_0_to_1_is_an_error(share: str) -> None:
    with pytest.raises(FileFormatError, match=re.escape("is not a number from 0 to 1")):
        parse_policy(parse(f"schema: amptune.policy/1\nactivation_budget: {share}\n", "x.yaml"))


def test_it_is_of_a_compiler_alone() -> None:
    eager = replace(HALF, compile="off")
    with amptune.apply(eager, built()) as tuned:
        assert [one.code for one in tuned.findings] == ["activation-budget-without-effect"]
    assert numerics_of(eager) == memory_of(eager) == STOCK
    assert numerics_of(HALF) == tensors_of(HALF) == graph_of(HALF) == HALF
    assert rounding_of(HALF) == WHOLE
    assert changes_graph("activation_budget")
    assert [one.policy for one in variants_of(HALF)] == [WHOLE, replace(HALF, compile="off")]
