"""`amptune report` and the objectives: one tuning of a machine that counts no energy, asked all questions."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import WORKLOADS, Machine, interrupting, run

from amptune.hardware.detect import probe
from amptune.measure.results.outcome import Failure

TUNE = ("tune", "train.py:small", "--budget", "200s")


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which train.py:small was tuned, with a page of it."""
    folder: Path = tmp_path_factory.mktemp("tuned")
    (folder / "train.py").write_text(WORKLOADS)
    done = run(*TUNE, "--trials", "5", "--report", "tuned.html", folder=folder, evaluator=Machine())
    assert done.returncode == 0, done.stderr
    assert "report written to tuned.html" in done.stderr
    return folder


@pytest.fixture
def folder(tuned: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(tuned, tmp_path / "copy"))


@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_a_study_answers_for_an_objective_without_measuring(folder: Path, objective: str) -> None:
    done = run("report", ".amptune/train.py-small", "--objective", objective, folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].endswith(f", for {objective}")
    assert "what no policy beats in everything" in done.stdout
    assert f"--objective {objective} --study" in done.stdout.replace("\n", " ")
    unknown = run("report", "train.py:small", "--name", "mine", folder=folder)
    assert (unknown.returncode, "holds no study 'mine', but resnet50-" in unknown.stderr) == (2, True)


VERDICT = ("objective", "speedup", "speedup_ci95", "gain", "gain_ci95", "confidence")


def figures_of(answer: dict[str, Any]) -> list[Any]:
    """What an answer says of its policy, to six digits: a stored moment is rounded to a millisecond."""
    found = [answer[name] for name in VERDICT]
    return [pytest.approx(one, rel=1e-6) if isinstance(one, float | list) else one for one in found]


@pytest.mark.parametrize("objective", ["throughput", "memory"])
def test_tune_and_report_and_the_file_say_the_same(tmp_path: Path, objective: str) -> None:
    (tmp_path / "train.py").write_text(WORKLOADS)
    tuned = run(*TUNE, "--trials", "5", "--objective", objective, "--json", folder=tmp_path, evaluator=Machine())
    said = json.loads(tuned.stdout)
    answer = json.loads(run("report", "train.py:small", "--json", folder=tmp_path).stdout)
    assert [said[name] for name in VERDICT] == figures_of(answer)
    assert replaced(answer["policy"]) == replaced(said["policy"])
    evidence = yaml.safe_load((tmp_path / "policy.yaml").read_text())["evidence"]
    assert evidence["confidence"] == said["confidence"]
    assert evidence["speedup"] == pytest.approx(said["speedup"], rel=1e-3)
    explained = run("explain", "policy.yaml", folder=tmp_path).stdout
    assert evidence["speedup"] == 1 or f"{evidence['speedup']:g} times" in explained
    assert said["confidence"].capitalize() in explained


def replaced(policy: dict[str, Any]) -> dict[str, Any]:
    """Without the workload's own batch size, which a policy file names."""
    return {name: value for name, value in policy.items() if name != "batch_size"}


@pytest.mark.parametrize("after", [3, 12])
def test_the_study_of_an_interrupted_tuning_says_what_its_file_does(tmp_path: Path, after: int) -> None:
    (tmp_path / "train.py").write_text(WORKLOADS)
    interrupted = run(*TUNE, "--json", folder=tmp_path, evaluator=Machine(interfere=interrupting(after)))
    assert interrupted.returncode == 130
    said = json.loads(interrupted.stdout)
    answer = json.loads(run("report", "train.py:small", "--json", folder=tmp_path).stdout)
    assert said["provisional"] is True
    assert "interrupted" in [finding["code"] for finding in answer["findings"]]
    assert [said[name] for name in VERDICT] == figures_of(answer)


def test_energy_is_refused_where_none_was_reported(folder: Path) -> None:
    energy = ("--objective", "energy")
    for done in (
        run("report", "train.py:small", *energy, folder=folder),
        run(*TUNE, *energy, folder=folder, evaluator=Machine()),
        run(*TUNE, *energy, folder=folder, evaluator=Machine(hardware=probe("cpu"))),
    ):
        assert done.returncode == 2, done.stdout
        assert "no energy" in done.stderr
        assert "Traceback" not in done.stderr


SECTIONS = ["The verdict", "The policy", "What each setting buys", "Every trial", "Numerics", "Findings"]


def headings_of(page: Path) -> list[str]:
    return re.findall(r"<h2>(.*?)</h2>", page.read_text())


def test_a_page_is_written_by_the_report_and_by_the_tuning(folder: Path) -> None:
    done = run("report", "train.py:small", "-o", "page.html", "--objective", "memory", folder=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("wrote page.html: ")
    assert headings_of(folder / "page.html") == headings_of(folder / "tuned.html") == SECTIONS


def test_the_same_study_is_tuned_for_memory(folder: Path) -> None:
    memory = ("--objective", "memory", "--least-speed", "0.5")
    done = run(*TUNE, *memory, "--trials", "1", "--json", folder=folder, evaluator=Machine())
    assert done.returncode == 0, done.stderr
    assert re.search("5 trials remembered", done.stderr)
    answer = json.loads(done.stdout)
    assert answer["objective"] == "memory"
    assert answer["evidence"]["least_speed"] == 0.5
    assert answer["gain"] >= 1.0
    last = run("report", "train.py:small", "--json", folder=folder)
    assert json.loads(last.stdout)["least_speed"] == 0.5


def test_a_study_whose_baseline_failed_gets_a_page_and_no_answer(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(WORKLOADS)
    out_of_memory = Machine(interfere=lambda _: Failure(kind="oom", message="no memory"))
    assert run(*TUNE, folder=tmp_path, evaluator=out_of_memory).returncode == 3
    assert run("report", "train.py:small", folder=tmp_path).returncode == 2
    done = run("report", "train.py:small", "-o", "page.html", folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "nothing can be held against it" in done.stderr
    assert headings_of(tmp_path / "page.html") == SECTIONS
    answer = json.loads(run("report", "train.py:small", "-o", "page.html", "--json", folder=tmp_path).stdout)
    assert (answer["schema"], answer["output"]) == ("amptune.report/1", "page.html")
    assert "nothing can be held against it" in answer["findings"][0]["message"]
