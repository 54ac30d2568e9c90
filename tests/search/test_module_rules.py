from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial

import pytest
import torch
from counting import lines_in
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


def found(model: nn.Module, chosen: Collection[str]) -> list[str]:
    """The rules in words; they cover what the chosen modules' own paths would."""
    rules = rules_for(model, chosen)
    assert covered(model, rules) == covered(model, [Fp32Rule(path=path) for path in chosen])
    return [str(rule) for rule in rules]


def layer() -> Block:
    return Block({"attention": Block({"query": Linear(), "norm": Norm()}), "fc1": Linear(), "fc2": Linear()})


def transformer(layers: int = 4) -> Network:
    stack = Block({"layer": Holder({str(number): layer() for number in range(layers)}), "norm": Norm()})
    return Network({"embed": Linear(), "encoder": stack, "head": Linear()})


def paths(model: nn.Module, *ends: str) -> list[str]:
    return [module.path for module in modules_of(model) if module.runs and module.path.endswith(ends)]


# --- what the rules look like ------------------------------------------------------------------------------------


def test_nothing_chosen_needs_no_rules() -> None:
    assert found(transformer(), []) == []


def test_one_module_is_named_by_its_path() -> None:
    assert found(transformer(), ["head"]) == ["head"]
    assert found(transformer(), ["encoder.norm"]) == ["encoder.norm"]


def test_a_container_without_a_forward_stands_for_all_it_holds() -> None:
    assert found(transformer(), [f"encoder.layer.{number}" for number in range(4)]) == ["encoder.layer"]


def test_a_block_that_runs_is_not_named_where_only_its_children_are_chosen() -> None:
    model = Network({"block": Block({"first": Linear(), "second": Linear()}), "head": Linear()})
    assert found(model, ["block.first", "block.second"]) == ["block.*"]


def test_a_block_stands_for_what_is_chosen_inside_it() -> None:
    assert found(transformer(), ["encoder", "encoder.norm", "encoder.layer.2.fc1"]) == ["encoder"]


def test_the_same_module_of_every_layer_is_one_pattern() -> None:
    model = transformer()
    assert found(model, paths(model, "attention.query")) == ["encoder.layer.*.attention.query"]


def test_numbered_siblings_are_one_pattern() -> None:
    model = transformer()
    assert found(model, paths(model, "fc1", "fc2")) == ["encoder.layer.*.fc*"]


def test_two_stars_where_one_does_not_do() -> None:
    stages = {
        f"layer{stage}": Holder({str(n): Block({"a": Linear(), "b": Linear()}) for n in range(2)}) for stage in (1, 2)
    }
    model = Network({**stages, "a": Linear(), "stem": Block({"1": Block({"c": Linear()})})})
    assert found(model, [path for path in paths(model, ".a") if "layer" in path]) == ["layer*.*.a"]


def test_modules_of_one_name_at_any_depth_are_one_pattern() -> None:
    model = Network({"norm": Linear(), "body": Block({"norm": Linear(), "fc": Linear()}), "head": Linear()})
    assert found(model, ["norm", "body.norm"]) == ["**.norm"]


def test_a_depth_is_left_open_below_a_prefix_where_the_rest_of_the_model_differs() -> None:
    part = {"norm": Linear(), "deep": Block({"norm": Linear(), "fc": Linear()})}
    model = Network({"encoder": Block({**part}), "decoder": Block({"norm": Linear(), "fc": Linear()})})
    assert found(model, ["encoder.norm", "encoder.deep.norm"]) == ["encoder.**.norm"]


def test_all_modules_of_a_type_are_named_by_it_rather_than_by_a_pattern() -> None:
    model = transformer()
    assert found(model, paths(model, "norm")) == ["type Norm"]


def test_a_type_takes_its_subclasses_along() -> None:
    model = Network({"a": Norm(), "b": ScaledNorm(), "c": Linear()})
    assert found(model, ["a", "b"]) == ["type Norm"]
    assert found(model, ["a"]) == ["a"]
    assert found(model, ["b"]) == ["b"]


