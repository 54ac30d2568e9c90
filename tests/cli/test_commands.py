"""The commands, run as a user runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from amptune.cli.tune import _baseline
from amptune.errors import FileFormatError
from amptune.policy.loading import load

REPOSITORY = Path(__file__).resolve().parents[2]

WORKLOADS = """
import time
import torch
from torch import nn
from amptune import Workload

print("the script prints while it is imported")

def of(**parts):
    given = dict(model=lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8)),
                 batch=lambda n: (torch.randn(n, 64), torch.randint(8, (n,))),
                 loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
                 optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01), batch_size=16, name="small")
    return Workload(**{**given, **parts})

small = of()
not_a_number = of(loss=lambda model, batch: model(batch[0]).mean() * float("nan"))
no_parameters = of(model=nn.ReLU)
no_workload = {"model": 3}

def fails_in_training(model, batch):
    raise ValueError("labels out of range")

raises = of(loss=fails_in_training)

def slow_loss(model, batch):
    time.sleep(0.05)
    return model(batch[0]).mean()

slow = of(loss=slow_loss)

def batch_up_to_64(n):
    if n > 64:
        raise torch.OutOfMemoryError("out of memory")
    return torch.randn(n, 64), torch.randint(8, (n,))

too_large = of(batch=batch_up_to_64, batch_size=512)
endless = of(batch=lambda n: time.sleep(600))
"""


TRAINING = """
import amptune
from train import small

model = small.model()
with amptune.apply("policy.yaml", model) as tuned:
    optimizer = tuned.optimizer(small.optimizer(model))
    with tuned.autocast():
        loss = small.loss(tuned.model, tuned.batch(small.batch(tuned.batch_size)))
    tuned.scaler.scale(loss).backward()
    tuned.scaler.step(optimizer)
    tuned.scaler.update()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(WORKLOADS)
    return tmp_path


