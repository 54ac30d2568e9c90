"""The evidence that stands in the repository: readable, and saying what the README says of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import amptune
from amptune.measure.results.outcome import Measurement, outcome_from_dict
from amptune.policy.serialization import policy_from_dict

REPOSITORY = Path(__file__).resolve().parent.parent
H200 = REPOSITORY / "reports" / "h200"
REPORTS = sorted(H200.glob("*.json"))
NUMERICS = REPOSITORY / "reports" / "numerics"


def loaded(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text())
    return data


def contender(report: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [entry for entry in report["contenders"] if entry["name"] == name]
    return dict(found)


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_report_keeps_every_raw_sample(path: Path) -> None:
    report = loaded(path)
    for row in [*report["trials"], *report["grid"], *(row for final in report["finals"] for row in final)]:
        policy_from_dict(row["policy"])
        data = {name: value for name, value in row.items() if name not in ("policy", "seconds")}
        outcome = outcome_from_dict(data)
        assert not isinstance(outcome, Measurement) or outcome.step_ms


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_the_tuned_policy_is_never_slower_than_stock(path: Path) -> None:
    report = loaded(path)
    assert contender(report, "tuned")["step_ms"] <= 1.01 * contender(report, "stock")["step_ms"]


def test_the_single_convolution_ends_without_autocast() -> None:
    policy = policy_from_dict(contender(loaded(H200 / "conv1.json"), "tuned")["policy"])
    assert policy.autocast == "off" or policy.fp32_modules


def test_vgg16_does_not_end_in_contiguous_half_precision() -> None:
    policy = policy_from_dict(contender(loaded(H200 / "vgg16.json"), "tuned")["policy"])
    assert policy.autocast == "off" or policy.memory_format == "channels_last"


POLICIES = [*H200.glob("*.policy.yaml"), *(NUMERICS / "h200").glob("*.policy.yaml")]


@pytest.mark.parametrize("path", sorted(POLICIES), ids=lambda path: f"{path.parent.parent.name}-{path.stem}")
def test_the_policies_of_the_report_load(path: Path) -> None:
    assert amptune.load(path).valid_for["nvidia.com/gpu.product"] == "NVIDIA-H200"


def holds(module: str, path: str) -> bool:
    """Returns whether this module is the one at `path` or holds it."""
    return f"{path}.".startswith(f"{module}.")


@pytest.mark.parametrize("device", ["cpu", "h200"])
def test_every_planted_fault_was_rejected_named_first_and_cured(device: str) -> None:
    rows = loaded(NUMERICS / f"{device}.json")["faults"]
    broken = [row for row in rows if row["breaks"]]
    assert len(broken) == 42
    for row in broken:
        assert row["rejected"]
        assert any(holds(row["named_first"], path) for path in row["planted"])
        assert all(any(holds(one, path) for one in row["cure"]) for path in row["planted"])
        assert len(row["cure"]) <= len(row["planted"]) + 1
    assert not any(row["rejected"] for row in rows if not row["breaks"])


def test_of_the_healthy_models_hardly_any_was_rejected() -> None:
    rows = loaded(NUMERICS / "cpu.json")["healthy"] + loaded(NUMERICS / "h200.json")["healthy"]
    assert len(rows) >= 120
    assert sum(row["rejected"] for row in rows) <= len(rows) / 80