def test_a_type_is_not_named_where_one_of_it_stays_in_autocast() -> None:
    model = Network({"a": Norm(), "b": Norm(), "c": NormedBlock({"d": Linear()}), "e": Linear()})
    assert found(model, ["a", "b"]) == ["a", "b"]
    assert found(model, ["a", "b", "c"]) == ["type Norm"]


def test_the_base_of_all_modules_is_never_named() -> None:
    assert found(Network({"a": Norm(), "b": Linear()}), ["a", "b"]) == ["*"]
    assert found(Network({"a": Norm(), "b": nn.ReLU()}), ["a", "b"]) == ["*"]


def test_a_sequential_is_not_named_by_its_type_since_the_model_may_be_one() -> None:
    model = nn.Sequential(nn.Sequential(Linear()), Norm(), nn.Sequential(Norm()))
    rules = general_rules(["0", "2"], modules_of(model))
    assert rules == (Fp32Rule(path="0"), Fp32Rule(path="2"))


def test_the_type_of_the_model_itself_is_not_named() -> None:
    model = Network({"a": Network({"b": Linear()}), "c": Network({"d": Norm()}), "e": Linear()})
    assert found(model, ["a", "c"]) == ["a", "c"]


def test_a_redundant_rule_is_left_out() -> None:
    model = transformer(2)
    chosen = [*paths(model, "norm"), "encoder.layer.0"]
    assert found(model, chosen) == ["encoder.layer.0", "type Norm"]


def test_what_is_chosen_without_a_pattern_is_listed_in_the_models_order() -> None:
    model = transformer()
    assert found(model, ["head", "encoder.layer.2.fc1", "embed"]) == ["embed", "encoder.layer.2.fc1", "head"]


def test_a_path_that_is_no_module_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no modules of the model: nowhere, there\.too"):
        general_rules(["there.too", "embed", "nowhere"], modules_of(transformer()))


@pytest.mark.parametrize("ends", [("query", "fc1", "norm"), ("fc1", "norm")])
def test_a_model_twice_as_large_takes_about_twice_the_work(ends: tuple[str, ...]) -> None:
    """Many modules are chosen that no pattern joins, each a rule of its own: the dearest case."""
    work = {}
    for layers in (85, 170):
        model = transformer(layers)
        modules = modules_of(model)
        chosen = paths(model, *ends)[:: len(ends) - 1][: 3 * layers // 2]
        work[len(modules)] = lines_in(partial(general_rules, chosen, modules))
    (small, lines_small), (large, lines_large) = work.items()
    assert large > 1000
    assert lines_large / lines_small < 1.25 * large / small
    assert lines_large < 1000 * large  # 720 a module in Python 3.11: 0.1 s in all


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


@settings(max_examples=400)
@given(models_with_chosen())
def test_the_rules_cover_the_chosen_modules_and_no_others(case: tuple[nn.Module, list[str]]) -> None:
    model, chosen = case
    rules = rules_for(model, chosen)
    exact = covered(model, [Fp32Rule(path=path) for path in chosen])
    assert covered(model, rules) == exact
    assert len(rules) <= len(chosen)
    assert len(set(rules)) == len(rules)


@pytest.mark.slow
@settings(max_examples=200)
@given(models_with_chosen())
def test_every_rule_is_needed(case: tuple[nn.Module, list[str]]) -> None:
    model, chosen = case
    rules = rules_for(model, chosen)
    for rule in rules:
        assert covered(model, without(rules, rule)) != covered(model, rules)


def without(rules: Iterable[Fp32Rule], rule: Fp32Rule) -> list[Fp32Rule]:
    return [other for other in rules if other != rule]


@given(models_with_chosen())
def test_the_order_of_the_chosen_modules_does_not_matter(case: tuple[nn.Module, list[str]]) -> None:
    model, chosen = case
    assert general_rules(chosen, modules_of(model)) == general_rules(chosen[::-1], modules_of(model))
