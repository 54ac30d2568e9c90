from __future__ import annotations

import re
from pathlib import Path

import pytest

import amptune
from amptune.policy.file_io import load_any, parse_policy
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
def test_the_opt_levels_of_apex_go_by_their_names_are_valid_everywhere_and_stand_in_the_guide(level: str) -> None:
    found = load_any(f"apex:{level}")
    assert isinstance(found, amptune.PolicyFile)
    assert (found.policy, found.name, found.valid_for) == (LEVELS[level], f"apex:{level}", {})
    rows = re.findall(rf"^\| `apex:{level}` \| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 1
    for row in rows if level != "O0" else ():
        written = parse_policy(parse("\n".join(["schema: amptune.policy/1", *re.findall(r"`([^`]*)`", row)]), "x"))
        assert written == amptune.PolicyFile(policy=LEVELS[level])


def test_a_file_that_is_called_like_a_preset_is_read_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    amptune.save(Policy(autocast="bf16"), "apex:O2")
    for path in ("./apex:O2", Path("./apex:O2")):
        assert amptune.load(path).policy == Policy(autocast="bf16")
    assert amptune.load("apex:O2").policy == LEVELS["O2"]
