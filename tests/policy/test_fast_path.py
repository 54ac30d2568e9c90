"""What is read at once is what pydantic reads; whatever else there is, is left to it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_strategies import plain, policy_files, profiles

from amptune.policy.fast_path import as_it_stands
from amptune.policy.file_io import dumps, save
from amptune.policy.policy_file import PolicyFile
from amptune.policy.profile import Profile
from amptune.policy.serialization import PolicyBody, PolicyDocument, ProfileDocument, adapter_for, policy_file_to_dict
from amptune.policy.settings import Fp32Rule, LossScale, Policy
from amptune.policy.yaml_text import parse

SCHEMA = {"schema": "amptune.policy/1"}
FOUND = Path(__file__).resolve().parents[2] / "reports"
POLICIES = sorted(FOUND.rglob("*.policy.yaml"))


def same(one: Any, other: Any) -> bool:
    """1 and 1.0 and True are equal in Python, and another thing in a file each."""
    return one == other and repr(one) == repr(other)


@settings(max_examples=150, deadline=None)
@given(policy_files)
def test_a_policy_file_is_read_at_once_and_as_pydantic_reads_it(policy_file: PolicyFile) -> None:
    data = parse(dumps(policy_file), "policy.yaml").data
    at_once = as_it_stands(PolicyDocument, data)
    assert at_once is not None
    assert same(at_once, adapter_for(PolicyDocument).validate_python(data))


@settings(max_examples=50, deadline=None)
@given(profiles)
def test_so_is_a_profile(profile: Profile) -> None:
    data = parse(dumps(profile), "profile.yaml").data
    assert same(as_it_stands(ProfileDocument, data), adapter_for(ProfileDocument).validate_python(data))


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.parent.name + "/" + path.name)
def test_so_are_the_policies_that_were_found(path: Path) -> None:
    data = parse(path.read_text(), str(path)).data
    at_once = as_it_stands(PolicyDocument, data)
    assert at_once is not None
    assert same(at_once, adapter_for(PolicyDocument).validate_python(data))


@st.composite
def mangled(draw: st.DrawFn) -> dict[str, Any]:
    """A policy file in which one value became another, a key went or one came."""
    data: dict[str, Any] = policy_file_to_dict(draw(policy_files))
    key = draw(st.sampled_from([*data, *Policy.__dataclass_fields__, "schema", "nonsense"]))
    match draw(st.sampled_from(["other", "gone", "inside"])):
        case "gone":
            data.pop(key, None)
        case "inside" if isinstance(data.get(key), dict) and data[key]:
            data[key] = {**data[key], draw(st.sampled_from([*data[key], "nonsense"])): draw(plain)}
        case _:
            data[key] = draw(plain | st.lists(st.dictionaries(st.sampled_from(["path", "type"]), plain), max_size=2))
    return data


@settings(max_examples=150, deadline=None)
@given(mangled())
def test_what_pydantic_refuses_is_never_read_at_once(data: dict[str, Any]) -> None:
    at_once = as_it_stands(PolicyDocument, data)
    try:
        strict = adapter_for(PolicyDocument).validate_json(pydantic.TypeAdapter(Any).dump_json(data), strict=True)
    except pydantic.ValidationError:
        assert at_once is None
    else:
        assert at_once is None or same(at_once, strict)


@pytest.mark.parametrize(
    "setting",
    [
        {"batch_size": 10.0},
        {"batch_size": True},
        {"accumulate": "2"},
        {"accumulate": 0},
        {"cudnn_benchmark": "on"},
        {"cudnn_benchmark": 1},
        {"autocast": "bf61"},
        {"autocast": None},
        {"name": 1},
        {"name": "\ud800"},
        {"fp32_modules": {"path": "fc"}},
        {"fp32_modules": [{"path": "fc", "type": "Linear"}]},
        {"fp32_modules": [{"path": "fc", "reason": {"risk": float("nan")}}]},
        {"loss_scale": {"init": 10**400}, "autocast": "fp16"},
        {"loss_scale": {}},
        {"valid_for": {1: "x"}},
        {"evidence": {"speedup": "2"}},
        {"evidence": {"parity": {1: 2}}},
        {"evidence": {"parity": {"at": float("inf")}}},
        {"evidence": {"nonsense": 1}},
        {"nonsense": 1},
    ],
    ids=str,
)
def test_the_unusual_and_the_wrong_are_left_to_pydantic(setting: dict[str, Any]) -> None:
    assert as_it_stands(PolicyDocument, SCHEMA | setting) is None


@pytest.mark.parametrize("data", [None, [], "policy", 1, {}, {"schema": "amptune.policy/2"}])
def test_so_is_what_is_no_policy_file(data: object) -> None:
    assert as_it_stands(PolicyDocument, data) is None


def test_whole_numbers_become_what_is_declared_and_settings_left_out_what_they_are_by_default() -> None:
    data = SCHEMA | {"autocast": "fp16", "loss_scale": {"init": 1024}, "fp32_modules": [{"path": "fc"}]}
    read = as_it_stands(PolicyDocument, data)
    assert read is not None
    assert same(read.loss_scale, LossScale(init=1024.0))
    assert read.fp32_modules == (Fp32Rule(path="fc"),)
    assert (read.accumulate, read.evidence) == (1, {})
    body = as_it_stands(PolicyBody, {})
    assert body is not None
    assert body.schema is None


def test_what_only_pydantic_can_check_is_left_to_it() -> None:
    kind = dataclasses.make_dataclass("Limited", [("most", Annotated[int, pydantic.Field(lt=3)])])
    assert as_it_stands(kind, {"most": 5}) is None


def test_a_good_file_is_loaded_and_applied_without_pydantic_and_without_what_few_policies_need(tmp_path: Path) -> None:
    save(PolicyFile(policy=Policy(autocast="bf16"), valid_for={"model": "sha256:0"}), tmp_path / "good.yaml")
    (tmp_path / "meant.yaml").write_text("schema: amptune.policy/1\ncudnn_benchmark: on\n")
    assert not loaded_for(tmp_path / "good.yaml")
    assert loaded_for(tmp_path / "meant.yaml") == ["pydantic"]


def loaded_for(path: Path) -> list[str]:
    heavy = ("pydantic", "optuna", "amptune.runtime.guard.guard", "amptune.runtime.half.weights")
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import torch, amptune; "
        f"amptune.apply({str(path)!r}, torch.nn.Linear(2, 2), any_hardware=True); "
        f"print(*(name for name in {heavy} if name in sys.modules))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
