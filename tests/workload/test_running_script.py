"""Scripts as people have them, in `scripts/`, run unchanged: their loops are the steps that a bench measures."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from amptune.runtime.script.script_training import samples_in

SCRIPTS = Path(__file__).with_name("scripts")
ROOT = Path(__file__).resolve().parents[2]
NEEDS = {"trainer": "transformers", "fabric": "lightning"}

# Runs in a process of its own, as a worker does: what a script has set, nobody takes back.
MEASURE = """
import json, sys, torch
from dataclasses import replace
from pathlib import Path
from amptune.measure.bench.bench import Bench
from amptune.measure.results.outcome import Effort, Failure
from amptune.policy.settings import Policy
from amptune.workload.running_script import workload_of_script
torch.set_num_threads(1)
script, policies, *arguments = sys.argv[1:]
workload = workload_of_script(Path(script), arguments)
bench = Bench(workload, torch.device("cpu"))
rows = []
for settings in json.loads(policies):
    effort = Effort(warmup_s=0.0, measure_s=0.0, settle_s=0.0, min_steps=3, batches=2)
    found = bench.measure(Policy(**settings), effort)
    failure = f"{found.kind}: {found.message}" if isinstance(found, Failure) else None
    rows.append({"failure": failure, "losses": None if failure else list(found.losses)[:3]})
told = {"summary": workload.summary, "as_is": str(workload.as_is), "size": workload.batch_size, "rows": rows}
print("FOUND", json.dumps(told))
"""

ALL: list[dict[str, Any]] = [
    {},
    {"autocast": "bf16"},
    {"autocast": "bf16", "fused_optimizer": True, "memory_format": "channels_last"},
    {"autocast": "fp16"},
    {},
]


def run(*command: str, folder: Path, limit_s: float = 240) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    if (folder / "temporary").is_dir():
        environment["TMPDIR"] = str(folder / "temporary")
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s
    )


def measured(name: str, policies: list[dict[str, Any]], folder: Path, *arguments: str) -> dict[str, Any]:
    if name in NEEDS and importlib.util.find_spec(NEEDS[name]) is None:
        pytest.skip(f"needs {NEEDS[name]}")
    path = SCRIPTS / f"{name}.py" if (SCRIPTS / f"{name}.py").exists() else folder / f"{name}.py"
    done = run("-c", MEASURE, str(path), json.dumps(policies), *arguments, folder=folder)
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert found, done.stderr[-2000:]
    told: dict[str, Any] = json.loads(found[0].removeprefix("FOUND "))
    return told


@pytest.mark.parametrize(
    ("name", "arguments", "summary", "as_is", "size"),
    [
        ("classifier", [], r"Sequential, 0.00158 M parameters, SGD, 1 pass a step, 16 samples", "stock PyTorch", 16),
        ("gpt", [], r"GPT, .*AdamW, 2 passes a step, 8 rows; bf16, tf32", "bf16, tf32 for FP32", 8),
        (
            "gpt",
            ["--dtype", "float16", "--compile"],
            r"a loss scaler of its own",
            "fp16, tf32 for FP32, compile default",
            8,
        ),
        ("actor_critic", [], r"Sequential and Linear, .*Adam, 15 passes a step", "stock PyTorch", 1),
        ("word_lstm", [], r"Model, .*SGD, 1 pass a step", "stock PyTorch", 12),
        ("checkpointing", [], r"Net, .*SGD, 1 pass a step, 32 rows", "stock PyTorch", 32),
        ("checkpointing", ["reentrant"], r"Net, .*SGD, 1 pass a step, 32 rows", "stock PyTorch", 32),
        ("trainer", [], r"GPT2LMHeadModel, .*2 passes a step, 2 batches a step, 8 samples", "stock PyTorch", 8),
    ],
)
def test_what_a_script_trains_is_found_and_each_policy_costs_itself_alone(
    name: str, arguments: list[str], summary: str, as_is: str, size: int, tmp_path: Path
) -> None:
    """The script goes on after policies that raise in it; of two trainings by one policy both are the same."""
    found = measured(name, ALL, tmp_path, *arguments)
    assert re.search(summary, found["summary"])
    assert (found["as_is"], found["size"]) == (as_is, size)
    first, *others, last = found["rows"]
    assert (first["failure"], last["failure"]) == (None, None)
    if name in ("classifier", "actor_critic"):  # others draw their batches by themselves, or ahead
        assert first == last
    allowed = {"word_lstm": "LSTM"}.get(name)  # of which the CPU has no kernel in fp16
    assert [one["failure"] for one in others if one["failure"] and not (allowed and allowed in one["failure"])] == []


CURVES = """
import sys, torch
from pathlib import Path
from amptune.measure.bench.bench import Bench
from amptune.measure.numerics.short_training import Training
from amptune.policy.settings import Policy
from amptune.workload.running_script import workload_of_script
bench = Bench(workload_of_script(Path(sys.argv[1]), []), torch.device("cpu"))
curves = []
for autocast in ("off", "fp16"):
    with Training.on(bench, Policy(autocast=autocast)) as training:
        curves.append((abs(training.gradients(2).sketches).max(), torch.tensor(training.curve(range(6)).losses)))
