"""A file is written as a whole or not at all, and its schema agrees with what is read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from policy_strategies import policy_files, profiles

from amptune.errors import OutputError
from amptune.policy.file_io import dumps, save
from amptune.policy.policy_file import PolicyFile
from amptune.policy.profile import Profile
from amptune.policy.serialization import schema_of
from amptune.policy.settings import Policy
from amptune.policy.yaml_text import parse


def test_a_disk_that_is_full_is_an_error_that_says_so() -> None:
    with pytest.raises(OutputError, match=r"/dev/full cannot be written: No space left on device"):
        save(Policy(), "/dev/full")


def test_a_folder_that_does_not_exist_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written: No such file or directory"):
        save(Policy(), tmp_path / "none" / "policy.yaml")


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.yaml"
    save(Policy(autocast="bf16"), path)
    before = path.read_text()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OutputError):
        save(Policy(autocast="fp16"), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


@settings(max_examples=40, deadline=None)
@given(policy_files)
def test_a_policy_that_is_written_satisfies_the_json_schema(policy_file: PolicyFile) -> None:
    jsonschema.validate(parse(dumps(policy_file), "policy.yaml").data, schema_of("policy"))


@settings(max_examples=20, deadline=None)
@given(profiles)
def test_a_profile_that_is_written_satisfies_the_json_schema(profile: Profile) -> None:
    jsonschema.validate(parse(dumps(profile), "profile.yaml").data, schema_of("profile"))


def test_the_json_schema_is_one_and_refuses_unknown_keys_everywhere() -> None:
    for schema in (schema_of("policy"), schema_of("profile")):
        jsonschema.Draft202012Validator.check_schema(schema)
        closed = [schema, *schema["$defs"].values()]
        assert all(part["additionalProperties"] is False for part in closed if "properties" in part)
        assert "schema" in schema["required"]


def test_a_policy_is_constructed_without_pydantic_yaml_or_torch() -> None:
    heavy = "[m for m in ('pydantic', 'yaml', 'torch') if m in sys.modules]"
    code = f"import sys; from amptune.policy.settings import Policy; Policy(); print({heavy})"
    light = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert light.stdout.strip() == "[]"
    loading = code.replace("policy.settings import Policy; Policy()", "policy.yaml_text import parse")
    heavier = subprocess.run([sys.executable, "-c", loading], capture_output=True, text=True, check=True)
    assert "yaml" in heavier.stdout, "this test must be able to fail"
