"""What is saved is what is loaded, field by field; a file is written as a whole or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
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


@settings(max_examples=60, deadline=None)
@given(policies())
def test_a_policy_survives_the_way_through_plain_data(policy: Policy) -> None:
    assert asdict(policy_from_dict(policy_to_dict(policy))) == asdict(policy)


def test_the_settings_people_look_for_are_always_written_and_patterns_are_quoted() -> None:
    shown = ["schema", "autocast", "fp32_math", "memory_format", "cudnn_benchmark"]
    assert list(parse(dumps(Policy()), "policy.yaml").data) == shown
    assert '- path: "classifier.*"' in dumps(Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="classifier.*"),)))


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


def test_a_file_is_loaded_and_applied_without_pydantic_and_without_code_that_few_policies_need(tmp_path: Path) -> None:
    path = tmp_path / "meant.yaml"
    path.write_text("schema: amptune.policy/1\ncudnn_benchmark: on\nvalid_for: {model: 'sha256:0'}\n")
    code = "import sys, warnings; warnings.simplefilter('ignore'); from amptune import Policy; Policy(); "
    code += "early = {'yaml', 'torch'} & sys.modules.keys(); import torch, amptune; "
    code += f"amptune.apply({str(path)!r}, torch.nn.Linear(2, 2), any_hardware=True); "
    few = {"pydantic", "optuna", "amptune.runtime.graphs.graphed_model", "amptune.runtime.half.weights"}
    code += f"print(*early, *({few} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "\n"
