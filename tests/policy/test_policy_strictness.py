"""A file means one thing: what JSON Schema refuses is refused here, and nothing hides behind another mistake."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from amptune.errors import FileFormatError
from amptune.policy.file_io import parse_policy, save
from amptune.policy.policy_file import PolicyFile
from amptune.policy.profile import Entry, Profile, resolve
from amptune.policy.settings import STOCK, Fp32Rule, Policy
from amptune.policy.yaml_text import parse

HEAD = "schema: amptune.policy/1\n"


def lines_of(text: str) -> list[str]:
    with pytest.raises(FileFormatError) as caught:
        parse_policy(parse(HEAD + text, "policy.yaml"))
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_size: true", "2:13: batch_size: True is not a whole number"),
        ('batch_size: "128"', "2:13: batch_size: '128' is not a whole number"),
        ("cudnn_benchmark: 1", "2:18: cudnn_benchmark: 1 is not true or false"),
        ('cudnn_benchmark: "yes"', "2:18: cudnn_benchmark: 'yes' is not true or false"),
    ],
)
def test_a_value_of_another_kind_is_refused(text: str, message: str) -> None:
    assert lines_of(text) == [f"policy.yaml:{message}"]


def test_an_unquoted_number_is_text_where_text_is_meant() -> None:
    found = parse_policy(parse(HEAD + "name: 2026\nfp32_modules: [{path: 0}]\n", "policy.yaml"))
    assert isinstance(found, PolicyFile)
    assert (found.name, found.policy.fp32_modules) == ("2026", (Fp32Rule(path="0"),))


def test_a_duplicate_key_hides_no_other_mistake() -> None:
    lines = lines_of("autocast: bf16\nautocast: fp16\nfoo: 1\n")
    assert [line.split(": ")[0] for line in lines] == ["policy.yaml:3:1", "policy.yaml:4:1"]


def test_a_wrong_word_hides_no_setting_out_of_range() -> None:
    lines = lines_of("memory_format: nchw\nbatch_size: 0\naccumulate: 0\n")
    assert [line.split(":")[1] for line in lines] == ["2", "3", "4"]


@pytest.mark.parametrize("mistake", ["autocast: fp61", "autcast: fp16"])
def test_a_mistake_is_not_reported_twice_by_what_depends_on_it(mistake: str) -> None:
    (line,) = lines_of(f"{mistake}\nloss_scale: {{init: 1024}}\n")
    assert line.startswith("policy.yaml:2:")


def test_a_rule_that_cannot_be_judged_hides_no_other_of_the_same_policy() -> None:
    lines = lines_of("autocast: bf15\nbatch_size: 0\naccumulate: 0\nloss_scale: {init: -1}\n")
    assert [line.split(":")[1] for line in lines] == ["2", "3", "4", "5"]


def test_one_long_text_cannot_be_multiplied_by_aliases() -> None:
    text = f"evidence:\n  parity:\n    a: &a {'x' * 100_000}\n    b: [{', '.join(['*a'] * 5000)}]\n"
    (line,) = lines_of(text)
    assert "aliases" in line


def test_many_brackets_in_a_text_are_no_nesting() -> None:
    found = parse_policy(parse(HEAD + f"name: '{'[' * 99}'\n", "policy.yaml"))
    assert isinstance(found, PolicyFile)
    assert found.name == "[" * 99


@pytest.mark.parametrize(
    ("label", "wanted", "here", "holds"),
    [
        ("torch", ">=2.10", "2.9", False),
        ("torch", ">=2.9", "2.10", True),
        ("cudnn", ">=9.2", "9.10", True),
        ("driver", ">=570.1.2", "580.159.04", True),
        ("torch", ">=2", "2.0", True),
        ("example.com/speed", ">=2.5", "2.10", False),
    ],
)
def test_versions_of_software_are_ordered_as_versions(label: str, wanted: str, here: str, holds: bool) -> None:
    here_only, elsewhere = PolicyFile(policy=Policy(autocast="bf16")), PolicyFile(policy=STOCK)
    profile = Profile(entries=(Entry(match={label: wanted}, policy=here_only),), default=elsewhere)
    assert resolve(profile, {label: here}).entry == (0 if holds else "default")


def test_saving_keeps_a_link_and_the_mode_of_the_file_behind_it(tmp_path: Path) -> None:
    file, link = tmp_path / "policy.yaml", tmp_path / "link.yaml"
    save(STOCK, file)
    os.chmod(file, 0o600)
    link.symlink_to(file)
    save(Policy(autocast="bf16"), link)
    assert link.is_symlink()
    assert "bf16" in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600