(size, losses), (size_fp16, losses_fp16) = curves
same = bool(torch.allclose(losses, losses_fp16, rtol=0.01))
print("SAME", same, round(float(size_fp16 / size), 1), float(losses[0]) < 3)  # of ten classes, once
"""


def test_the_gate_sees_a_scripts_losses_once_and_its_gradients_without_the_scale(tmp_path: Path) -> None:
    """It draws under a mode for torch functions, by which PyTorch calls what stands in place of its methods twice."""
    done = run("-c", CURVES, str(SCRIPTS / "classifier.py"), folder=tmp_path)
    assert "SAME True 1.0 True" in done.stdout, done.stderr[-2000:] + done.stdout


GO_ON = """
import sys, torch
from pathlib import Path
from amptune.errors import ScriptEndedError
from amptune.measure.bench.bench import Bench
from amptune.policy.settings import STOCK
from amptune.workload.running_script import workload_of_script
workload = workload_of_script(Path(sys.argv[1]), [], Path(sys.argv[2]))
with Bench(workload, torch.device("cpu")).on_device(STOCK) as (_, stepper):
    try:
        for _ in range(40):
            stepper()
        print("WENT ON", workload.ended_epochs())
    except ScriptEndedError as error:
        print("ENDED", error)
"""


def test_epochs_go_on_while_steps_are_measured_unless_the_script_breaks_by_that(tmp_path: Path) -> None:
    """A process that breaks tells those after it."""
    script = str(SCRIPTS / "own_epochs.py")
    first, second = (run("-c", GO_ON, script, str(tmp_path), folder=tmp_path) for _ in range(2))
    assert "ENDED own_epochs.py raised in an epoch longer than its loader: division by zero" in first.stdout
    assert re.search("WENT ON [45]", second.stdout), second.stderr[-2000:]
    assert "correct" in second.stdout
    (tmp_path / "other").mkdir()
    unbroken = run("-c", GO_ON, str(SCRIPTS / "classifier.py"), str(tmp_path / "other"), folder=tmp_path)
    assert "WENT ON 0" in unbroken.stdout, unbroken.stderr[-2000:]


EVALUATES = """
import torch
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
loader = DataLoader(data, 8, shuffle=True)
net = torch.nn.Linear(8, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
@torch.no_grad()
def evaluate(batches):
    print("EVALUATED", sum(float(net(x).square().mean()) for x, _ in batches))
while True:
    for step, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        if step % 5 == 4:
            evaluate(loader)
            evaluate(DataLoader(data, 8, shuffle=True))
"""


def test_batches_that_are_drawn_without_gradients_are_trainings_too(tmp_path: Path) -> None:
    text = (
        EVALUATES.partition("while True:")[0]
        + """
batches = iter(loader)
@torch.no_grad()
def drawn():
    global batches
    try:
        return next(batches)
    except StopIteration:
        batches = iter(loader)
        return next(batches)
while True:
    x, y = drawn()
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
"""
    )
    (tmp_path / "train.py").write_text(text)
    done = run("-c", GO_ON, "train.py", str(tmp_path), folder=tmp_path, limit_s=60)
    assert "WENT ON 0" in done.stdout, done.stderr[-2000:]


def test_evaluation_on_the_data_of_training_has_one_batch_and_ends(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(EVALUATES)
    done = run("-c", GO_ON, "train.py", str(tmp_path), folder=tmp_path, limit_s=60)
    assert "WENT ON 0" in done.stdout, done.stderr[-2000:]
    assert done.stdout.count("EVALUATED") >= 2 * 40 // 5


WRITES_ELSEWHERE = """
import pathlib, sys, threading, torch
from torch.utils.data import DataLoader, Dataset
class Cached(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, at):
        pathlib.Path("cache").write_text(str(at))
        return torch.ones(4)
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
while True:
    for x in DataLoader(Cached(), 4):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
        thread = threading.Thread(target=torch.save, args=(net.state_dict(), "checkpoint"))
        thread.start()
        thread.join()
"""


def test_what_datasets_and_threads_write_is_kept_apart_and_nothing_is_left_behind(tmp_path: Path) -> None:
    """Workers are killed at the end of a command."""
    for name in ("cache", "checkpoint"):
        (tmp_path / name).write_text("of the user")
    (tmp_path / "apart.py").write_text(WRITES_ELSEWHERE)
    (tmp_path / "temporary").mkdir()
    done = run("-m", "amptune", "tune", "apart.py", "--budget", "15s", "--device", "cpu", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / name).read_text() for name in ("cache", "checkpoint")] == ["of the user"] * 2
    left = [one.name for one in (tmp_path / "temporary").iterdir() if "script" in one.name]
    assert left == []


TAKES_APART = """
import torch
from torch.utils.data import DataLoader
data = [{"x": torch.full((4,), float(n)), "y": torch.tensor(n % 2)} for n in range(32)]
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
list(DataLoader(data, 8))  # a look at the data, before training
while True:
    for batch in DataLoader(data, 8):
        targets = batch.pop("y")
        x = batch["x"].add_(1.0)
        print("MEAN", float(x.mean()))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), targets).backward()
        optimizer.step()
