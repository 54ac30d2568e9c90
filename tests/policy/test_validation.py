"""Files are read without pydantic; they are accepted, refused and understood as pydantic would have it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pydantic
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_strategies import plain, policy_files, profiles

from amptune.errors import FileFormatError
from amptune.policy.file_io import dumps, parse_policy, save
from amptune.policy.policy_file import PolicyFile
from amptune.policy.profile import Profile
from amptune.policy.serialization import (
    PolicyBody,
    PolicyDocument,
    ProfileDocument,
    adapter_for,
    policy_file_from,
    policy_file_to_dict,
)
from amptune.policy.settings import Fp32Rule, LossScale, Policy
from amptune.policy.validation import validate
from amptune.policy.yaml_text import Document, parse

HEAD = "schema: amptune.policy/1\n"
FOUND = Path(__file__).resolve().parents[2] / "reports"
POLICIES = sorted(FOUND.rglob("*.policy.yaml"))


def same(one: Any, other: Any) -> bool:
    """1 and 1.0 and True are equal in Python, and another thing in a file each."""
    return one == other and repr(one) == repr(other)


def lines_of(text: str) -> list[str]:
    with pytest.raises(FileFormatError) as caught:
        parse_policy(parse(HEAD + text, "policy.yaml"))
    return str(caught.value).splitlines()


@settings(max_examples=150, deadline=None)
@given(policy_files)
def test_a_policy_file_is_read_as_pydantic_reads_it(policy_file: PolicyFile) -> None:
    document = parse(dumps(policy_file), "policy.yaml")
    assert same(validate(document, PolicyDocument), adapter_for(PolicyDocument).validate_python(document.data))


@settings(max_examples=50, deadline=None)
@given(profiles)
def test_so_is_a_profile(profile: Profile) -> None:
    document = parse(dumps(profile), "profile.yaml")
    assert same(validate(document, ProfileDocument), adapter_for(ProfileDocument).validate_python(document.data))


@pytest.mark.parametrize("path", POLICIES, ids=lambda path: path.parent.name + "/" + path.name)
def test_so_are_the_policies_that_were_found(path: Path) -> None:
    document = parse(path.read_text(), str(path))
    assert same(validate(document, PolicyDocument), adapter_for(PolicyDocument).validate_python(document.data))


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


@settings(max_examples=300, deadline=None)
@given(mangled())
def test_whatever_pydantic_refuses_or_reads_is_refused_or_read_likewise(data: dict[str, Any]) -> None:
    """Spellings aside: a document without a text behind it has none that could mean another value."""
    adapter = adapter_for(PolicyDocument)
    try:
        wanted = adapter.validate_json(pydantic.TypeAdapter(Any).dump_json(data), strict=True)
    except pydantic.ValidationError as error:
        spelled = {"int_type", "string_type"}  # 10.0, and numbers where text is expected, are read
        if not {one["type"] for one in error.errors()} <= spelled:
            with pytest.raises(FileFormatError):
                validate(Document(source="policy.yaml", data=data), PolicyDocument)
    else:
        assert same(validate(Document(source="policy.yaml", data=data), PolicyDocument), wanted)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("batch_size: 1.5", "2:13: batch_size: 1.5 is not a whole number"),
        ("batch_size: .inf", "2:13: batch_size: inf is not a whole number"),
        ("accumulate: null", "2:13: accumulate: None is not a whole number"),
        ("autocast: 1", "2:11: autocast: 1 is not one of off, bf16, fp16"),
        ("compile: max-autotuned", "2:10: compile: 'max-autotuned' is not one of off, default, reduce-overhead, "),
        ("name: [a]", "2:7: name: ['a'] is not text"),
        ("fp32_modules: {path: fc}", "2:15: fp32_modules: {'path': 'fc'} is not a list"),
        ("fp32_modules: [fc]", "2:16: fp32_modules.0: 'fc' is not a mapping of keys to values"),
        ("loss_scale: 1024", "2:13: loss_scale: 1024 is not a mapping of keys to values"),
        ("evidence: [1]", "2:11: evidence: [1] is not a mapping of keys to values"),
        ("evidence: {speedup: '2'}", "2:21: evidence.speedup: '2' is not a number"),
        ("evidence: {provisional: 1}", "2:25: evidence.provisional: 1 is not true or false"),
        ("evidence: {launchs: 3}", "2:12: unknown key 'launchs'; did you mean launches? allowed here: workload, "),
        ("valid_for: {torch: [2]}", "2:20: valid_for.torch: [2] is not text"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(text: str, line: str) -> None:
    (found,) = lines_of(text + "\n")
    assert found.startswith(f"policy.yaml:{line}")


def test_a_misspelt_key_is_not_reported_as_missing_too() -> None:
    text = "schema: amptune.profile/1\nentries:\n  - matches: {a: b}\n    policy: {autocast: bf16}\n"
    with pytest.raises(FileFormatError) as caught:
        parse_policy(parse(text, "profile.yaml"))
    (line,) = str(caught.value).splitlines()
    assert line.startswith("profile.yaml:3:5: unknown key 'matches'; did you mean match?")


def test_two_missing_keys_are_two_problems() -> None:
    with pytest.raises(FileFormatError) as caught:
        parse_policy(parse("schema: amptune.profile/1\nentries: [{}]\n", "profile.yaml"))
    assert str(caught.value).splitlines() == [
        "profile.yaml:2:11: entries.0.match: this key is missing",
        "profile.yaml:2:11: entries.0.policy: this key is missing",
    ]


def test_two_wrong_rules_of_one_list_are_two_problems() -> None:
    lines = lines_of("fp32_modules:\n  - {cast_output: 2, path: a}\n  - {path: a, type: b}\n")
    assert [line.split(": ")[0] for line in lines] == ["policy.yaml:3:19", "policy.yaml:4:5"]


def test_common_spellings_are_read_as_they_are_meant() -> None:
    text = "batch_size: 10.0\ncudnn_benchmark: on\nfused_optimizer: no\nname: 1.10\nevidence: {speedup: 2}\n"
    found = parse_policy(parse(HEAD + text, "policy.yaml"))
    assert isinstance(found, PolicyFile)
    assert same(found.policy, Policy(batch_size=10, cudnn_benchmark=True))
    assert found.name == "1.10"
    assert same(dict(found.evidence), {"speedup": 2.0})


def test_whole_numbers_become_what_is_declared_and_settings_left_out_what_they_are_by_default() -> None:
    text = "autocast: fp16\nloss_scale: {init: 1024}\nfp32_modules: [{path: fc}]\n"
    read = validate(parse(HEAD + text, "policy.yaml"), PolicyDocument)
    assert same(read.loss_scale, LossScale(init=1024.0))
    assert read.fp32_modules == (Fp32Rule(path="fc"),)
    assert (read.accumulate, read.evidence) == (1, {})
    assert policy_file_from(validate(parse("autocast: bf16\n", "entry"), PolicyBody)).policy == Policy(autocast="bf16")


def test_a_file_is_loaded_and_applied_without_pydantic_and_without_code_that_few_policies_need(tmp_path: Path) -> None:
    save(PolicyFile(policy=Policy(autocast="bf16"), valid_for={"model": "sha256:0"}), tmp_path / "good.yaml")
    (tmp_path / "meant.yaml").write_text(HEAD + "cudnn_benchmark: on\n")
    assert not loaded_for(tmp_path / "good.yaml")
    assert not loaded_for(tmp_path / "meant.yaml")


def loaded_for(path: Path) -> list[str]:
    heavy = ("pydantic", "optuna", "amptune.runtime.graphs.graphed_model", "amptune.runtime.half.weights")
    code = (
        "import sys, warnings; warnings.simplefilter('ignore'); import torch, amptune; "
        f"amptune.apply({str(path)!r}, torch.nn.Linear(2, 2), any_hardware=True); "
        f"print(*(name for name in {heavy} if name in sys.modules))"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
