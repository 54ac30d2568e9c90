"""Each mistake is reported at its line and column, with what is allowed."""

from __future__ import annotations

import pytest

from amptune.errors import FileFormatError
from amptune.policy.file_io import parse_policy
from amptune.policy.yaml_text import parse

HEAD = "schema: amptune.policy/1\n"


def problems(text: str) -> list[str]:
    with pytest.raises(FileFormatError) as caught:
        parse_policy(parse(text, "policy.yaml"))
    return str(caught.value).splitlines()


def test_a_wrong_word_is_answered_with_the_right_ones() -> None:
    (line,) = problems(HEAD + "name: x\nautocast: bf15\n")
    assert line.startswith("policy.yaml:3:11: autocast: 'bf15' is not one of off, bf16, fp16")


def test_an_unknown_key_is_answered_with_the_nearest() -> None:
    (line,) = problems(HEAD + "autcast: bf16\n")
    assert line.startswith("policy.yaml:2:1: unknown key 'autcast'")
    assert "did you mean autocast?" in line
    assert "memory_format" in line


def test_an_unknown_key_of_a_rule_is_answered_with_the_keys_of_rules() -> None:
    (line,) = problems(HEAD + "fp32_modules:\n  - path: a\n    cast: true\n")
    assert line.startswith("policy.yaml:4:5: unknown key 'cast'")
    assert line.endswith("path, type, reason, cast_output")


def test_every_duplicate_key_is_reported_with_the_line_of_the_first() -> None:
    lines = problems(HEAD + "name: a\nname: b\nautocast: bf16\nautocast: fp16\n")
    assert [line.split(": ")[0] for line in lines] == ["policy.yaml:3:1", "policy.yaml:5:1"]
    assert "line 2" in lines[0]
    assert "line 4" in lines[1]


def test_a_fraction_is_no_whole_number() -> None:
    (line,) = problems(HEAD + "batch_size: 10.5\n")
    assert line.startswith("policy.yaml:2:13: batch_size: 10.5")


@pytest.mark.parametrize("pattern", ["*", "*.bn", "*bn", "**"])
def test_a_bare_star_is_answered_with_quotes(pattern: str) -> None:
    (line,) = problems(HEAD + f"fp32_modules:\n  - path: {pattern}\n")
    assert line.startswith("policy.yaml:3:1")
    assert 'must be quoted: path: "*.norm"' in line


def test_a_tab_is_answered_with_spaces() -> None:
    (line,) = problems(HEAD + "loss_scale:\n\tinit: 1\n")
    assert line.startswith("policy.yaml:3:1: ")
    assert "spaces, not tabs" in line


def test_every_setting_out_of_range_is_reported_at_its_place() -> None:
    lines = problems(HEAD + "batch_size: 0\naccumulate: 0\nloss_scale: {init: 1}\n")
    assert lines == [
        "policy.yaml:2:13: batch_size: 0 is not at least 1",
        "policy.yaml:3:13: accumulate: 0 is not at least 1",
        "policy.yaml:4:13: loss_scale: only autocast fp16 scales the loss, and autocast is off",
    ]


def test_a_rule_with_both_path_and_type_is_reported_at_the_rule() -> None:
    (line,) = problems(HEAD + "fp32_modules:\n  - path: a\n    type: b\n")
    assert line.startswith("policy.yaml:3:5: ")
    assert "either a path or a type" in line


def test_a_file_full_of_mistakes_reports_them_all_in_its_order() -> None:
    lines = problems(
        HEAD + "autocast: bf15\nfoo: 1\nfp32_modules:\n  - path: a\n    type: b\n  - pth: x\n"
        "batch_size: ten\nloss_scale: {init: -1}\nevidence: {bogus: 1, trials: x}\n"
    )
    assert [int(line.split(":")[1]) for line in lines] == [2, 3, 5, 7, 8, 9, 10, 10]


@pytest.mark.parametrize("schema", ["amptune.policy/2", "amptune.space/1", "policy"])
def test_another_schema_is_answered_with_those_that_are_read(schema: str) -> None:
    (line,) = problems(f"schema: {schema}\n")
    assert line.startswith(f"policy.yaml:1:9: schema: '{schema}'")
    assert "amptune.policy/1 and amptune.profile/1" in line


def test_a_file_without_a_schema_is_told_which_there_are() -> None:
    (line,) = problems("autocast: bf16\n")
    assert line.startswith("policy.yaml:1:1: schema")
    assert "amptune.policy/1" in line


def test_a_mistake_inside_a_profile_has_its_line_too() -> None:
    (line,) = problems("schema: amptune.profile/1\nentries:\n  - match: {a: b}\n    policy:\n      autocast: bf61\n")
    assert line.startswith("policy.yaml:5:17: entries.0.policy.autocast: 'bf61' is not one of off, bf16, fp16")


def test_half_weights_beside_autocast_are_reported_at_the_weights() -> None:
    lines = problems(HEAD + "autocast: fp16\nweights: half\nmaster_weights: true\n")
    assert lines == ["policy.yaml:3:10: weights: half weights compute in half without autocast, and autocast is fp16"]


def test_what_belongs_to_half_weights_is_reported_without_them() -> None:
    lines = problems(HEAD + "master_weights: true\nkeep_batchnorm_fp32: true\n")
    assert lines == [
        "policy.yaml:2:17: master_weights: only half weights have FP32 masters, and weights is fp32",
        "policy.yaml:3:22: keep_batchnorm_fp32: BatchNorm is in FP32 already where weights is fp32",
    ]


def test_a_misspelt_word_for_the_weights_is_reported_alone() -> None:
    lines = problems(HEAD + "weights: fp16\nmaster_weights: true\nkeep_batchnorm_fp32: true\n")
    assert lines == ["policy.yaml:2:10: weights: 'fp16' is not one of fp32, half"]


def test_every_mistake_in_a_loss_scale_is_reported_at_its_place() -> None:
    lines = problems(HEAD + "autocast: fp16\nloss_scale:\n  init: 1024\n  growth_interval: 0\n  max: 8\n")
    assert lines == [
        "policy.yaml:5:20: loss_scale.growth_interval: 0 is not at least 1",
        "policy.yaml:6:8: loss_scale.max: 8 is below init, 1024",
    ]


def test_a_static_loss_scale_has_no_maximum() -> None:
    (line,) = problems(HEAD + "autocast: fp16\nloss_scale: {init: 128, max: 1024, static: true}\n")
    assert line == "policy.yaml:3:30: loss_scale.max: a static loss scale does not grow"
