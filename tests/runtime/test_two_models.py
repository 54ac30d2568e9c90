"""Policies on several models of one process, which share its settings."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from test_apply_and_undo import state_of
from torch import nn
from torch._dynamo import config

import amptune
from amptune.policy.settings import Policy

POLICIES = [
    Policy(fp32_math="ieee", autocast="bf16", threads=2),
    Policy(fp32_math="tf32", cudnn_benchmark=True, threads=1, compile="blocks"),
    Policy(fp32_math="tf32", autocast="bf16", threads=2, compile="blocks"),
]


def net() -> nn.Module:
    return nn.Sequential(*(nn.TransformerEncoderLayer(4, 1, width) for width in (4, 4, 8, 8)))


def settings() -> object:
    return state_of(nn.Linear(1, 1), values=False)[2:4], config.recompile_limit, config.accumulated_recompile_limit


@pytest.mark.filterwarnings("ignore::amptune.PolicyDriftWarning")
@pytest.mark.parametrize("order", [*permutations(range(3))])
def test_settings_are_as_before_whichever_policy_is_undone_first(order: tuple[int, ...]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    before, alone = settings(), []
    for policy in POLICIES:
        with amptune.apply(policy, net()):
            alone.append(settings())
    applied = [amptune.apply(policy, net()) for policy in POLICIES[:2]]
    applied.append(amptune.apply(POLICIES[2], net()))
    for left, place in zip((2, 1, 0), order, strict=True):
        assert torch.get_num_threads() == POLICIES[max(order[2 - left :])].threads
        applied[place].undo()
    assert settings() == before
    for policy, expected in zip(POLICIES, alone, strict=True):
        with amptune.apply(policy, net()):
            assert settings() == expected
    torch.set_num_threads(threads)


def test_a_policy_that_changes_what_another_set_is_told() -> None:
    with amptune.apply(Policy(fp32_math="ieee"), nn.Linear(1, 1)):
        with amptune.apply(Policy(fp32_math="ieee"), nn.Bilinear(1, 1, 1)) as same:
            assert same.findings == ()
        with pytest.warns(amptune.PolicyDriftWarning, match="from now on it is tf32 for Linear too, whose policy says"):
            other = amptune.apply(Policy(fp32_math="tf32"), nn.Bilinear(1, 1, 1))
        assert [finding.code for finding in other.findings] == ["set-for-other-models"]
        other.undo()
