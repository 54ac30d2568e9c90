"""The programs under reports/: each says how it is called, and the tables that claims rest on are computed rightly."""

from __future__ import annotations

import math
import runpy
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parent.parent / "reports"))  # programs, no package

import foreign_table
import unruly_table
from json_lines import append

from amptune.policy.serialization import policy_to_dict
from amptune.policy.settings import Policy

REPOSITORY = Path(__file__).resolve().parent.parent
REPORTS = REPOSITORY / "reports"
PROGRAMS = [path for path in sorted(REPORTS.glob("*.py")) if "argparse.ArgumentParser" in path.read_text()]
BF16 = policy_to_dict(Policy(autocast="bf16"))


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


# --- the table of models of libraries ------------------------------------------------------------------------------


def launch_row(names: Sequence[str], ms: Sequence[float], **more: object) -> foreign_table.Line:
    return {"what": "launch", "names": list(names), "policy": None, "failure": None, "ms": list(ms), **more}


def evidence_of(path: Path, budget_s: float, times: Sequence[dict[str, float]]) -> foreign_table.Evidence:
    """A model's file with a launch for each of the times; one of infinity crashed."""
    append(path, {"what": "amptune", "budget_s": budget_s, "seconds": 100.0, "course": [], "policy": BF16})
    for launch, ms in enumerate(times):
        for name, value in ms.items():
            row = launch_row([name], [value, value], budget_s=budget_s, launch=launch)
            append(path, {**row, "failure": "it crashed", "ms": []} if math.isinf(value) else row)
    return foreign_table.Evidence(path)


@pytest.mark.parametrize(
    ("over", "times", "value"),
    [
        ("stock", [{"stock": 2.0, "amptune": ms} for ms in (1.0, 1.0, 4.0)], 2.0),  # the launches' median
        ("pytorch-autotune", [{"amptune": 1.0, "pytorch-autotune": 2.0, "its own step": 1.5}] * 3, 1.5),  # its faster
        ("stock", [{"stock": 2.0, "amptune": 1.0}, {"stock": 2.0, "amptune": math.inf}], None),  # it failed once
        ("grid", [{"stock": 2.0, "amptune": 1.0}], None),
    ],
)
def test_the_speed_over_a_contender(tmp_path: Path, over: str, times: list[dict[str, float]], value: float) -> None:
    ratio = foreign_table.speed_over(evidence_of(tmp_path / "swin_t.jsonl", 60.0, times), 60.0, over)
    assert (ratio and ratio.value) == pytest.approx(value)


def test_a_model_misses_a_figure_only_with_its_whole_interval(tmp_path: Path) -> None:
    figure = foreign_table.Figure(budget_s=120.0, over="pytorch-autotune", each=0.97, mean=1.2)
    slow = [{"amptune": 1.1 + 0.001 * i, "pytorch-autotune": 1.0, "its own step": 2.0} for i in range(3)]
    wide = [{"amptune": ms, "pytorch-autotune": 1.0} for ms in (0.9, 1.1, 1.3)]
    evidences = [
        evidence_of(tmp_path / "swin_t.jsonl", 120.0, slow),
        evidence_of(tmp_path / "r3d_18.jsonl", 120.0, wide),
    ]
    told = foreign_table.verdict(figure, evidences)
    assert "missed: swin_t 0.908 [0.906, 0.910]; undecided: r3d_18 0.909" in told
    assert "2 of 8" in told
    assert "geometric mean ≥ 1.200: missed" in told


def test_one_launch_misses_nothing_and_a_policy_that_failed_is_no_answer(tmp_path: Path) -> None:
    slower = evidence_of(tmp_path / "swin_t.jsonl", 60.0, [{"stock": 1.0, "amptune": 2.0}])
    faster = evidence_of(tmp_path / "r3d_18.jsonl", 60.0, [{"stock": 2.0, "amptune": 1.0}])
    failed = evidence_of(tmp_path / "t5_base.jsonl", 60.0, [{"stock": 2.0, "amptune": math.inf}])
    figure = foreign_table.FIGURES[0]
    assert foreign_table.verdict(figure, [slower, faster]).endswith("each ≥ 1.000: undecided: swin_t 0.500")
    assert foreign_table.verdict(figure, [faster]).endswith("each ≥ 1.000: met")
    assert "missed: t5_base without an answer" in foreign_table.verdict(figure, [failed])


