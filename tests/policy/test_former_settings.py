"""Settings that policies had once: whatever names one is told why it went, at its line, beside all other problems."""

from __future__ import annotations

import pytest

from amptune.errors import FileFormatError, SpaceError
from amptune.policy.file_io import parse_policy
from amptune.policy.former_settings import FORMER, taken_out
from amptune.policy.serialization import policy_from_dict
from amptune.policy.settings import KNOBS
from amptune.policy.yaml_text import parse
from amptune.search.space.knobs import SEARCHED, pin
from amptune.search.space.space_file import load_space, parse_space

POLICY = "schema: amptune.policy/1\n{name}: [cudnn, [0.5]]\nautocast: bf61\n"
PROFILE = "schema: amptune.profile/1\nentries: []\ndefault: {{{name}: 0.2}}\n"
SPACE = "schema: amptune.space/1\narchitecture: mine\ncompute_capability: []\nextends: cpu\n"


@pytest.mark.parametrize("name", FORMER)
@pytest.mark.parametrize(
    ("text", "place", "todo"),
    [
        (POLICY, "2:1", "remove the line"),
        (PROFILE, "3:11", "remove the line"),
        (SPACE + "knobs: {{{name}: [1.0], threads: [0]}}", "5:9", "remove it"),
        (SPACE + "try_first: [{{autocast: bf16, {name}: 0.5}}]", "5:30", "remove it"),
        (SPACE + "forbid: [{{when: {{{name}: 0.5}}, because: measured here}}]", "5:18", "remove it"),
    ],
)
def test_a_file_that_names_one_is_told_the_reason_beside_its_other_problems(
    name: str, text: str, place: str, todo: str
) -> None:
    with pytest.raises(FileFormatError) as caught:
        (parse_space if SPACE in text else parse_policy)(parse(text.format(name=name), "old.yaml"))
    first, *others = caught.value.problems
    assert str(first) == f"old.yaml:{place}: {taken_out(name)}: {todo}"
    assert len(others) == (text is POLICY)


@pytest.mark.parametrize("name", FORMER)
def test_a_pin_and_what_holds_such_a_policy_are_told_it_and_no_setting_is_a_former_one(name: str) -> None:
    assert name not in {knob.name for knob in KNOBS} | SEARCHED.keys()
    with pytest.raises(SpaceError, match="was taken out, because"):
        pin(load_space("hopper"), name, "0.5")
    with pytest.raises(ValueError, match=f"^{name} was taken out, because"):
        policy_from_dict({"autocast": "bf16", name: 0.5})