"""


def test_a_script_may_take_its_batches_apart_and_write_to_them(tmp_path: Path) -> None:
    (tmp_path / "apart.py").write_text(TAKES_APART)
    done = run("-c", MEASURE, "apart.py", "[{}, {}]", folder=tmp_path)
    means = {float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("MEAN")}
    assert means == {4.5, 12.5, 20.5, 28.5}, done.stderr[-800:]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "summary"),
    [
        ("segmentation", r"UNet, .*RMSprop, .*fp16, channels_last today, a loss scaler of its own"),
        ("deep_q", r"^Q, .*AdamW, 1 pass a step, 32 rows; stock"),
        ("fabric", r"^Sequential, .*2 batches a step, 32 samples; bf16 today"),
        ("lbfgs", r"^Sequential, .*LBFGS, 5 passes a step"),
        ("siamese", r"^Sequential and Linear, .*2 passes a step, 32 samples"),
        ("own_scaler", r"2 batches a step, 32 samples; fp16 today, a loss scaler of its own"),
        ("two_optimizers", r"^Sequential, .*SGD and Adam, .*compile default today"),
    ],
)
def test_other_loops_are_found_and_timed_and_trained_under_a_policy(name: str, summary: str, tmp_path: Path) -> None:
    found = measured(name, ALL[:3] + ALL[-1:], tmp_path)
    assert re.search(summary, found["summary"])
    assert [one["failure"] for one in found["rows"]] == [None] * 4
    head = "schema: amptune.policy/1\nfp32_math: stock\nmemory_format: contiguous\ncudnn_benchmark: false\n"
    (tmp_path / "policy.yaml").write_text(f"{head}autocast: bf16\n")
    command = ["-m", "amptune", "run", "policy.yaml", str(SCRIPTS / f"{name}.py")]
    try:
        said = run(*command, folder=tmp_path, limit_s=20).stderr
    except subprocess.TimeoutExpired as ended:  # some go on for long
        said = (ended.stderr or b"").decode()
    assert "amptune: bf16 around " in said
    assert "Traceback" not in said


OWN_AUTOCAST = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
    def forward(self, x):
        y = self.linear(x)
        with torch.autocast("cpu", enabled=False):
            assert self.linear(x.float()).dtype is torch.float32, "what a model keeps out of autocast stays out"
        print("SEEN", y.dtype)
        return y
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
while True:
    with torch.autocast("cpu", dtype=torch.float16 if FP16 else torch.bfloat16):
        output = net(torch.ones(2, 4))
    print("RETURNED", output.dtype)
    optimizer.zero_grad()
    output.float().sum().backward()
    optimizer.step()
"""


def test_a_model_with_autocast_of_its_own_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_AUTOCAST.replace("FP16", "False").replace('print("SEEN", y.dtype)', "pass"))
    rows = measured("own", [{"compile": "default"}, {"compile": "default", "autocast": "bf16"}, {}], tmp_path)["rows"]
    assert [one["failure"] for one in rows if "C++" not in str(one["failure"])] == [None] * 3


