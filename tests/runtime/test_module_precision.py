from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

from amptune.errors import PolicyApplyError
from amptune.policy.settings import Fp32Rule, HalfRule, Policy
from amptune.runtime.module_precision import precisions_of, select


def block() -> nn.Sequential:
    return nn.Sequential(OrderedDict(conv=nn.Conv2d(4, 4, 1), norm=nn.BatchNorm2d(4)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))})
        self.empty = nn.ModuleList()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def paths(model: nn.Module, *rules: Fp32Rule) -> list[str]:
    return [selected.path for selected in select(model, rules)]


BOTH_NORMS, BOTH_CONVS = ["blocks.0.norm", "blocks.1.norm"], ["blocks.0.conv", "blocks.1.conv"]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ("blocks.0.conv", ["blocks.0.conv"]),
        ("blocks.*.norm", BOTH_NORMS),
        ("**.blocks.**.conv", BOTH_CONVS),
        ("heads.b.**", ["heads.b"]),
        ("blocks.0.no*", ["blocks.0.norm"]),
        ("**", [""]),
        ("*", ["blocks.0", "blocks.1", "heads.a", "heads.b"]),
        ("heads", ["heads.a", "heads.b"]),  # a container without a forward stands for its children
        ([Fp32Rule(type="_BatchNorm")], BOTH_NORMS),
        ([Fp32Rule(type="Net")], [""]),
        ([Fp32Rule(type="ModuleDict")], ["heads.a", "heads.b"]),
        ([Fp32Rule(path=path) for path in ("blocks.0", *BOTH_CONVS)], ["blocks.0", "blocks.1.conv"]),
    ],
)
def test_rules_select_by_patterns_of_whole_names_and_by_classes_and_their_bases(
    rules: str | list[Fp32Rule], expected: list[str]
) -> None:
    assert paths(Net(), *([Fp32Rule(path=rules)] if isinstance(rules, str) else rules)) == expected


def test_containers_within_containers_are_expanded_to_what_runs() -> None:
    plain = nn.Module()
    plain.inner = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)])])
    model = nn.Sequential(nn.Linear(2, 2))
    model.extra = plain
    assert paths(model, Fp32Rule(path="extra")) == ["extra.inner.0.0"]


def test_the_first_rule_decides_and_fp32_goes_before_half_which_reaches_nothing_inside_it() -> None:
    fp32 = (Fp32Rule(path="blocks.0"), Fp32Rule(path="heads.a", cast_output=True), Fp32Rule(path="heads.a"))
    policy = Policy(autocast="bf16", fp32_modules=fp32, half_modules=(HalfRule(type="BatchNorm2d"),))
    found = {one.path: precision for one, precision in precisions_of(policy, Net())}
    assert found == {"blocks.0": "fp32", "heads.a": "fp32-cast", "blocks.1.norm": "half"}


def test_a_module_that_is_shared_is_selected_once_unless_it_also_runs_outside_a_selected_one() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), shared)
    (selected,) = select(model, [Fp32Rule(path="1")])
    assert (selected.path, selected.module) == ("0.0", shared)
    assert paths(model, Fp32Rule(path="0"), Fp32Rule(path="1")) == ["0", "0.0"]


def test_a_module_with_dots_and_stars_of_its_own_is_not_a_pattern() -> None:
    model = nn.ModuleDict({"a+b[0]": nn.Linear(2, 2), "axb": nn.Linear(2, 2)})
    assert paths(model, Fp32Rule(path="a+b[0]")) == ["a+b[0]"]


def test_rules_that_match_no_module_are_one_error_with_the_closest_names() -> None:
    rules = (Fp32Rule(path="blocks.*.conf"), Fp32Rule(type="BatchNorm3d"), Fp32Rule(path="heads.a"))
    with pytest.raises(PolicyApplyError) as caught:
        select(Net(), rules)
    text = str(caught.value)
    assert re.search(r"  blocks\.\*\.conf: did you mean blocks\.\d\.conv", text)
    assert "  type BatchNorm3d: did you mean BatchNorm2d" in text
    with pytest.raises(PolicyApplyError, match="a container must hold a module that runs"):
        select(Net(), [Fp32Rule(path="empty")])
    compiled: Any = torch.compile(Net(), backend="eager")
    with pytest.raises(PolicyApplyError, match=r"apply the policy before torch\.compile"):
        select(compiled, [Fp32Rule(path="heads.a")])
