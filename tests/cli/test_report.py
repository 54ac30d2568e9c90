"""`amptune report` and the objectives: one tuning of a machine that counts no energy, asked all questions."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import Machine, interrupting, run

from amptune.hardware.detect import probe
from amptune.measure.results.outcome import Failure

TUNE = ("tune", "train.py:small", "--budget", "200s")


VERDICT = ("objective", "speedup", "speedup_ci95", "gain", "gain_ci95", "confidence")


def figures_of(answer: dict[str, Any]) -> list[Any]:
    """What an answer says of its policy, to six digits: a stored moment is rounded to a millisecond."""
    found = [answer[name] for name in VERDICT]
    return [pytest.approx(one, rel=1e-6) if isinstance(one, float | list) else one for one in found]


@pytest.mark.parametrize(("objective", "after"), [("throughput", None), ("memory", None), ("throughput", 8)])
def test_tune_and_report_and_the_file_say_the_same(folder: Path, objective: str, after: int | None) -> None:
    machine = Machine() if after is None else Machine(interfere=interrupting(after))
    tuned = run(*TUNE, "--trials", "5", "--objective", objective, "--json", folder=folder, evaluator=machine)
    said = json.loads(tuned.stdout)
    assert (tuned.returncode, said["provisional"]) == ((0, False) if after is None else (130, True))
    answer = json.loads(run("report", "train.py:small", "--json", folder=folder).stdout)
    assert ("interrupted" in [finding["code"] for finding in answer["findings"]]) is (after is not None)
    assert [said[name] for name in VERDICT] == figures_of(answer)
    assert replaced(answer["policy"]) == replaced(said["policy"])
    evidence = yaml.safe_load((folder / "policy.yaml").read_text())["evidence"]
    assert evidence["confidence"] == said["confidence"]
    assert evidence["speedup"] == pytest.approx(said["speedup"], rel=1e-3)
    assert said["confidence"].capitalize() in run("explain", "policy.yaml", folder=folder).stdout


def replaced(policy: dict[str, Any]) -> dict[str, Any]:
    """Without the workload's own batch size, which a policy file names."""
    return {name: value for name, value in policy.items() if name != "batch_size"}


def test_energy_is_refused_where_none_was_reported(folder: Path) -> None:
    energy = ("--objective", "energy")
    run(*TUNE, "--trials", "1", folder=folder, evaluator=Machine())
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


def test_a_study_answers_for_other_objectives_on_a_page_and_is_tuned_for_them(folder: Path) -> None:
    done = run(*TUNE, "--trials", "5", "--report", "tuned.html", folder=folder, evaluator=Machine())
    assert (done.returncode, "report written to tuned.html" in done.stderr) == (0, True)
    memory = ("--objective", "memory", "--least-speed", "0.5")
    done = run("report", ".amptune/train.py-small", *memory, "-o", "page.html", folder=folder)
    assert done.stdout.startswith("wrote page.html: ")
    assert headings_of(folder / "page.html") == headings_of(folder / "tuned.html") == SECTIONS
    done = run("report", ".amptune/train.py-small", *memory, folder=folder)
    assert done.stdout.splitlines()[0].endswith(", for memory")
    assert "best trade-offs of speed and memory" in done.stdout
    assert "--objective memory" in done.stdout.replace("\n", " ")
    unknown = run("report", "train.py:small", "--name", "mine", folder=folder)
    assert (unknown.returncode, "holds no study 'mine', but resnet50-" in unknown.stderr) == (2, True)
    done = run(*TUNE, *memory, "--trials", "1", "--json", folder=folder, evaluator=Machine())
    assert "5 trials remembered" in done.stderr
    answer = json.loads(done.stdout)
    assert (answer["objective"], answer["evidence"]["least_speed"], answer["gain"] >= 1.0) == ("memory", 0.5, True)
    last = json.loads(run("report", "train.py:small", "--json", folder=folder).stdout)
    assert last["least_speed"] == 0.5


def test_a_study_whose_baseline_failed_gets_a_page_and_no_answer(folder: Path) -> None:
    out_of_memory = Machine(interfere=lambda _: Failure(kind="oom", message="no memory"))
    assert run(*TUNE, folder=folder, evaluator=out_of_memory).returncode == 3
    assert run("report", "train.py:small", folder=folder).returncode == 2
    done = run("report", "train.py:small", "-o", "page.html", "--json", folder=folder)
    assert (done.returncode, headings_of(folder / "page.html")) == (0, SECTIONS)
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["output"]) == ("amptune.report/1", "page.html")
    assert "nothing can be held against it" in answer["findings"][0]["message"]
