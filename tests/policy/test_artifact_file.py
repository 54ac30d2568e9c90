from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amptune.policy.artifact_file import _START, ArtifactFile, _sha256, beside, digest_of, is_artifact_file, kept_in
from amptune.policy.settings import Fp32Rule, Policy, Reason

FILE = ArtifactFile(
    fits={"torch": "2.13.0", "device": "NVIDIA H200"}, graphs=b"\x80\x04graphs\n\n", objects={"ab/c.so": b"\x7fELF"}
)


@given(
    fits=st.dictionaries(st.text(), st.text()),
    graphs=st.binary(),
    objects=st.dictionaries(st.text(), st.binary()),
)
def test_any_file_survives_bytes_and_back(fits: dict[str, str], graphs: bytes, objects: dict[str, bytes]) -> None:
    file = ArtifactFile(fits=fits, graphs=graphs, objects=objects)
    assert ArtifactFile.from_bytes(file.to_bytes()) == file


WHOLE = FILE.to_bytes()


@pytest.mark.parametrize(
    "data", [WHOLE[:-1], WHOLE + b"x", WHOLE.replace(b"H200", b"H100"), WHOLE.replace(b"graphs", b"grafts")]
)
def test_a_file_that_was_cut_or_edited_in_its_head_or_its_content_is_damaged(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^is damaged$"):
        ArtifactFile.from_bytes(data)


@pytest.mark.parametrize(
    "wrong", [None, 3, [], ["ab"], "text", {"a": None}, {"a": -1}, {"a": 10**9}, {"a": True}, {"a": [1]}]
)
@pytest.mark.parametrize("name", ["fits", "sizes"])
def test_a_forged_head_is_damaged_though_it_has_the_right_digest(name: str, wrong: Any) -> None:
    head, content = {"fits": {}, "sizes": {}, name: wrong}, b"graphs"
    digest = _sha256(head["fits"], head["sizes"], content)
    first = json.dumps({"schema": "amptune.artifacts/1", "sha256": digest, **head}).encode()
    for data in (first + b"\n" + content, _START + b", 1: " + b"[" * 100_000 + b"\n"):
        with pytest.raises(ValueError, match=r"^is damaged$"):
            ArtifactFile.from_bytes(data)


@pytest.mark.parametrize("data", [b"", b"\n", b"schema: amptune.policy/1\n", b"\x80\x04."])
def test_another_file_is_none_of_amptune_s(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^is no file of amptune's artifacts$"):
        ArtifactFile.from_bytes(data)
    path = beside(tmp_path / "policy.yaml")
    assert path.name == "policy.yaml.artifacts"
    assert not is_artifact_file(path)
    path.write_bytes(data)
    assert not is_artifact_file(path)
    path.write_bytes(FILE.to_bytes()[:-1])
    assert is_artifact_file(path)


def test_reasons_and_batch_sizes_leave_the_digest_and_a_batch_size_has_a_file_of_its_own() -> None:
    plain = Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="0"),))
    told = replace(plain, fp32_modules=(Fp32Rule(path="0", reason=Reason(saves_ms=0.4)),))
    assert digest_of(plain) == digest_of(told) == digest_of(replace(plain, batch_size=64, accumulate=2))
    assert len({digest_of(one) for one in (plain, Policy(), Policy(autocast="bf16"), Policy(compile="default"))}) == 4
    assert kept_in(Path(), plain) == kept_in(Path(), told) != kept_in(Path(), replace(plain, batch_size=64))
