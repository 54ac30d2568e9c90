"""The programs under reports/ say how they are called, and the table of results is what the evidence says."""

from __future__ import annotations

import runpy
import statistics
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "reports"))  # programs, no package

import unseen_models
import unseen_table

from amptune.workload.workload import Workload

REPOSITORY = Path(__file__).resolve().parent.parent
REPORTS = REPOSITORY / "reports"
PROGRAMS = [path for path in sorted(REPORTS.glob("*.py")) if "argparse.ArgumentParser" in path.read_text()]


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_says_how_it_is_called(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(path), run_name="__main__")
    assert ended.value.code == 0
    assert f"usage: {path.name}" in capsys.readouterr().out


README, RESULTS = (" ".join((REPOSITORY / page).read_text().split()) for page in ("README.md", "docs/results.md"))
IN_RESULTS = {
    "ConvNeXt-T": "convnext_tiny", "EfficientNetV2-S": "efficientnet_v2_s", "RegNetY-3.2GF": "regnet_y_3_2gf",
    "ViT-S/16": "vit_small_patch16_224", "Swin-T": "swin_t", "T5-base": "t5_base", "R3D-18": "r3d_18",
    "Llama 150M": "llama_150m",
}  # fmt: skip


def test_the_table_of_results_has_the_step_times_of_models_that_amptune_was_not_developed_with() -> None:
    ratios: dict[str, list[float]] = {"recipe": [], "pytorch-autotune": []}
    for name, model in IN_RESULTS.items():
        evidence = unseen_table.Evidence(REPORTS / "h100" / "foreign" / f"{model}.jsonl")
        shown = [float(cell.strip(" *")) for cell in RESULTS.partition(f"| {name},")[2].split("|")[1:5]]
        launches = unseen_table.times_of(evidence, 120.0)
        times = {arm: statistics.geometric_mean(ms.values()) for arm, ms in launches.items()}
        recipe = min(times["amp bf16"], times["amp fp16"])
        autotune = min(times["pytorch-autotune"], times["its own step"])
        assert shown == [float(f"{ms:.3g}") for ms in (times["stock"], recipe, autotune, times["amptune"])]
        for over, found in ratios.items():
            ratio = unseen_table.speed_over(evidence, 120.0, over)
            assert ratio is not None
            found.append(ratio.value)
    over_recipe, over_autotune = (f"{statistics.geometric_mean(found):.1f} times" for found in ratios.values())
    assert f"is {over_recipe} as fast as the AMP recipe and {over_autotune} as fast as pytorch-autotune" in RESULTS
    assert f"is {over_recipe} as fast as the AMP recipe in the geometric mean, and {over_autotune} as fast" in README


def test_the_unseen_models_are_workloads_of_twelve_kinds_whose_libraries_are_imported_when_a_model_is_built() -> None:
    workloads = {name: getattr(unseen_models, name)() for name in unseen_models.MODELS}
    assert len(set(unseen_models.MODELS.values())) == len(workloads) == 12
    assert {name: workload.name for name, workload in workloads.items()} == {name: name for name in workloads}
    assert all(isinstance(one, Workload) for one in workloads.values())
    assert set(unseen_models.WITH_GRID) < set(workloads)


def test_each_budgets_policy_is_held_against_the_faster_of_a_contenders_ways(tmp_path: Path) -> None:
    evidence = unseen_table.Evidence(tmp_path / "video.jsonl")
    for budget_s in (120.0, 60.0):
        evidence.add("amptune", {"budget_s": budget_s, "seconds": budget_s, "policy": {}, "speedup": [2.0, 1.5, 2.5]})
    evidence.add("pytorch-autotune", {"budget_s": 120.0, "seconds": 101.0, "failure": None})
    times = {"stock": 20.0, "its own step": 15.0, "pytorch-autotune": 16.0, "amptune 120": 10.0, "amptune 60": 30.0}
    for name, ms in times.items():
        evidence.add("launch", {"launch": 0, "names": [name], "failure": None, "ms": [ms, ms]})
    evidence.add("launch", {"launch": 0, "names": ["amp bf16"], "failure": "out of memory", "ms": []})
    assert unseen_table.in_words(unseen_table.speed_over(evidence, 120.0, "pytorch-autotune")) == "1.500"
    assert unseen_table.in_words(unseen_table.speed_over(evidence, 60.0, "stock")) == "0.667"
    assert unseen_table.speed_over(evidence, 120.0, "recipe") is None
    shown = unseen_table.table([evidence])
    assert "120 s, over stock, 1 of 12; each ≥ 1.000: met; worst video 2.000; geometric mean 2.000" in shown
    assert "60 s, over pytorch-autotune, 1 of 12; worst video 0.500; geometric mean 0.500 ≥ 1.000: missed" in shown
