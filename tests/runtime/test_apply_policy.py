from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from loops import Net
from test_apply_and_undo import state_of
from torch import nn

from amptune.errors import PolicyApplyError
from amptune.policy.settings import Fp32Rule, Policy
from amptune.runtime.apply_policy import apply

EVERYTHING = Policy(
    autocast="bf16",
    fp32_math="tf32",
    fp32_modules=(Fp32Rule(path="head"), Fp32Rule(type="BatchNorm2d", cast_output=True)),
    memory_format="channels_last",
    cudnn_benchmark=True,
    batch_size=4,
    accumulate=2,
    fused_optimizer=True,
)


def test_modules_that_cannot_be_patched_are_one_error_and_nothing_was_changed() -> None:
    model = Net()
    model.head.bfloat16()
    stem = model.stem[0]
    assert isinstance(stem, nn.Module)
    stem.forward = stem.forward
    before = state_of(model)
    with pytest.raises(PolicyApplyError) as caught:
        apply(Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="head"), Fp32Rule(path="stem.0"))), model)
    assert str(caught.value).startswith("not every module can be kept in FP32:\n  stem.0 has a forward set on")
    assert "\n  head has weights in torch.bfloat16" in str(caught.value)
    assert state_of(model) == before


def test_a_later_step_that_fails_takes_the_earlier_ones_back() -> None:
    class Registered(nn.Linear):
        names: tuple[str, ...] = ()

        def __init_subclass__(cls, *, register: str) -> None:
            cls.names = (*cls.names, register)

    model = nn.Sequential(nn.Conv2d(3, 3, 3), nn.Linear(3, 3), Registered(3, 3))
    before = state_of(model)
    rules = (Fp32Rule(type="Linear"), Fp32Rule(type="Conv2d"))
    with pytest.raises(TypeError, match="register"):
        apply(Policy(autocast="bf16", fp32_math="tf32", memory_format="channels_last", fp32_modules=rules), model)
    assert state_of(model) == before
    apply(Policy(autocast="bf16"), model).undo()


def test_tf32_under_autocast_is_set_for_what_a_model_keeps_in_fp32_by_itself() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    with apply(Policy(autocast="bf16", fp32_math="tf32"), Net()):
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_a_model_has_one_policy_at_a_time_and_a_copy_of_a_patched_one_has_it_too() -> None:
    model = Net()
    tuned = apply(EVERYTHING, model)
    with pytest.raises(PolicyApplyError, match=r"this Net already has a policy .*; undo that one first"):
        apply(Policy(), model)
    with pytest.raises(PolicyApplyError, match=r"already has a policy \(stem.1 runs under it\)"):
        apply(EVERYTHING, copy.deepcopy(model))
    tuned.undo()
    apply(Policy(), model).undo()


def test_undo_waits_for_what_was_put_over_the_policy() -> None:
    model = Net()
    before = state_of(model)
    tuned = apply(EVERYTHING, model)
    nn.utils.parametrizations.weight_norm(model.head)
    with pytest.raises(PolicyApplyError, match="the class of head was changed again after the policy was applied"):
        tuned.undo()
    nn.utils.parametrize.remove_parametrizations(model.head, "weight")
    model.head.forward = model.head.forward  # type: ignore[method-assign]  # as accelerate does
    with pytest.raises(PolicyApplyError, match=r"instance of head after .* `del module\.forward` first"):
        tuned.undo()
    assert torch.backends.cudnn.benchmark is True
    del model.head.forward
    tuned.undo()
    assert state_of(model)[0] == before[0]
    assert torch.backends.cudnn.benchmark is False


def test_what_is_no_policy_and_what_is_no_model_are_refused() -> None:
    for policy in (Policy, {"autocast": "bf16"}):
        with pytest.raises(PolicyApplyError, match=r"a policy is a path, an amptune\.Policy or what amptune\.load"):
            apply(policy, Net())  # type: ignore[arg-type]
    for model in (Net, None):
        with pytest.raises(PolicyApplyError, match=r"applied to a torch\.nn\.Module, not to"):
            apply(Policy(), model)  # type: ignore[arg-type]


def test_batch_size_raises_where_the_policy_leaves_it_out() -> None:
    with apply(Policy(), Net()) as tuned, pytest.raises(PolicyApplyError, match="pass your own batch size"):
        _ = tuned.batch_size
    wrong: Any = torch.optim.SGD
    with apply(EVERYTHING, Net()) as tuned:
        assert (tuned.batch_size, tuned.accumulate) == (4, 2)
        with pytest.raises(PolicyApplyError, match=r"takes a built torch\.optim\.Optimizer"):
            tuned.optimizer(wrong)


def test_settings_without_effect_are_findings() -> None:
    channels_last = Policy(memory_format="channels_last")
    for layer, policy, code in (
        (nn.Linear(4, 4), Policy(fp32_modules=(Fp32Rule(type="Linear"),)), "fp32-modules-without-effect"),
        (nn.Linear(4, 4), channels_last, "memory-format-without-effect"),
        (nn.LazyConv2d(4, 3), channels_last, "memory-format-of-lazy-weights"),
    ):
        with apply(policy, nn.Sequential(layer)) as tuned:
            assert [finding.code for finding in tuned.findings] == [code]
