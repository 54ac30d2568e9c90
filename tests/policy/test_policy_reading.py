"""Scalars are read as people mean them, and no text does more than fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pydantic
import pydantic_core
import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from amptune.errors import FileFormatError
from amptune.policy import yaml_text
from amptune.policy.file_io import load, parse_policy
from amptune.policy.policy_file import PolicyFile
from amptune.policy.serialization import adapter_for
from amptune.policy.settings import STOCK, Fp32Rule, LossScale, Policy
from amptune.policy.yaml_text import parse, read

HEAD = "schema: amptune.policy/1\n"
FP16 = "autocast: fp16\nloss_scale:"
SCALED = Policy(autocast="fp16", loss_scale=LossScale(init=1000.0))


def read_as(text: str) -> PolicyFile:
    found = parse_policy(parse(HEAD + text, "policy.yaml"))
    assert isinstance(found, PolicyFile)
    return found


def refused(text: str) -> str:
    with pytest.raises(FileFormatError) as caught:
        parse_policy(parse(text, "policy.yaml"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("", STOCK),
        ("autocast: off\ncompile: 'off'", STOCK),
        *((f"cudnn_benchmark: {on}", Policy(cudnn_benchmark=True)) for on in ("on", "yes", "True")),
        ("fused_optimizer: no", STOCK),
        ("compile: default\ncompile_scope: blocks", Policy(compile="blocks")),
        ("compile: default\ncompile_scope: step\ncuda_graphs: step", Policy(compile="step", cuda_graphs="step")),
        ("batch_size: 128.0", Policy(batch_size=128)),
        *((f"{FP16} {{init: {n}}}", SCALED) for n in ("1e3", "1000")),
        (f"{FP16} {{init: 128, static: true}}", Policy(autocast="fp16", loss_scale=LossScale(init=128.0, static=True))),
        ("fp32_modules: [{path: 0}]", Policy(fp32_modules=(Fp32Rule(path="0"),))),
    ],
)  # fmt: skip
def test_common_spellings_are_read_as_they_are_meant(text: str, meant: Policy) -> None:
    policy = read_as(text).policy
    assert (policy, repr(policy)) == (meant, repr(meant))


@pytest.mark.parametrize(
    ("text", "key", "meant"),
    [
        ("name: 1.10", "name", "1.10"),
        ("valid_for: {torch: 2.10, memory: 1, x: true}", "valid_for", {"torch": "2.10", "memory": "1", "x": "true"}),
        ("evidence: {tuned_on: 2026-11-21T05:00:00Z}", "evidence", {"tuned_on": "2026-11-21T05:00:00Z"}),
        ("evidence: {speedup: 2}", "evidence", {"speedup": 2.0}),
        (f"name: '{'[' * 99}'", "name", "[" * 99),
    ],
)  # fmt: skip
def test_text_is_what_stands_in_the_file(text: str, key: str, meant: Any) -> None:
    found = getattr(read_as(text), key)
    assert (found, repr(found)) == (meant, repr(meant))


def test_a_tag_that_names_a_python_object_runs_nothing(tmp_path: Path) -> None:
    trace = tmp_path / "ran"
    message = refused(HEAD + f"name: !!python/object/apply:os.mkdir ['{trace}']\n")
    assert message.startswith("policy.yaml:2:7: ")
    assert not trace.exists()


MULTIPLIED = "\n".join(
    ["a: &a [x, x, x, x, x, x, x, x, x]"]
    + [f"{c}: &{c} [{', '.join(['*' + chr(ord(c) - 1)] * 9)}]" for c in "bcdefghij"]
)
LONG = f"{HEAD}evidence:\n  parity:\n    a: &a {'x' * 100_000}\n    b: [{', '.join(['*a'] * 900)}]\n"


@pytest.mark.parametrize("text", [MULTIPLIED, LONG, "a: &a [*a]"])
def test_aliases_that_multiply_are_refused_quickly(text: str) -> None:
    assert "aliases" in refused(text)


@pytest.mark.parametrize("loader", [yaml_text._BaseLoader, yaml.SafeLoader])  # libyaml, if it is there; PyYAML's own
@pytest.mark.parametrize(
    "text", ["[" * 5000, "- " * 5000, "{a: " * 5000, "\n".join(" " * n + "a:" for n in range(99)), "é: " + "[{" * 2000]
)
def test_nesting_without_end_is_refused(text: str, loader: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a limit of amptune, or by one of PyYAML where its scanner runs ahead."""
    monkeypatch.setattr(yaml_text, "_BaseLoader", loader)
    assert "nest" in refused(text)


@settings(max_examples=300, deadline=None)
@example("\ud800")
@given(st.text() | st.text(alphabet=" \t\n:-[]{}*&!|>'\"#,?%@`a1.~<", max_size=60))
def test_arbitrary_text_raises_nothing_but_a_file_format_error(text: str) -> None:
    assert refused(text).startswith("policy.yaml")


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


def test_an_interruption_while_a_validator_is_built_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(_: type) -> None:
        raise pydantic_core.SchemaError('Error building "literal" validator:\n  KeyboardInterrupt: ')

    monkeypatch.setattr(pydantic, "TypeAdapter", build)
    with pytest.raises(KeyboardInterrupt):
        adapter_for.__wrapped__(Policy)
