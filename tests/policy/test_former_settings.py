"""Settings that policies had once: whatever names one is told why it went, at its line, beside all other problems."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import run

from amptune.errors import FileFormatError, SpaceError
from amptune.policy.file_io import parse_policy
from amptune.policy.former_settings import FORMER, taken_out
from amptune.policy.serialization import policy_from_dict
from amptune.policy.settings import KNOBS
from amptune.policy.yaml_text import parse
from amptune.search.space.knobs import SEARCHED, pin
from amptune.search.space.space_file import load_space, parse_space

POLICY = "schema: amptune.policy/1\n{name}: [cudnn, [0.5]]\nautocast: bf61\n"
PROFILE = """\
schema: amptune.profile/1
entries:
  - match: {{torch: ">=2"}}
    policy: {{accumulate: 0.5, {name}: 0.5}}
default: {{{name}: 0.2}}
"""
SPACE = """\
schema: amptune.space/1
architecture: mine
compute_capability: []
extends: cpu
{}
"""

named = pytest.mark.parametrize("name", FORMER)


def problems(text: str) -> list[str]:
    read = parse_space if "amptune.space/1" in text else parse_policy
    with pytest.raises(FileFormatError) as caught:
        read(parse(text, "old.yaml"))
    return [str(problem) for problem in caught.value.problems]


def test_no_setting_is_a_former_one() -> None:
    assert not FORMER.keys() & ({knob.name for knob in KNOBS} | SEARCHED.keys())


@named
def test_a_policy_file_and_a_profile_are_told_the_reason_beside_their_other_problems(name: str) -> None:
    told = f"{taken_out(name)}: remove the line"
    assert problems(POLICY.format(name=name)) == [
        f"old.yaml:2:1: {told}",
        "old.yaml:3:11: autocast: 'bf61' is not one of off, bf16, fp16; did you mean bf16?",
    ]
    assert problems(PROFILE.format(name=name))[1:] == [f"old.yaml:4:31: {told}", f"old.yaml:5:11: {told}"]


@named
@pytest.mark.parametrize(
    ("more", "place"),
    [
        ("knobs: {{{name}: [1.0], threads: [0]}}", "5:9"),
        ("try_first: [{{autocast: bf16, {name}: 0.5}}]", "5:30"),
        ("forbid: [{{when: {{{name}: 0.5}}, because: measured here}}]", "5:18"),
    ],
)
def test_a_space_is_told_it_wherever_it_names_one(name: str, more: str, place: str) -> None:
    assert problems(SPACE.format(more.format(name=name))) == [f"old.yaml:{place}: {taken_out(name)}: remove it"]


@named
def test_check_shows_it_and_a_pin_and_what_holds_such_a_policy_are_told_it(name: str, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(f"schema: amptune.policy/1\nautocast: bf16\n{name}: [cudnn]\n")
    checked = run("check", "old.yaml", folder=tmp_path)
    assert (checked.returncode, checked.stderr) == (2, f"error: old.yaml:3:1: {taken_out(name)}: remove the line\n")
    pinned = run("tune", "-q", "amptune.workload.zoo:conv1", "--set", f"{name}=0.5", folder=tmp_path)
    assert (pinned.returncode, pinned.stderr) == (2, f"error: {taken_out(name)}; leave --set {name}=0.5 out\n")
    with pytest.raises(SpaceError, match="was taken out, because"):
        pin(load_space("hopper"), name, "0.5")
    with pytest.raises(ValueError, match=f"^{name} was taken out, because"):
        policy_from_dict({"autocast": "bf16", name: 0.5})
