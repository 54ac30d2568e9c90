"""The evidence that stands in the repository: readable, and saying what the README says of it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parent.parent / "reports"))  # programs, no package

from stored import former_ratio

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


@pytest.mark.slow
def test_the_table_is_printed_from_the_reports() -> None:
    command = [sys.executable, "reports/compare.py", "--out", str(H200), "--table"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert all(path.stem in done.stdout for path in REPORTS)


TRUST = H200 / "trust"


def trust_rows(part: str) -> list[dict[str, Any]]:
    path = TRUST / f"{part}.json"
    return list(loaded(path)["rows"]) if path.exists() else []


@pytest.mark.parametrize("row", trust_rows("aa"), ids=lambda row: f"{row['workload']}-{row['started']}")
def test_a_comparison_of_a_policy_with_itself_can_be_computed_again(row: dict[str, Any]) -> None:
    medians = {policy_from_dict(c["policy"]): c["median_ms"] for c in row["comparison"]["contenders"]}
    spelled_out = {replace(policy, batch_size=None): policy for policy in medians if policy.batch_size}
    for pair in row["pairs"]:
        (first,) = [policy for policy in medians if str(policy) == pair["policy"]]
        second = spelled_out[first]
        launches = zip(medians[first], medians[second], strict=True)
        # One that was beaten by another policy has fewer rounds than its double.
        pairs = [[a / b for a, b in zip(*launch, strict=False)] for launch in launches]
        ratio = former_ratio([launch for launch in pairs if launch])
        # The medians are rounded, which a wide interval of few blocks makes more of.
        assert [ratio.value, ratio.low, ratio.high] == pytest.approx(pair["ratio"], abs=1e-3)
        assert ratio.launches == pair["launches"]


@pytest.mark.parametrize("path", sorted(TRUST.glob("*.policy.yaml")), ids=lambda path: path.stem)
def test_a_policy_that_was_tuned_again_is_the_one_its_row_says(path: Path) -> None:
    policies = {f"{row['workload']}-{row['repetition']}": row.get("policy") for row in trust_rows("tunings")}
    found = policies[path.name.removesuffix(".policy.yaml")]
    assert found is not None
    assert policy_from_dict(found) == amptune.load(path).policy


@pytest.mark.slow
def test_the_tables_of_trust_are_printed_from_its_rows() -> None:
    command = [sys.executable, "reports/trust.py", "--out", str(TRUST), "--table"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    for row in [*trust_rows("tunings"), *trust_rows("regret"), *trust_rows("aa")]:
        assert f"| {row['workload']} |" in done.stdout


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
