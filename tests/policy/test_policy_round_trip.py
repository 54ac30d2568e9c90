"""What is saved is what is loaded, field by field, reasons included."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

from hypothesis import given, settings
from policy_strategies import policies, policy_files, profiles

from amptune.policy.file_io import dumps, parse_policy
from amptune.policy.policy_file import PolicyFile
from amptune.policy.profile import Profile
from amptune.policy.serialization import policy_from_dict, policy_to_dict
from amptune.policy.settings import Float8Rule, Fp32Rule, HalfRule, LossScale, Policy, Reason
from amptune.policy.yaml_text import parse

EVERYTHING = Policy(
    autocast="fp16",
    fp32_math="tf32",
    fp32_modules=(
        Fp32Rule(path="a.*", cast_output=True, reason=Reason(saves_ms=0.41, risk=2.0)),
        Fp32Rule(type="Norm"),
    ),
    half_modules=(HalfRule(type="LayerNorm"),),
    memory_format="channels_last",
    cudnn_benchmark=True,
    batch_size=128,
    accumulate=4,
    threads=3,
    checkpoint=("layers.*", "head"),
    compile="reduce-overhead",
    fused_optimizer=True,
    loss_scale=LossScale(init=1024.0, growth_interval=7, max=65536.0),
)
IN_FP8 = Policy(
    autocast="bf16",
    float8_modules=(Float8Rule(path="layers.*.mlp.*", reason=Reason(saves_ms=1.5)), Float8Rule(type="Up")),
)
# What does not go together with autocast, and with torch.compile.
HALF_WEIGHTS = Policy(
    cuda_graphs=True,
    weights="half",
    master_weights=True,
    keep_batchnorm_fp32=True,
    loss_scale=LossScale(init=128.0, static=True),
)


def again(content: Policy | PolicyFile | Profile) -> PolicyFile | Profile:
    return parse_policy(parse(dumps(content), "policy.yaml"))


@settings(max_examples=100, deadline=None)
@given(policies())
def test_a_policy_survives_saving_and_loading(policy: Policy) -> None:
    back = again(policy)
    assert isinstance(back, PolicyFile)
    assert asdict(back.policy) == asdict(policy)


@settings(max_examples=100, deadline=None)
@given(policy_files)
def test_a_policy_file_survives_saving_and_loading(policy_file: PolicyFile) -> None:
    assert asdict(again(policy_file)) == asdict(policy_file)


@settings(max_examples=40, deadline=None)
@given(profiles)
def test_a_profile_survives_saving_and_loading(profile: Profile) -> None:
    assert asdict(again(profile)) == asdict(profile)


@settings(max_examples=50, deadline=None)
@given(policies())
def test_a_policy_survives_the_way_through_plain_data(policy: Policy) -> None:
    assert asdict(policy_from_dict(policy_to_dict(policy))) == asdict(policy)


def test_a_policy_that_sets_every_field_keeps_every_field() -> None:
    both = {name for policy in (EVERYTHING, IN_FP8, HALF_WEIGHTS) for name, _ in policy.departures()}
    unset = {f.name for f in fields(Policy)} - both
    assert not unset, "the policies of this test must depart from stock in every field"
    for policy in (EVERYTHING, IN_FP8, HALF_WEIGHTS):
        back = again(policy)
        assert isinstance(back, PolicyFile)
        assert asdict(back.policy) == asdict(policy)


def test_the_settings_people_look_for_are_always_written() -> None:
    data: dict[str, Any] = parse(dumps(Policy()), "policy.yaml").data
    assert list(data) == ["schema", "autocast", "fp32_math", "memory_format", "cudnn_benchmark"]


def test_the_schema_stands_in_the_first_line_and_patterns_are_quoted() -> None:
    text = dumps(Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="classifier.*"),), compile="default"))
    assert text.startswith("schema: amptune.policy/1\n")
    assert '- path: "classifier.*"' in text