@pytest.mark.parametrize(("policy", "within"), [({}, "float32"), ({"autocast": "bf16"}, "bfloat16")])
def test_a_policy_replaces_the_autocast_of_the_script_and_outputs_are_fp32(
    policy: dict[str, Any], within: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(OWN_AUTOCAST.replace("FP16", "False"))
    done = run("-c", MEASURE, "own.py", json.dumps([policy]), folder=tmp_path)
    lines = done.stdout.splitlines()
    assert lines[0] == "SEEN torch.bfloat16", "before anything is measured it is the script's own"
    assert [one for one in lines if one.startswith("SEEN")][-1] == f"SEEN torch.{within}"
    assert [one for one in lines if one.startswith("RETURNED")][-1] == "RETURNED torch.float32"
    assert '"as_is": "bf16"' in lines[-1]


REFUSED = {
    "never": ("import torch\nprint(torch.ones(1))\n", "no module was called in training in this process"),
    "no_step": (
        "import torch\nm = torch.nn.Linear(2, 2)\nfor _ in range(9):\n    m(torch.ones(1, 2)).sum().backward()\n",
        "no optimizer made a step",
    ),
    "own_updates": (
        "import torch\nm = torch.nn.Linear(2, 2)\nwhile True:\n    m(torch.ones(1, 2)).sum().backward()\n",
        "no optimizer made a step in 512 backward passes",
    ),
    "spawns": (
        "import torch.multiprocessing as mp\ndef train(rank):\n    ...\nmp.spawn(train, nprocs=2)\n",
        "trains in processes that it starts itself",
    ),
    "wrong": ("import torch\nraise ValueError('of the user')\n", "of the user"),
    "exits": ("import argparse\nargparse.ArgumentParser().parse_args(['--no'])\n", "unrecognized arguments"),
}


IMAGE = torch.ones(3, 8, 8)


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        ((torch.ones(4, 3), torch.ones(4)), 4),
        ({"x": torch.ones(4, 3)}, 4),
        (((IMAGE, IMAGE), ({"boxes": torch.ones(7, 4)}, {"boxes": torch.ones(1, 4)})), 2),
        ([[IMAGE], [1, 2]], 3),
        ([1, 2], 0),
    ],
)
def test_samples_of_a_batch_are_its_first_axis_or_how_many_there_are_side_by_side(batch: Any, samples: int) -> None:
    assert samples_in(batch) == samples


TOLD = {
    "gan": "trains several models in turn (Linear), with an optimizer each",
    "episodes": "passes, and cannot be compared",
}


@pytest.mark.parametrize("name", [*REFUSED, *TOLD])
def test_a_script_that_cannot_be_tuned_is_told_why(name: str, tmp_path: Path) -> None:
    text, why = REFUSED.get(name) or ("", TOLD[name])
    path = tmp_path / f"{name}.py" if text else SCRIPTS / f"{name}.py"
    if text:
        path.write_text(text)
    done = run("-m", "amptune", "tune", str(path), "--dry-run", "--device", "cpu", folder=tmp_path)
    assert why in done.stderr
    assert done.returncode in (1, 2)


def test_a_script_s_loop_that_ends_costs_its_process_and_no_policy(tmp_path: Path) -> None:
    """The process that goes on begins the script anew."""
    rows = measured("gpt", [{}] * 8, tmp_path, "--steps", "60")["rows"]
    assert rows[0]["failure"] is None
    assert rows[-1]["failure"].startswith("killed: gpt.py "), "which another process is asked for again"


def test_nothing_of_the_user_s_is_changed_or_made_and_the_script_sees_what_it_wrote(tmp_path: Path) -> None:
    """The classifier deletes its folder, writes a log, and renames a checkpoint to the best one."""
    out = tmp_path / "absolute" / "out"
    out.mkdir(parents=True)
    for name in ("best.pt", "log.txt", "kept"):
        (out / name).write_text(f"of a month of training: {name}")
    (out / "checkpoint-1").mkdir()
    (tmp_path / "absolute" / "alone").mkdir()
    (tmp_path / "absolute" / "alone" / "user").write_text("of the user")
    before = {one: one.read_text() if one.is_file() else None for one in sorted(tmp_path.rglob("*"))}
    measured("classifier", [{}], tmp_path, "--out", str(out), "--samples", "64", "--epochs", "50")
    files = tmp_path / "files.py"
    files.write_text(FILES)
    done = run("-c", WATCHED, str(files), str(out), folder=tmp_path)
    assert "as it should be" in done.stdout, done.stderr[-2000:]
    files.unlink()
    assert {one: one.read_text() if one.is_file() else None for one in sorted(tmp_path.rglob("*"))} == before


