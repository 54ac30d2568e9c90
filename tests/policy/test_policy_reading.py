"""Scalars are read as people mean them, and no text does more than fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from amptune.errors import FileFormatError
from amptune.policy import yaml_text
from amptune.policy.file_io import load, parse_policy
from amptune.policy.policy_file import PolicyFile
from amptune.policy.yaml_text import parse, read

HEAD = "schema: amptune.policy/1\n"


def policy_file(text: str) -> PolicyFile:
    found = parse_policy(parse(HEAD + text, "policy.yaml"))
    assert isinstance(found, PolicyFile)
    return found


def refused(text: str) -> str:
    with pytest.raises(FileFormatError) as caught:
        parse_policy(parse(text, "policy.yaml"))
    return str(caught.value)


def test_the_empty_policy_is_stock_pytorch() -> None:
    assert policy_file("") == PolicyFile(policy=type(policy_file("").policy)())


@pytest.mark.parametrize("off", ["off", "'off'", '"off"'])
def test_off_is_a_word_quoted_or_not(off: str) -> None:
    policy = policy_file(f"autocast: {off}\ncompile: {off}\n").policy
    assert (policy.autocast, policy.compile) == ("off", "off")


@pytest.mark.parametrize("on", ["on", "yes", "true", "True"])
def test_a_switch_reads_on_and_yes_as_true(on: str) -> None:
    assert policy_file(f"cudnn_benchmark: {on}\n").policy.cudnn_benchmark is True


def test_the_compiler_s_scope_may_be_said_beside_its_mode() -> None:
    """As `compile: blocks`, which is how it is written."""
    policy = policy_file("compile: default\ncompile_scope: blocks\n").policy
    assert policy == policy_file("compile: blocks\n").policy
    assert policy_file("compile: default\ncompile_scope: model\n").policy == policy_file("compile: default\n").policy
    assert "policy.yaml:2:16: compile_scope: blocks needs compile: default" in refused(
        HEAD + "compile_scope: blocks\ncompile: reduce-overhead\n"
    )


def test_a_whole_number_may_be_written_with_a_point() -> None:
    policy = policy_file("batch_size: 128.0\n").policy
    assert policy.batch_size == 128
    assert isinstance(policy.batch_size, int)


@pytest.mark.parametrize("number", ["1e3", "1E+3", "1000", "1000.0"])
def test_an_exponent_makes_a_number(number: str) -> None:
    scale = policy_file(f"autocast: fp16\nloss_scale: {{init: {number}}}\n").policy.loss_scale
    assert scale is not None
    assert scale.init == 1000.0


def test_an_unquoted_label_is_its_text_in_the_file() -> None:
    labels = policy_file("valid_for: {torch: 2.10, nvidia.com/gpu.memory: 143771, x: true}\n").valid_for
    assert labels == {"torch": "2.10", "nvidia.com/gpu.memory": "143771", "x": "true"}


def test_a_time_stays_the_text_it_is() -> None:
    assert policy_file("evidence: {tuned_on: 2026-11-21T05:00:00Z}\n").evidence == {"tuned_on": "2026-11-21T05:00:00Z"}


def test_a_tag_that_names_a_python_object_runs_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    message = refused(HEAD + f"name: !!python/object/apply:os.mkdir ['{trace}']\n")
    assert message.startswith("policy.yaml:2:7: ")
    assert not trace.exists()


def test_aliases_that_multiply_are_refused_quickly() -> None:
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{c}: &{c} [{', '.join(['*' + chr(ord(c) - 1)] * 9)}]" for c in "bcdefghij"]
    assert "aliases" in refused("\n".join(lines))


NESTED = ["[" * 5000, "- " * 5000, "{a: " * 5000, "\n".join(" " * n + "a:" for n in range(99)), "é: " + "[{" * 2000]


@pytest.mark.parametrize("loader", [yaml_text._BaseLoader, yaml.SafeLoader])  # libyaml, whose newest has a limit; none
@pytest.mark.parametrize("text", NESTED)
def test_nesting_without_end_is_refused(text: str, loader: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_text, "_BaseLoader", loader)
    assert refused(text) == "policy.yaml: nested deeper than 60 levels"


@pytest.mark.parametrize("text", ["[" * 5000, "{" * 5000, "é: " + "[{" * 2000])
def test_a_nesting_limit_of_pyyaml_changes_no_message(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scanner of PyYAML 6.0.4 may meet its limit before the first event is out; another may word it anew."""

    def with_a_limit(text: str, Loader: type) -> Iterator[yaml.Event]:  # noqa: ARG001, N803
        mark = yaml.Mark("", len(text) // 2, 0, len(text) // 2, "", 0)
        yield from ()
        raise yaml.scanner.ScannerError(None, None, "far too deep", mark)

    monkeypatch.setattr("yaml.parse", with_a_limit)
    assert refused(text) == "policy.yaml: nested deeper than 60 levels"


def test_a_mistake_among_closed_brackets_is_not_called_deep() -> None:
    assert "nested" not in refused(f"a: [{', '.join(['[]'] * 100)}, }}]")


@pytest.mark.parametrize("text", ["", "   \n", "- a\n", "just words", "\x00\x01", "a: [1,", "a: &a [*a]", "\ud800"])
def test_what_is_no_policy_is_said_to_be_none(text: str) -> None:
    assert refused(text).startswith("policy.yaml")


@settings(max_examples=300, deadline=None)
@given(st.text() | st.text(alphabet=" \t\n:-[]{}*&!|>'\"#,?%@`a1.~<", max_size=60))
def test_arbitrary_text_raises_nothing_but_a_file_format_error(text: str) -> None:
    with contextlib.suppress(FileFormatError):
        parse_policy(parse(text, "policy.yaml"))


@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=60))
def test_arbitrary_bytes_raise_nothing_but_a_file_format_error(
    content: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "policy.yaml"
    path.write_bytes(content)
    with pytest.raises(FileFormatError):
        load(path)


def test_a_file_that_is_not_there_or_is_a_folder_is_said_to_be(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(FileFormatError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path}: cannot be read: ")