def run(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "amptune", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def test_tuning_writes_a_policy_that_trains(folder: Path) -> None:
    done = run("tune", "train.py:small", "--budget", "20s", "--trials", "4", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "policy written to policy.yaml" in done.stdout
    assert_progress_is_told(done.stderr)
    assert "the script prints" not in done.stdout + done.stderr
    assert "the script prints" in next((folder / ".amptune").rglob("workers.log")).read_text()
    assert run("check", "policy.yaml", folder=folder).returncode == 0
    explained = run("explain", "policy.yaml", folder=folder)
    assert "autocast" in explained.stdout
    subprocess.run([sys.executable, "-W", "error", "-c", TRAINING], cwd=folder, check=True)


def assert_progress_is_told(text: str) -> None:
    """In order, each line with the time that is left."""
    lines = re.findall(r"^\[ *(\d+) s left\] +(.*)", text, flags=re.MULTILINE)
    left_s, said = zip(*((int(seconds), words) for seconds, words in lines), strict=True)
    assert left_s[0] <= 20
    assert list(left_s) == sorted(left_s, reverse=True)
    stages = ["small: 18,696 parameters", "numerics of bf16", "search space cpu", "1 *", "search ended", "final"]
    found = [next(place for place, words in enumerate(said) if words.startswith(stage)) for stage in stages]
    assert found == sorted(found)
    assert found[0] == 0


def test_json_is_one_versioned_object_on_stdout(folder: Path) -> None:
    done = run("tune", "train.py:small", "--budget", "15s", "--trials", "2", "--json", folder=folder)
    answer = json.loads(done.stdout)
    assert answer["schema"] == "amptune.tune/1"
    assert answer["policy"]["batch_size"] == 16
    assert answer["findings"][0]["code"] in ("keep", "faster", "provisional")


def test_the_same_command_again_resumes(folder: Path) -> None:
    run("tune", "train.py:small", "--budget", "40s", "--trials", "2", folder=folder)
    again = run("tune", "train.py:small", "--budget", "40s", "--trials", "1", folder=folder)
    assert "2 trials remembered" in again.stderr
    assert "search ended after 1 new trials" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["tune", "nowhere.py:x"], 2, "there is no file nowhere.py"),
        (["tune", "train.py:smal"], 2, "did you mean small"),
        (["tune", "train.py:no_workload"], 2, "of type dict, not an amptune.Workload"),
        (["tune", "train.py:no_parameters"], 2, "nothing to train"),
        (["tune", "train.py:raises"], 1, "the training step raised ValueError: labels out of range"),
        (["tune", "train.py:endless"], 3, "could not be built and run for one step: timeout"),
        (["tune", "train.py:not_a_number"], 3, "nonfinite: the loss is nan at step 1"),
        (["tune", "train.py:small", "--set", "autcast=bf16"], 2, "did you mean autocast"),
        (["tune", "train.py:small", "--set", "autocast=bf15"], 2, "bf16"),
        (["tune", "train.py:small", "--set", "autocast"], 2, "KNOB=VALUE"),
        (["tune", "train.py:small", "--set", "autocast=bf16", "--set", "autocast=off"], 2, "to be bf16 and off"),
        (["tune", "train.py:small", "--budget", "soon"], 2, "is no duration"),
        (["tune", "train.py:small", "--batch-size", "0"], 2, "whole number of at least 1"),
        (["tune", "train.py:small", "--device", "cuda:99"], 2, "cuda:99"),
        (["tune", "train.py:small", "--baseline", "missing.yaml"], 2, "missing.yaml"),
        (["tune", "train.py:small", "-o", "no/such/folder/p.yaml"], 2, "there is no folder"),
        (["check", "missing.yaml"], 2, "missing.yaml"),
        (["explain", "train.py"], 2, "train.py"),
        (["frobnicate"], 2, "No such command"),
    ],
)
def test_mistakes_have_clear_errors_and_codes(folder: Path, arguments: list[str], code: int, words: str) -> None:
    if "missing" not in " ".join(arguments) and arguments[0] == "tune":
        arguments = [*arguments, *([] if "--budget" in arguments else ["--budget", "20s"])]
    done = run(*arguments, folder=folder)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (folder / "policy.yaml").exists()
    assert code != 2 or not list(folder.glob(".amptune/*"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("import sys; sys.exit(0)", "importing quits.py raised SystemExit: 0"),
        ("import argparse; p = argparse.ArgumentParser(); p.add_argument('data'); p.parse_args()", "SystemExit: 2"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    ],
)
def test_a_script_that_quits_while_imported_is_the_users_error(folder: Path, line: str, words: str) -> None:
    (folder / "quits.py").write_text(f"{line}\n{WORKLOADS}")
    done = run("tune", "quits.py:small", "--budget", "20s", folder=folder)
    assert done.returncode == 1
    assert words in done.stderr
    assert "quits.py:1" in done.stderr


def test_a_script_that_changes_the_folder_is_found_by_every_worker(folder: Path) -> None:
    (folder / "moves.py").write_text("import os; os.chdir('/')\n" + WORKLOADS)
    done = run("tune", "moves.py:small", "--budget", "20s", "--trials", "2", "--json", folder=folder)
    assert done.returncode == 0, done.stderr


def test_with_json_an_error_is_an_object_too(folder: Path) -> None:
    done = run("tune", "nowhere.py:x", "--json", folder=folder)
    answer = json.loads(done.stdout)
    assert answer["exit_code"] == done.returncode == 2
    assert answer["findings"][0]["code"] == "target"


def test_an_error_in_the_users_step_names_file_and_line(folder: Path) -> None:
    done = run("tune", "train.py:raises", "--budget", "20s", folder=folder)
    line = WORKLOADS.splitlines().index('    raise ValueError("labels out of range")') + 1
    assert f"train.py:{line}" in done.stderr
    assert "Traceback" in next((folder / ".amptune").rglob("workers.log")).read_text()


def tuning_of_slow(folder: Path, *more: str) -> subprocess.Popen[str]:
    """A tuning run in the background, on a workload slow enough to be stopped in the middle."""
    command = [sys.executable, "-m", "amptune", "tune", "train.py:slow", "--budget", "60s", *more]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_trials(process: subprocess.Popen[str], count: int) -> None:
    assert process.stderr is not None
    while count:
        line = process.stderr.readline()
        assert line, "tuning ended before it was interrupted"
        count -= re.search(r" s left\] +\d+ ", line) is not None


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_writes_the_best_so_far(folder: Path, stop: signal.Signals) -> None:
    with tuning_of_slow(folder) as process:
        wait_for_trials(process, 2)
        process.send_signal(stop)
        stdout, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "provisional policy written to policy.yaml" in stdout
    assert "provisional: true" in (folder / "policy.yaml").read_text()


def test_a_second_interruption_does_not_lose_the_answer(folder: Path) -> None:
    with tuning_of_slow(folder) as process:
        wait_for_trials(process, 2)
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    assert "provisional: true" in (folder / "policy.yaml").read_text()


def test_killing_the_tuner_leaves_no_worker_behind(folder: Path) -> None:
    import psutil

    with tuning_of_slow(folder) as process:
        wait_for_trials(process, 1)
        workers = psutil.Process(process.pid).children(recursive=True)
        assert workers
        process.kill()
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []


def test_a_full_disk_prints_the_policy_instead(folder: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full on this system")
    done = run("tune", "train.py:small", "--budget", "15s", "--trials", "2", "-o", "/dev/full", folder=folder)
    assert done.returncode == 2
    assert "No space left on device" in done.stderr
    assert done.stdout.startswith("schema: amptune.policy/1")


def test_a_policy_of_another_gpu_is_refused(folder: Path) -> None:
    (folder / "h200.yaml").write_text(
        "schema: amptune.policy/1\nautocast: fp16\nvalid_for: {nvidia.com/gpu.product: NVIDIA-H200-OF-TEST}\n"
    )
    done = run("check", "h200.yaml", folder=folder)
    assert done.returncode == 4
    assert "NVIDIA-H200-OF-TEST" in done.stderr


def test_all_mistakes_in_a_file_are_told_at_once(folder: Path) -> None:
    (folder / "bad.yaml").write_text("schema: amptune.policy/1\nautocast: bf15\nbatch_size: few\n")
    done = run("check", "bad.yaml", folder=folder)
    assert done.returncode == 2
    assert "bad.yaml:2:11: autocast: 'bf15' is not one of off, bf16, fp16" in done.stderr
    assert "bad.yaml:3:13:" in done.stderr


def test_the_starter_workload_runs_as_it_stands(folder: Path) -> None:
    assert run("init", "mine.py", folder=folder).returncode == 0
    done = run("tune", "mine.py:workload", "--budget", "15s", "--trials", "2", folder=folder)
    assert done.returncode == 0, done.stderr
    again = run("init", "mine.py", folder=folder)
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_profiles_are_built_and_resolved(folder: Path) -> None:
    for product in ("A", "B"):
        (folder / f"{product}.yaml").write_text(
            f"schema: amptune.policy/1\nname: {product}\nvalid_for: {{nvidia.com/gpu.product: {product}}}\n"
        )
    assert run("profile", "build", "A.yaml", "B.yaml", "-o", "cluster.yaml", folder=folder).returncode == 0
    onto_itself = run("profile", "build", "A.yaml", "B.yaml", "-o", "./A.yaml", folder=folder)
    assert onto_itself.returncode == 2
    assert "A.yaml is one of the policies, and would be overwritten" in onto_itself.stderr
    label = "nvidia.com/gpu.product=B"
    done = run("profile", "resolve", "cluster.yaml", "--label", label, "--json", folder=folder)
    answer = json.loads(done.stdout)
    assert answer["entry"] == 1
    assert "nvidia.com/gpu.product" in str(answer["rejected"])
    assert run("profile", "resolve", "cluster.yaml", folder=folder).returncode == 4


def test_probe_tells_of_this_machine(folder: Path) -> None:
    assert "cores" in run("probe", "--device", "cpu", folder=folder).stdout
    answer = json.loads(run("probe", "--device", "cpu", "--json", folder=folder).stdout)
    assert answer["schema"] == "amptune.probe/1"
    assert answer["device"] == "cpu"


@pytest.mark.parametrize("kind", ["policy", "profile", "space"])
def test_schemas_are_printed(folder: Path, kind: str) -> None:
    assert "$defs" in json.loads(run("schema", kind, folder=folder).stdout)


def test_a_script_without_a_main_guard_tunes_once(folder: Path) -> None:
    script = folder / "tunes.py"
    script.write_text(
        WORKLOADS + "\nimport amptune\nprint('tuning')\n"
        "decision = amptune.tune(small, budget_s=15, trials=2)\nprint('batch size', decision.policy.batch_size)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tuning") == 1
    assert "batch size 16" in done.stdout


def test_help_keeps_its_examples_a_line_each(folder: Path) -> None:
    lines = run("--help", folder=folder).stdout.splitlines()
    assert any(line.strip().startswith("amptune tune ") for line in lines[1:])
    assert not any("\\b" in line or line.endswith("...") for line in lines[1:])


def test_every_command_has_help_and_stands_in_the_readme() -> None:
    from amptune.cli.entry import cli

    readme = (REPOSITORY / "README.md").read_text()
    for name, command in cli.commands.items() or {n: cli.get_command(None, n) for n in cli.list_commands(None)}.items():  # type: ignore[arg-type]
        assert command is not None
        assert command.help
        assert f"`amptune {name}" in readme, f"README lacks amptune {name}"


def test_a_second_tuner_on_the_same_study_is_refused(folder: Path) -> None:
    with tuning_of_slow(folder, "--study", "study") as first:
        wait_for_trials(first, 1)
        second = run("tune", "train.py:slow", "--study", "study", folder=folder)
        first.terminate()
        first.communicate(timeout=30)
    assert second.returncode == 2
    assert "another amptune is tuning in study" in second.stderr


def claiming(folder: Path, speedup: float | None, *, labels: str = "{}") -> None:
    claim = "" if speedup is None else f"evidence:\n  speedup: {speedup}\n"
    (folder / "policy.yaml").write_text(
        f"schema: amptune.policy/1\nautocast: bf16\nbatch_size: 16\nvalid_for: {labels}\n{claim}"
    )


def test_a_claim_that_holds_is_verified_with_both_figures(folder: Path) -> None:
    claiming(folder, 0.0001)
    done = run("verify", "policy.yaml", "train.py:small", "--budget", "20s", "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["schema"] == "amptune.verify/1"
    assert answer["holds"] is True
    assert answer["claimed"]["speedup"] == 0.0001
    assert answer["measured"]["speedup"] > 0.0001
    assert answer["findings"][0]["code"] == "holds"


def test_a_claim_that_does_not_hold_exits_with_1_and_says_so(folder: Path) -> None:
    claiming(folder, 1e9)
    done = run("verify", "policy.yaml", "train.py:small", "--budget", "30s", folder=folder)
    assert done.returncode == 1, done.stderr
    assert "the claim does not hold" in done.stdout
    assert "speed-up" in done.stdout


def test_a_claim_made_on_other_hardware_exits_with_4_before_anything_is_built(folder: Path) -> None:
    claiming(folder, 2.0, labels='{nvidia.com/gpu.product: "NVIDIA-Nothing"}')
    done = run("verify", "policy.yaml", "train.py:endless", folder=folder)
    assert done.returncode == 4
    assert "NVIDIA-Nothing where it was tuned" in done.stderr


def test_a_policy_that_claims_nothing_cannot_be_verified(folder: Path) -> None:
    claiming(folder, None)
    done = run("verify", "policy.yaml", "train.py:small", folder=folder)
    assert done.returncode == 2
    assert "claims nothing" in done.stderr


def test_verifying_for_a_target_that_does_not_exist_exits_with_2(folder: Path) -> None:
    claiming(folder, 2.0)
    done = run("verify", "policy.yaml", "train.py:nothing", "--budget", "20s", folder=folder)
    assert done.returncode == 2
    assert "nothing" in done.stderr


def test_verifying_a_baseline_that_raises_names_the_users_line(folder: Path) -> None:
    claiming(folder, 2.0)
    done = run("verify", "policy.yaml", "train.py:raises", "--budget", "20s", folder=folder)
    assert done.returncode in (1, 3)
    assert "labels out of range" in done.stderr


def test_the_baseline_may_be_an_opt_level_of_apex() -> None:
    assert _baseline("apex:O2") == load("apex:O2").policy
    with pytest.raises(FileFormatError, match="is no opt level of Apex"):
        _baseline("apex:O7")