FILES = """
import io, os, pathlib, shutil, sys, tempfile, threading
import numpy, torch
out = pathlib.Path(sys.argv[1])
alone = out.parent / "alone"
with open(out / "log.txt", "a") as log:
    log.write(" and more")
assert (out / "log.txt").read_text().endswith("log.txt and more")
(out / "kept").write_text("mine"); assert (out / "kept").read_text() == "mine"
os.remove(out / "best.pt"); (out / "best.pt").unlink(missing_ok=True)
torch.save({"a": torch.ones(2)}, out / "new.pt"); os.rename(out / "new.pt", out / "best.pt")
assert torch.load(out / "best.pt")["a"].sum() == 2
shutil.rmtree(out / "checkpoint-1"); os.makedirs(out / "checkpoint-2" / "inner")
inner = out / "checkpoint-2" / "inner"
torch.save(torch.ones(1), str(inner / "w.pt")); assert os.path.exists(inner / "w.pt")
numpy.save(out / "array.npy", numpy.ones(3)); assert numpy.load(out / "array.npy").sum() == 3
io.open(out / "plain", "w").close(); pathlib.Path("relative.txt").write_text("x"); os.mkdir("here")
shutil.copy(out / "kept", out / "copied"); shutil.move(str(out / "copied"), str(out / "moved"))
(out / "only").mkdir(); (out / "only" / "one").write_text("1"); os.remove(out / "only" / "one")
assert os.listdir(out / "only") == [] == list(os.scandir(out / "only"))
assert "best.pt" in os.listdir(out) and "checkpoint-1" not in os.listdir(out)
assert {one.name for one in os.scandir(out)} == set(os.listdir(out))
_, folders, files = next(os.walk(out))
assert {*folders, *files} == set(os.listdir(out))
os.remove(alone / "user"); assert os.listdir(alone) == [] == list(os.scandir(alone))
thread = threading.Thread(target=torch.save, args=({}, out / "log.txt")); thread.start(); thread.join()
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "own").write_text("real"); assert os.listdir(folder) == ["own"]
assert os.environ["WANDB_MODE"] == "disabled"
print("as it should be")
"""

WATCHED = """
import runpy, sys
from amptune.workload.untouched_files import UntouchedFiles
sys.argv = sys.argv[1:]
with UntouchedFiles(lambda: True):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""


SLOW_LOADER = """
import time, torch
from torch.utils.data import DataLoader, Dataset
class Slow(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i):
        time.sleep(0.004)
        return torch.full((8,), float(i))
net = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
loader = DataLoader(Slow(), 8, shuffle=True)
for epoch in range(10_000):
    for x in loader:
        optimizer.zero_grad()
        net(x / 64).square().mean().backward()
        optimizer.step()
"""

TRY = """
import sys, torch
from pathlib import Path
from amptune.measure.bench.bench import Bench
from amptune.measure.loop import loader_trials
from amptune.measure.loop.input_checks import require_sound_input
from amptune.policy.settings import STOCK
from amptune.workload.running_script import workload_of_script
loader_trials.LOADER_S = 0.3
bench = Bench(workload_of_script(Path(sys.argv[1]), []), torch.device("cpu"))
trials = loader_trials.try_loaders(bench, STOCK, 60.0, 2)
tried = [(one.settings.num_workers, one.error) for one in trials]
print("TRIED", require_sound_input(bench).is_data_loader, tried, trials)
print("GAIN", trials[0].step_ms / trials[1].step_ms, trials[0].wait_share)
"""


def test_a_scripts_loader_is_tried_with_worker_processes_in_its_own_loop(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW_LOADER)
    done = run("-c", TRY, "train.py", folder=tmp_path)
    assert "TRIED True [(0, ''), (2, ''), " in done.stdout, done.stderr[-2000:] + done.stdout
    gain, share = map(float, re.findall(r"GAIN (\S+) (\S+)", done.stdout)[0])
    assert gain > 1.3
    assert share > 0.5
