from __future__ import annotations

import re
from pathlib import Path

import pytest

import amptune
from amptune.errors import FileFormatError
from amptune.policy.file_io import dumps, load, load_any, parse_policy
from amptune.policy.settings import LossScale, Policy
from amptune.policy.yaml_text import parse

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "apex.md").read_text()
DYNAMIC = LossScale(init=65536, growth_interval=2000, max=16777216)
LEVELS = {
    "O0": Policy(),
    "O1": Policy(autocast="fp16", loss_scale=DYNAMIC),
    "O2": Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True, loss_scale=DYNAMIC),
    "O3": Policy(weights="half"),
}


@pytest.mark.parametrize("level", LEVELS)
def test_the_opt_levels_of_apex_go_by_their_names_and_are_valid_everywhere(level: str) -> None:
    found = load_any(f"apex:{level}")
    assert isinstance(found, amptune.PolicyFile)
    assert (found.policy, found.name, found.valid_for) == (LEVELS[level], f"apex:{level}", {})


def test_o2_reads_as_a_person_would_write_it() -> None:
    assert "weights: half\nmaster_weights: true\nkeep_batchnorm_fp32: true\n" in dumps(load("apex:O2"))
    assert "loss_scale:\n  init: 65536.0\n  growth_interval: 2000\n  max: 16777216.0\n" in dumps(load("apex:O2"))


def test_an_unknown_level_is_answered_with_the_four() -> None:
    with pytest.raises(FileFormatError, match=r"^apex:O4: is no opt level of Apex; there are apex:O0, .*, apex:O3$"):
        load("apex:O4")


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_guide_writes_out_what_the_levels_are(level: str) -> None:
    (row,) = re.findall(rf"^\| `apex:{level}` \| (.*) \|$", PAGE, re.MULTILINE)
    text = "\n".join(["schema: amptune.policy/1", *re.findall(r"`([^`]*)`", row)])
    found = parse_policy(parse(text, "policy.yaml"))
    assert isinstance(found, amptune.PolicyFile)
    assert found.policy == LEVELS[level]


def test_a_file_that_is_called_like_a_preset_is_read_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    amptune.save(Policy(autocast="bf16"), "apex:O2")
    for path in ("./apex:O2", Path("./apex:O2")):
        assert amptune.load(path).policy == Policy(autocast="bf16")
    assert amptune.load("apex:O2").policy == LEVELS["O2"]
