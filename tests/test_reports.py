"""The programs under reports/ say how they are called, and the README's table is what the evidence says."""

from __future__ import annotations

import runpy
import statistics
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "reports"))  # programs, no package

import unseen_table

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


README = " ".join((REPOSITORY / "README.md").read_text().split())
IN_README = {
    "ConvNeXt-T": "convnext_tiny", "EfficientNetV2-S": "efficientnet_v2_s", "RegNetY-3.2GF": "regnet_y_3_2gf",
    "ViT-S/16": "vit_small_patch16_224", "Swin-T": "swin_t", "T5-base": "t5_base", "R3D-18": "r3d_18",
    "Llama 150M": "llama_150m",
}  # fmt: skip


def test_the_readmes_table_has_the_step_times_of_models_that_amptune_was_not_developed_with() -> None:
    ratios: dict[str, list[float]] = {"recipe": [], "pytorch-autotune": []}
    for name, model in IN_README.items():
        evidence = unseen_table.Evidence(REPORTS / "h100" / "foreign" / f"{model}.jsonl")
        shown = [float(cell.strip(" *")) for cell in README.partition(f"| {name},")[2].split("|")[1:5]]
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
    assert f"is {over_recipe} as fast as the AMP recipe and {over_autotune} as fast as pytorch-autotune" in README