def test_the_table_has_a_row_for_each_model_and_a_line_for_each_figure(tmp_path: Path) -> None:
    times = [{"stock": 4.0, "amp bf16": 2.0, "amptune": 1.0}] * 2
    text = foreign_table.table([evidence_of(tmp_path / "swin_t.jsonl", 60.0, times)])
    assert "| swin_t | 4.000 | 2.000 | - | - | - | - | 1.000 | 4.000 [4.000, 4.000] | 2.000 [2.000, 2.000] |" in text
    assert text.count("\n- ") >= len(foreign_table.FIGURES) - 1


def test_a_policy_slower_than_stock_and_one_that_fails_are_named(tmp_path: Path) -> None:
    path = tmp_path / "early_exit.jsonl"
    told = {"what": "amptune", "budget_s": 60.0, "seconds": 62.0, "course": [], "policy": BF16}
    rows = [
        launch_row(["stock", "amptune 4"], [10.0, 10.0]),
        launch_row(["amptune"], [9.0, 9.0]),
        launch_row(["amptune 2"], [10.0, 10.5]),  # the median block is as fast as stock's, the mean is not
        {**launch_row(["amptune 3"], []), "failure": "it crashed"},
    ]
    for line in (*({**told, "tuning": tuning} for tuning in range(4)), *rows):
        append(
            path, {"budget_s": 60.0, "launch": 0, "block_steps": 50, "steps": [50] * len(line.get("ms", ())), **line}
        )
    evidence = foreign_table.Evidence(path)
    assert unruly_table.is_unruly(evidence)
    *_, count, slower, failed, without = unruly_table.unruly_table([evidence]).splitlines()
    assert count == "- 4 tunings of 1 models, of which 3 can be compared"
    assert slower.startswith("- slower than stock by more than 2%: early_exit, 60 s, amptune 2 0.976 [")
    assert "amptune 3" not in slower
    assert failed == "- failed in the plain loop: early_exit, 60 s, amptune 3"
    assert without.endswith("none")


README = " ".join((REPOSITORY / "README.md").read_text().split())
IN_README = {
    "ConvNeXt-T": "convnext_tiny", "EfficientNetV2-S": "efficientnet_v2_s", "RegNetY-3.2GF": "regnet_y_3_2gf",
    "ViT-S/16": "vit_small_patch16_224", "Swin-T": "swin_t", "T5-base": "t5_base", "R3D-18": "r3d_18",
    "Llama 150M": "llama_150m",
}  # fmt: skip


def test_the_readmes_table_has_the_step_times_of_models_that_amptune_was_not_developed_with() -> None:
    ratios: dict[str, list[float]] = {"recipe": [], "pytorch-autotune": []}
    for name, model in IN_README.items():
        evidence = foreign_table.Evidence(REPORTS / "h100" / "foreign" / f"{model}.jsonl")
        shown = [float(cell.strip(" *")) for cell in README.partition(f"| {name},")[2].split("|")[1:5]]
        launches = foreign_table.times_of(evidence, 120.0)
        times = {arm: statistics.geometric_mean(ms.values()) for arm, ms in launches.items()}
        recipe = min(times["amp bf16"], times["amp fp16"])
        autotune = min(times["pytorch-autotune"], times["its own step"])
        assert shown == [float(f"{ms:.3g}") for ms in (times["stock"], recipe, autotune, times["amptune"])]
        for over, found in ratios.items():
            ratio = foreign_table.speed_over(evidence, 120.0, over)
            assert ratio is not None
            found.append(ratio.value)
    over_recipe, over_autotune = (f"{statistics.geometric_mean(found):.1f} times" for found in ratios.values())
    assert f"is {over_recipe} as fast as the AMP recipe and {over_autotune} as fast as pytorch-autotune" in README
