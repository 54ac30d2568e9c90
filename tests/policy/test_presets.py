from __future__ import annotations

import re
from pathlib import Path

import pytest

import amptune
from amptune.errors import FileFormatError
from amptune.policy.file_io import dumps, load, load_any, parse_policy
from amptune.policy.settings import LossScale, Policy
from amptune.policy.yaml_text import parse

DYNAMIC = LossScale(init=65536, growth_interval=2000, max=16777216)


def test_the_opt_levels_of_apex_go_by_their_names() -> None:
    assert load("apex:O0").policy == Policy()
    assert load("apex:O1").policy == Policy(autocast="fp16", loss_scale=DYNAMIC)
    assert load("apex:O2").policy == Policy(
        weights="half", master_weights=True, keep_batchnorm_fp32=True, loss_scale=DYNAMIC
    )
    assert load("apex:O3").policy == Policy(weights="half")


def test_an_opt_level_has_its_name_and_is_valid_everywhere() -> None:
    found = load_any("apex:O2")
    assert isinstance(found, amptune.PolicyFile)
    assert (found.name, found.valid_for) == ("apex:O2", {})


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_opt_level_can_be_written_to_a_file_and_read_back(level: str, tmp_path: Path) -> None:
    amptune.save(load(f"apex:{level}"), tmp_path / "policy.yaml")
    assert amptune.load(tmp_path / "policy.yaml") == load(f"apex:{level}")


def test_o2_reads_as_a_person_would_write_it() -> None:
    assert "weights: half\nmaster_weights: true\nkeep_batchnorm_fp32: true\n" in dumps(load("apex:O2"))
    assert "loss_scale:\n  init: 65536.0\n  growth_interval: 2000\n  max: 16777216.0\n" in dumps(load("apex:O2"))


def test_o2_in_words() -> None:
    assert str(load("apex:O2").policy) == (
        "half weights, master weights, BatchNorm in FP32, loss scale 65536, at most 16777216"
    )


def test_an_unknown_level_is_answered_with_the_four() -> None:
    with pytest.raises(FileFormatError) as caught:
        load("apex:O4")
    assert str(caught.value) == ("apex:O4: is no opt level of Apex; there are apex:O0, apex:O1, apex:O2, apex:O3")


def test_a_file_of_such_a_name_is_read_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    amptune.save(Policy(autocast="bf16"), tmp_path / "apex:O2")
    assert load("./apex:O2").policy == Policy(autocast="bf16")


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "apex.md").read_text()


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_guide_writes_out_what_the_levels_are(level: str) -> None:
    (row,) = re.findall(rf"^\| `apex:{level}` \| (.*) \|$", PAGE, re.MULTILINE)
    text = "\n".join(["schema: amptune.policy/1", *re.findall(r"`([^`]*)`", row)])
    found = parse_policy(parse(text, "policy.yaml"))
    assert isinstance(found, amptune.PolicyFile)
    assert found.policy == load(f"apex:{level}").policy


@pytest.mark.parametrize(
    ("written", "meant"),
    [("{}", LossScale()), ("{init: 128, static: true}", LossScale(init=128, static=True))],
)
def test_the_loss_scales_of_the_guide_are_read(written: str, meant: LossScale) -> None:
    assert f"`loss_scale: {written}`" in PAGE
    found = parse_policy(parse(f"schema: amptune.policy/1\nautocast: fp16\nloss_scale: {written}\n", "policy.yaml"))
    assert isinstance(found, amptune.PolicyFile)
    assert found.policy.loss_scale == meant


def test_a_file_that_is_called_like_a_preset_is_read_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    amptune.save(Policy(autocast="bf16"), "apex:O2")
    for path in ("./apex:O2", Path("./apex:O2")):
        assert amptune.load(path).policy == Policy(autocast="bf16")
    assert amptune.load("apex:O2").policy == load("apex:O2").policy
