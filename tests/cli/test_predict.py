"""`amptune predict`: its table, its JSON, its errors; it writes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import WORKLOADS, Machine, run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(WORKLOADS)
    return tmp_path


def test_a_prediction_is_marked_as_one_and_writes_nothing(folder: Path) -> None:
    before = sorted(folder.rglob("*.yaml"))
    done = run("predict", "train.py:small", "--gpu", "V100,1080ti", folder=folder, evaluator=Machine())
    assert done.returncode == 0
    assert done.stdout.startswith("Predicted, not measured: small, batch 16")
    assert "GTX-1080-Ti: no tensor cores" in done.stdout
    assert done.stdout.count("no bf16") == done.stdout.count("all: no bf16") == 1, "what several lack is told once"
    assert "the script prints" not in done.stdout
    assert sorted(folder.rglob("*.yaml")) == before


def test_all_gpus_come_as_one_object(folder: Path) -> None:
    line = ("predict", "train.py:small", "--gpu", "all", "--batch-size", "64", "--measured", "V100=2", "--json")
    data = json.loads(run(*line, folder=folder, evaluator=Machine()).stdout)
    assert (data["schema"], data["note"], data["batch_size"]) == ("amptune.predict/1", "predicted, not measured", 64)
    assert data["measured"] == {"gpu": "V100", "speed_up": 2.0}
    assert {one["note"] for one in data["predictions"]} == {"predicted, not measured"}
    assert {"T4", "B200", "RTX-4090"} <= {one["gpu"] for one in data["predictions"]}
    for one in data["predictions"]:
        assert one["half"]["low"] < one["half"]["middle"] < one["half"]["high"]
        assert one["half"]["verdict"] in ("pays", "unclear", "does not")
        assert one["channels_last"] is None  # no convolutions
        assert 0 < one["largest_batch"]["fp32"] < one["largest_batch"]["half"]
    assert {row["module"] for row in data["operations"]} >= {"0", "2", None}


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (("train.py:small", "--gpu", "V1000"), 2, "the table has no GPU 'V1000'; did you mean V100"),
        (("train.py:small", "--gpu", "V100", "--measured", "V100=none"), 2, "'none' is no speed-up"),
        (("train.py:nothing", "--gpu", "V100"), 2, "train.py has no nothing"),
        (("train.py:raises", "--gpu", "V100"), 1, "labels out of range"),
        (("train.py:small",), 2, "Missing option '--gpu'"),
    ],
)
def test_what_is_wrong_is_said_with_its_exit_code(folder: Path, line: tuple[str, ...], code: int, message: str) -> None:
    done = run("predict", *line, folder=folder, evaluator=Machine())
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr
