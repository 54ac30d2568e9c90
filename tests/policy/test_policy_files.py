"""What is saved is what is loaded, field by field; a file is written as a whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict, fields
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given, settings
from policy_strategies import policies, policy_files, profiles

from amptune.errors import OutputError
from amptune.policy.file_io import dumps, parse_policy, save
from amptune.policy.policy_file import PolicyFile
from amptune.policy.profile import Profile
from amptune.policy.serialization import policy_from_dict, policy_to_dict, schema_of
from amptune.policy.settings import STOCK, Fp32Rule, Policy
from amptune.policy.yaml_text import parse


@settings(max_examples=60, deadline=None)
@given(policy_files | profiles)
def test_a_file_survives_saving_and_loading_and_satisfies_its_schema(content: PolicyFile | Profile) -> None:
    document = parse(dumps(content), "policy.yaml")
    assert asdict(parse_policy(document)) == asdict(content)
    jsonschema.validate(document.data, schema_of("policy" if isinstance(content, PolicyFile) else "profile"))


def test_a_policy_survives_the_way_through_a_file_and_through_plain_data() -> None:
    departed: set[str] = set()

    @settings(max_examples=100, deadline=None)
    @given(policies())
    def survives(policy: Policy) -> None:
        departed.update(name for name, _ in policy.departures())
        back = parse_policy(parse(dumps(policy), "policy.yaml"))
        assert isinstance(back, PolicyFile)
        assert asdict(back.policy) == asdict(policy_from_dict(policy_to_dict(policy))) == asdict(policy)

    survives()
    assert departed == {field.name for field in fields(Policy)}, "the strategy must depart from stock in every field"


def test_the_settings_people_look_for_are_always_written_and_patterns_are_quoted() -> None:
    shown = ["schema", "autocast", "fp32_math", "memory_format", "cudnn_benchmark"]
    assert list(parse(dumps(Policy()), "policy.yaml").data) == shown
    assert '- path: "classifier.*"' in dumps(Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="classifier.*"),)))


def test_the_json_schemas_are_well_formed_and_refuse_unknown_keys_everywhere() -> None:
    for schema in (schema_of("policy"), schema_of("profile")):
        jsonschema.Draft202012Validator.check_schema(schema)
        closed = [schema, *schema["$defs"].values()]
        assert all(part["additionalProperties"] is False for part in closed if "properties" in part)
        assert "schema" in schema["required"]


def test_a_write_that_fails_says_why_and_leaves_the_old_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.yaml"
    save(Policy(autocast="bf16"), path)
    before = path.read_text()

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OutputError, match=r"policy\.yaml cannot be written: No space left on device"):
        save(Policy(autocast="fp16"), path)
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]


def test_saving_keeps_a_link_and_the_mode_of_the_file_behind_it(tmp_path: Path) -> None:
    file, link = tmp_path / "policy.yaml", tmp_path / "link.yaml"
    save(STOCK, file)
    os.chmod(file, 0o600)
    link.symlink_to(file)
    save(Policy(autocast="bf16"), link)
    assert link.is_symlink()
    assert "bf16" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


def loaded_by(code: str, *heavy: str) -> list[str]:
    """Returns which of these modules a fresh interpreter has imported after running the code."""
    told = f"import sys, warnings; warnings.simplefilter('ignore'); {code}; "
    told += f"print(*(name for name in {heavy} if name in sys.modules))"
    return subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True).stdout.split()


def test_a_policy_is_constructed_without_pydantic_yaml_or_torch() -> None:
    heavy = ("pydantic", "yaml", "torch")
    assert loaded_by("from amptune.policy.settings import Policy; Policy()", *heavy) == []


def test_a_file_is_loaded_and_applied_without_pydantic_and_without_code_that_few_policies_need(tmp_path: Path) -> None:
    path = tmp_path / "meant.yaml"
    path.write_text("schema: amptune.policy/1\ncudnn_benchmark: on\nvalid_for: {model: 'sha256:0'}\n")
    few = ("pydantic", "optuna", "amptune.runtime.graphs.graphed_model", "amptune.runtime.half.weights")
    code = f"import torch, amptune; amptune.apply({str(path)!r}, torch.nn.Linear(2, 2), any_hardware=True)"
    assert loaded_by(code, "yaml", *few) == ["yaml"]
