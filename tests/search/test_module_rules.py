from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from amptune.measure.results.subject import Module
from amptune.policy.settings import Fp32Rule
from amptune.runtime.module_precision import has_forward, select
from amptune.search.space.module_rules import general_rules


class Norm(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class ScaledNorm(Norm):
    pass


class Linear(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Holder(nn.Module):
    """A container without a forward."""

    def __init__(self, children: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


class Block(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class NormedBlock(Block, Norm):
    """Its bases make it a Norm too: a type rule for Norm takes it along with all that it holds."""


class Network(Block):
    pass


def modules_of(model: nn.Module) -> list[Module]:
    return [
        Module(path=path, types=tuple(base.__name__ for base in type(module).__mro__[:-1]), runs=has_forward(module))
        for path, module in model.named_modules()
        if path
    ]


def covered(model: nn.Module, rules: Sequence[Fp32Rule]) -> set[str]:
    """The modules that run and that these rules keep in FP32, as the runtime understands them."""
    selected = {id(inside) for chosen in select(model, rules) for inside in chosen.module.modules()}
    return {path for path, module in model.named_modules() if has_forward(module) and id(module) in selected}


def rules_for(model: nn.Module, chosen: Collection[str]) -> tuple[Fp32Rule, ...]:
    return general_rules(chosen, modules_of(model), root_types=[base.__name__ for base in type(model).__mro__])


def layer() -> Block:
    return Block({"attention": Block({"query": Linear(), "norm": Norm()}), "fc1": Linear(), "fc2": Linear()})


def transformer(layers: int = 4) -> Network:
    stack = Block({"layer": Holder({str(number): layer() for number in range(layers)}), "norm": Norm()})
    return Network({"embed": Linear(), "encoder": stack, "head": Linear()})


def paths(model: nn.Module, *ends: str) -> list[str]:
    return [module.path for module in modules_of(model) if module.runs and module.path.endswith(ends)]


# --- what the rules look like ------------------------------------------------------------------------------------

MODEL = transformer()
STAGES = {
    f"layer{stage}": Holder({str(n): Block({"a": Linear(), "b": Linear()}) for n in range(2)}) for stage in (1, 2)
}
STAGED = Network({**STAGES, "a": Linear(), "stem": Block({"1": Block({"c": Linear()})})})
MANY_NORMS = Network({"a": Norm(), "b": Norm(), "c": NormedBlock({"d": Linear()}), "e": Linear()})
OWN_TYPE = Network({"a": Network({"b": Linear()}), "c": Network({"d": Norm()}), "e": Linear()})


@pytest.mark.parametrize(
    ("model", "chosen", "rules"),
    [
        # A container without a forward stands for all it holds, a block for what is chosen inside it ...
        (MODEL, [f"encoder.layer.{number}" for number in range(4)], ["encoder.layer"]),
        (MODEL, paths(MODEL, "fc1", "fc2"), ["encoder.layer.*.fc*"]),
        (STAGED, [path for path in paths(STAGED, ".a") if "layer" in path], ["layer*.*.a"]),
        # All modules of a type are named by it, its subclasses too, unless one of it stays in autocast.
        (MODEL, paths(MODEL, "norm"), ["type Norm"]),
        (MANY_NORMS, ["a", "b"], ["a", "b"]),
        (MANY_NORMS, ["a", "b", "c"], ["type Norm"]),
        # The base of all modules is never named, nor the type of the model itself.
        (Network({"a": Norm(), "b": nn.ReLU()}), ["a", "b"], ["*"]),
        (OWN_TYPE, ["a", "c"], ["a", "c"]),
        # A redundant rule is left out; what no pattern joins is listed in the model's order.
        (MODEL, [*paths(MODEL, "norm"), "encoder.layer.0"], ["encoder.layer.0", "type Norm"]),
        (MODEL, ["head", "encoder.layer.2.fc1", "embed"], ["embed", "encoder.layer.2.fc1", "head"]),
    ],
)
def test_few_rules_say_what_is_chosen(model: nn.Module, chosen: list[str], rules: list[str]) -> None:
    found = rules_for(model, chosen)
    assert [str(rule) for rule in found] == rules
    assert covered(model, found) == covered(model, [Fp32Rule(path=path) for path in chosen])


def test_a_path_that_is_no_module_is_an_error_and_a_type_that_the_model_may_have_is_not_named() -> None:
    model = nn.Sequential(nn.Sequential(Linear()), Norm(), nn.Sequential(Norm()))
    assert general_rules(["0", "2"], modules_of(model)) == (Fp32Rule(path="0"), Fp32Rule(path="2"))
    with pytest.raises(ValueError, match="no modules of the model: nowhere"):
        general_rules(["nowhere"], modules_of(model))


# --- for any model -----------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["0", "1", "10", "norm", "norm1", "norm2", "fc_1", "fc_2", "fc", "layer"])


def grown(children: st.SearchStrategy[nn.Module]) -> st.SearchStrategy[nn.Module]:
    held = st.dictionaries(NAMES, children, min_size=1, max_size=4)
    kinds = st.sampled_from([Holder, Block, Block, NormedBlock])
    return st.builds(lambda kind, inside: kind(inside), kinds, held)


LEAVES = st.sampled_from([Norm, ScaledNorm, Linear]).map(lambda kind: kind())
MODELS = st.dictionaries(
    NAMES, st.recursive(LEAVES | st.just({}).map(Holder), grown, max_leaves=15), min_size=1, max_size=4
).map(Network)


@st.composite
def models_with_chosen(draw: st.DrawFn) -> tuple[nn.Module, list[str]]:
    """At random, or all modules of some names or types: what a rule can say in a word."""
    model = draw(MODELS)
    running = [module for module in modules_of(model) if module.runs]
    candidates = [module.path for module in running]
    if not candidates:
        return model, []
    chosen = set(draw(st.lists(st.sampled_from(candidates), max_size=6)))
    names = draw(st.sets(NAMES, max_size=2))
    types = draw(st.sets(st.sampled_from(["Norm", "ScaledNorm", "Linear"]), max_size=1))
    chosen |= {m.path for m in running if m.path.rpartition(".")[2] in names or not types.isdisjoint(m.types)}
    return model, sorted(chosen)


@settings(max_examples=300)
@given(models_with_chosen())
def test_the_rules_cover_the_chosen_modules_and_no_others_and_each_is_needed(
    case: tuple[nn.Module, list[str]],
) -> None:
    model, chosen = case
    rules = rules_for(model, chosen)
    exact = covered(model, [Fp32Rule(path=path) for path in chosen])
    assert covered(model, rules) == exact
    assert len(rules) <= len(chosen)
    for rule in rules:
        assert covered(model, [other for other in rules if other != rule]) != exact
    assert rules == rules_for(model, chosen[::-1])
