"""How the largest batch is found: amptune's finder beside Lightning's and accelerate's, and the truth by bisection.

    python reports/batch_sizes.py --out reports/h200/batch_sizes --memory 15 --limit 140 resnet50 densenet161
    python reports/batch_sizes.py --out reports/h200/batch_sizes --memory 30 --limit 140 bert_base deeplabv3plus
    python reports/batch_sizes.py --out reports/h200/batch_sizes --table

For each workload, under the AMP recipe in bf16 and in stock PyTorch, each finder runs in a process of its own:
amptune's (`amptune.search.batch_size.largest`), Lightning's in both modes, accelerate's from 16,384 down. Each has the
device for itself, one after the other; or with --memory that many GiB of it, which PyTorch's allocator keeps to, all
four at the same time (what is found is a size and not a speed). Then sizes between the largest that ran for anyone and
the smallest above it that did not are tried in fresh processes, until the two are within 1 %. A try is three training
steps, with the workload's own model, loss and optimizer. Every try counts, and so does every one that went out of
memory: each is written down before it begins. --limit is in seconds, for each workload and setting; a finder that is
stopped by it is shown with what it had. --finders names those that are to run. Seconds are those of the whole
process, with its start.

Data is made the same cheap way for all, or drawing it would take longest: 16 samples, repeated. For amptune this is
done on the host, as its worker copies batches from there, three of them; for the others on the device, one.
Writes OUT/WORKLOAD.SETTING.json after each finder; what stands there already is not run again. Without a GPU,
--pretend-largest N tries the program out: sizes above N go out of memory.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from amptune.changes.tensor_tree import map_tensors
from amptune.measure.bench.peak_memory import limit_memory
from amptune.measure.evaluator import WorkerEvaluator
from amptune.measure.results.outcome import Effort, Failure, Measurement, Outcome
from amptune.measure.workers.source import Source
from amptune.policy.settings import STOCK, Policy, amp_recipe
from amptune.search.batch_size.largest import Sizer
from amptune.search.batch_size.memory_model import MemoryModel
from amptune.search.batch_size.memory_runs import FixedPart
from amptune.workload.workload import Workload
from amptune.workload.zoo import workload as bundled

WORKLOADS = ("resnet50", "densenet161", "bert_base", "deeplabv3plus")
SETTINGS = {"bf16": amp_recipe("bf16"), "stock": STOCK}
FINDERS = ("amptune", "lightning power", "lightning binsearch", "accelerate")
STEPS = 3
DRAWN = 16
ACCELERATE_FROM = 16384
# Longer than this no finder gets, that the others have their turn; what is left then is the bisection's.
SHARE = 0.2
TOLERANCE = 0.01
# As short as a trial can be: the first steps show the peak.
GLANCE = Effort(warmup_s=0.0, measure_s=0.0, min_steps=1, max_steps=1, time_limit_s=120.0)
# Importing torch came off a finder's time before it began, and its worker is to be ended within it.
ENDING_S = 8.0
_MIB = 2**20


@dataclass(frozen=True)
class Task:
    """One finder on one workload; or, as the finder "try", one batch size."""

    finder: str
    workload: str
    setting: str
    journal: Path
    limit_s: float
    memory_mib: float | None = None
    pretend_largest: int | None = None
    batch_size: int | None = None

    @property
    def policy(self) -> Policy:
        return SETTINGS[self.setting]

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"


class Journal:
    """The tries of one process, a line at a time, so that one that is killed is known up to there."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._file = task.journal.open("a")

    def begins(self, batch_size: int) -> None:
        self._write(begins=batch_size)
        largest = self._task.pretend_largest
        if largest is not None and batch_size > largest:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate more than was pretended to be there.")

    def ran(self, batch_size: int, **more: Any) -> None:
        self._write(ran=batch_size, **more)

    def failed(self, failure: Failure) -> None:
        self._write(failed=failure.kind)

    def ends(self, batch_size: int | None, because: str = "", **more: Any) -> None:
        self._write(answer=batch_size, because=because, **more)

    def _write(self, **row: Any) -> None:
        self._file.write(json.dumps(row) + os.linesep)
        self._file.flush()


# --- Finders: what runs in a process of its own ---------------------------------------------------------------------


def run_task(task: Task) -> None:
    """Runs one finder to its end and writes what it did into the journal."""
    journal = Journal(task)
    if task.memory_mib is not None and task.finder != "amptune":  # whose worker does the same
        limit_memory(torch.device(task.device, 0), task.memory_mib)
    if task.finder == "amptune":
        with_amptune(task, journal)
    elif task.finder == "accelerate":
        with_accelerate(task, journal)
    elif task.finder == "try":
        assert task.batch_size is not None  # noqa: S101  # the parent gives it
        three_steps(task, journal, fresh_model(task), task.batch_size)
    else:
        with_lightning(task, journal, task.finder.split()[1])


def with_amptune(task: Task, journal: Journal) -> None:
    """The finder in search/, nothing known beforehand, through the worker that a tuning uses."""
    until_s = time.monotonic() + task.limit_s - ENDING_S
    limit_mib = task.memory_mib or memory_mib(task)
    with tempfile.TemporaryDirectory() as folder, evaluator_of(task, Path(folder)) as evaluator:
        subject = evaluator.prepare(task.limit_s).subject
        model = MemoryModel(limit_mib=limit_mib, fixed=FixedPart.of_weights(subject.parameters))

        def run(policy: Policy) -> Outcome:
            batch_size = policy.batch_size or subject.batch_size
            try:
                journal.begins(batch_size)
            except torch.OutOfMemoryError as error:
                return Failure(kind="oom", message=str(error))
            left_s = max(1.0, until_s - time.monotonic())
            outcome = evaluator.measure(policy, replace(GLANCE, time_limit_s=left_s))
            if isinstance(outcome, Measurement):
                journal.ran(
                    batch_size,
                    allocated_mib=outcome.peak_allocated_mib,
                    reserved_mib=outcome.peak_reserved_mib,
                    alloc_retries=outcome.alloc_retries,
                )
            else:
                journal.failed(outcome)
            return as_pretended(outcome, batch_size, limit_mib, task.pretend_largest)

        sizer = Sizer(run, model, subject.batch_size, left_s=lambda: until_s - time.monotonic())
        found = sizer.largest(task.policy)
    journal.ends(
        found.batch_size, found.because, peak_mib=found.peak_mib, limit_mib=limit_mib, alloc_retries=found.alloc_retries
    )


def evaluator_of(task: Task, folder: Path) -> WorkerEvaluator:
    import cloudpickle

    pickled = cloudpickle.dumps(cheaply_drawn(bundled(task.workload)))
    return WorkerEvaluator(Source(pickled=pickled), None, folder / "workers.log", task.memory_mib)


def as_pretended(outcome: Outcome, batch_size: int, limit_mib: float, largest: int | None) -> Outcome:
    """With a peak in proportion to the batch, where the memory is pretended."""
    if largest is None or isinstance(outcome, Failure):
        return outcome
    peak_mib = limit_mib * batch_size / (largest + 0.5)
    return replace(outcome, peak_allocated_mib=peak_mib, peak_reserved_mib=peak_mib)


def with_accelerate(task: Task, journal: Journal) -> None:
    """As its documentation has it: the model is built within the function that is tried."""
    memory = importlib.import_module("accelerate.utils.memory")
    model = fresh_model(task)

    def train(batch_size: int) -> int:
        three_steps(task, journal, model, batch_size)
        return batch_size

    found = memory.find_executable_batch_size(train, starting_batch_size=ACCELERATE_FROM)()
    journal.ends(found)


def with_lightning(task: Task, journal: Journal, mode: str) -> None:
    """`Tuner.scale_batch_size` with its defaults, on the same model, loss, optimizer and data."""
    warnings.simplefilter("ignore")
    lightning = importlib.import_module("lightning.pytorch")
    tuner = importlib.import_module("lightning.pytorch.tuner")
    workload = bundled(task.workload)
    assert workload.loss is not None  # noqa: S101  # all of WORKLOADS have one
    loss, drawn = workload.loss, on_device(workload.batch(DRAWN), task)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]  # imported only where it is installed
        def __init__(self) -> None:
            super().__init__()
            self.model = workload.model()
            self.batch_size = 2

        def on_train_start(self) -> None:
            journal.begins(self.batch_size)

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return loss(self.model, batch)

        def on_train_batch_end(self, *_: Any) -> None:
            if self.trainer.fit_loop.epoch_loop.batch_idx + 1 == STEPS:
                journal.ran(self.batch_size)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return cast("torch.optim.Optimizer", workload.optimizer(self.model))

        def train_dataloader(self) -> DataLoader[Any]:
            return DataLoader(Endless(drawn, self.batch_size), batch_size=None, collate_fn=lambda batch: batch)

    module = Module()
    trainer = lightning.Trainer(
        accelerator="gpu" if task.device == "cuda" else "cpu",
        devices=1,
        precision="bf16-mixed" if task.policy.autocast == "bf16" else "32-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=task.journal.parent,
    )
    journal.ends(tuner.Tuner(trainer).scale_batch_size(module, mode=mode))


class Endless(IterableDataset[Any]):
    """The same batch again and again, made when the first is asked for."""

    def __init__(self, drawn: Any, batch_size: int) -> None:
        self._drawn = drawn
        self._batch_size = batch_size

    def __iter__(self) -> Iterator[Any]:
        batch = repeated(self._drawn, self._batch_size)
        while True:
            yield batch


def three_steps(task: Task, journal: Journal, model: torch.nn.Module, batch_size: int) -> None:
    """Trains a fresh copy of the model for three steps; raises `torch.OutOfMemoryError`."""
    journal.begins(batch_size)
    workload = bundled(task.workload)
    assert workload.loss is not None  # noqa: S101  # all of WORKLOADS have one
    model = copy.deepcopy(model).to(task.device)
    optimizer = workload.optimizer(model)
    batch = repeated(on_device(workload.batch(DRAWN), task), batch_size)
    for _ in range(STEPS):
        with torch.autocast(task.device, torch.bfloat16, enabled=task.policy.autocast == "bf16"):
            loss = workload.loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has not typed it
        optimizer.step()
        optimizer.zero_grad()
    float(loss)  # waits for the device
    journal.ran(batch_size)


def fresh_model(task: Task) -> torch.nn.Module:
    torch.manual_seed(0)
    return bundled(task.workload).model()


def cheaply_drawn(workload: Workload) -> Workload:
    """The workload with batches of 16 samples, repeated."""
    draw = workload.batch
    return replace(workload, batch=lambda n: repeated(draw(DRAWN), n), loader=None)


def repeated(drawn: Any, batch_size: int) -> Any:
    """A batch of so many samples, made of a few."""

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[torch.arange(batch_size, device=tensor.device) % len(tensor)]

    return map_tensors(longer, drawn)


def on_device(batch: Any, task: Task) -> Any:
    return map_tensors(lambda tensor: tensor.to(task.device), batch)


def memory_mib(task: Task) -> float:
    """What a process may allocate once its CUDA context is open, asked of one that then ends."""
    if task.device == "cpu":
        return 16000.0
    program = "import torch; torch.zeros(1, device='cuda'); print(torch.cuda.mem_get_info()[0])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603  # our own words
    return int(done.stdout) / _MIB


# --- The report: what starts them, and reads their journals ---------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"by default {', '.join(WORKLOADS)}")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--finders", nargs="+", choices=FINDERS, default=list(FINDERS))
    parser.add_argument("--memory", type=float, metavar="GIB", help="for each finder, all of them at the same time")
    parser.add_argument("--limit", type=float, default=70.0, help="seconds for each workload and setting")
    parser.add_argument("--pretend-largest", type=int, metavar="N", help="try the program out without a GPU")
    parser.add_argument("--table", action="store_true", help="only print the table of what is in OUT")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.task:
        task = json.loads(arguments.task)
        run_task(Task(**{**task, "journal": Path(task["journal"])}))
        return 0
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.table:
        for name in arguments.workloads or WORKLOADS:
            for setting in arguments.settings:
                report(name, setting, arguments)
    print(table(arguments.out))
    return 0


def report(name: str, setting: str, arguments: argparse.Namespace) -> None:
    """Runs every finder that has not run yet, then looks for the truth; writes after each."""
    path = arguments.out / f"{name}.{setting}.json"
    data = json.loads(path.read_text()) if path.exists() else heading(name, setting, arguments)
    memory_mib = arguments.memory and 1024 * arguments.memory
    at_once = len(FINDERS) if memory_mib else 1
    until_s = time.monotonic() + arguments.limit
    finder_s = arguments.limit * SHARE * (at_once if at_once == 1 else at_once - 1)

    def run(finder: str, most_s: float, batch_size: int | None = None) -> dict[str, Any]:
        left_s = min(most_s, until_s - time.monotonic())
        with tempfile.TemporaryDirectory() as folder:
            journal = Path(folder) / "journal"
            task = Task(finder, name, setting, journal, left_s, memory_mib, arguments.pretend_largest, batch_size)
            return run_apart(task, threads=max(1, (os.cpu_count() or 1) // at_once))

    def keep() -> None:
        path.write_text(json.dumps(data, indent=1) + os.linesep)

    with ThreadPoolExecutor(at_once) as pool:

        def look(finder: str) -> None:
            if until_s - time.monotonic() > 5:
                data["finders"][finder] = run(finder, finder_s)
                keep()
                print(f"{name} {setting} {finder}: {words_for(data['finders'][finder])}", flush=True)

        list(pool.map(look, [finder for finder in arguments.finders if finder not in data["finders"]]))
        data["truth"] = the_truth(
            data,
            lambda sizes: list(pool.map(lambda size: run("try", 60.0, size), sizes)),
            lambda: until_s - time.monotonic(),
            at_once,
        )
    keep()


def heading(name: str, setting: str, arguments: argparse.Namespace) -> dict[str, Any]:
    on_gpu = torch.cuda.is_available()
    memory = f"--memory {arguments.memory:g} " if arguments.memory else ""
    if arguments.finders != list(FINDERS):
        memory += f"--finders {shlex.join(arguments.finders)} "
    more = f"{memory}--limit {arguments.limit:g} --settings {setting} --out OUT {name}"
    return {
        "schema": "amptune.batch_sizes/1",
        "workload": name,
        "setting": setting,
        "memory_gib": arguments.memory,
        "command": f"python reports/batch_sizes.py {more}",
        "hardware": torch.cuda.get_device_name() if on_gpu else "cpu",
        "software": {"torch": torch.__version__, **{name: version_of(name) for name in ("lightning", "accelerate")}},
        "finders": {},
    }


def version_of(library: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(library)
    except PackageNotFoundError:
        return None


def run_apart(task: Task, threads: int) -> dict[str, Any]:
    """One finder in a process of its own, ended where its time is up."""
    if task.limit_s <= 0:
        return {"answer": None, "because": "there was no time", "tries": [], "ooms": 0, "seconds": 0.0}
    arguments = {**vars(task), "journal": str(task.journal)}
    command = [sys.executable, __file__, "--out", ".", "--task", json.dumps(arguments)]
    began_s = time.monotonic()
    # A session of its own, so that the workers of a finder that is stopped end with it.
    process = subprocess.Popen(  # noqa: S603  # this program
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
    )
    try:
        _, errors = process.communicate(timeout=task.limit_s)
        failure = errors.strip().splitlines()[-1] if process.returncode and errors.strip() else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        failure = f"stopped after {task.limit_s:.0f} s"
    rows = [json.loads(line) for line in task.journal.read_text().splitlines()] if task.journal.exists() else []
    return {**summary(rows, failure), "seconds": round(time.monotonic() - began_s, 1)}


def summary(rows: list[dict[str, Any]], failure: str) -> dict[str, Any]:
    """What a journal says. A try that neither ran nor was the last before a stop went out of memory."""
    tries: list[dict[str, Any]] = []
    for row in rows:
        if "begins" in row:
            tries.append({"batch_size": row["begins"], "ran": False})
        if "ran" in row:
            tries[-1] |= {**row, "ran": True}  # with the peaks, where they are known
        if row.get("failed", "oom") != "oom":
            tries[-1]["ran"] = None  # for another reason
    if failure and "out of memory" not in failure.lower() and tries and not tries[-1]["ran"]:
        tries[-1]["ran"] = None  # nobody knows
    ends = [row for row in rows if "answer" in row]
    found = ends[-1] if ends else {"answer": None, "because": ""}
    return {
        **found,
        "because": failure or found["because"],
        "tries": tries,
        "ooms": sum(one["ran"] is False for one in tries),
    }


def the_truth(
    data: dict[str, Any],
    run: Callable[[list[int]], list[dict[str, Any]]],
    left_s: Callable[[], float],
    at_once: int = 1,
) -> dict[str, Any]:
    """The largest size that trains for three steps in a fresh process, within 1 %, with the tries it took."""
    made = list(data.get("truth", {}).get("tries", []))
    seen = [one for finder in data["finders"].values() for one in finder["tries"]] + made
    low = max((one["batch_size"] for one in seen if one["ran"]), default=0)
    high = min((one["batch_size"] for one in seen if one["ran"] is False and one["batch_size"] > low), default=None)
    while low and not is_certain(low, high) and left_s() > 0:
        found = [one["tries"][-1] for one in run(between(low, high, at_once)) if one["tries"]]
        made += found
        known = [one for one in found if one["ran"] is not None]
        if not known:
            break
        low = max([low, *(one["batch_size"] for one in known if one["ran"])])
        beyond = [one["batch_size"] for one in known if one["ran"] is False and one["batch_size"] > low]
        high = min([*beyond, *([] if high is None or high <= low else [high])], default=None)
    return {"largest": low or None, "smallest_oom": high, "within_1_percent": is_certain(low, high), "tries": made}


def is_certain(low: int, high: int | None) -> bool:
    return high is not None and high - low <= max(1, TOLERANCE * low)


def between(low: int, high: int | None, count: int) -> list[int]:
    """Sizes that part what is not known yet, or go beyond what ran."""
    if high is None:
        return [math.ceil(low * (1 + 2 * TOLERANCE) ** step) + step - 1 for step in range(1, count + 1)]
    return sorted({low + max(1, (high - low) * step // (count + 1)) for step in range(1, count + 1)})


def table(out: Path) -> str:
    """The evidence in OUT as a Markdown table: batch (its share of the largest), runs, of them out of memory, time."""
    heads = ("workload", "setting", "of GiB", "largest", *FINDERS)
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for path in sorted(out.glob("*.json")):
        data = json.loads(path.read_text())
        truth = data.get("truth", {})
        largest = truth.get("largest")
        cells = [words_for(data["finders"].get(finder), largest) for finder in FINDERS]
        known = f"{largest}" if truth.get("within_1_percent") else f"at least {largest}" if largest else "unknown"
        memory = data["memory_gib"]
        size = "all" if memory is None else f"{memory:g}"
        lines.append(f"| {data['workload']} | {data['setting']} | {size} | {known} | {' | '.join(cells)} |")
    return "\n".join(lines)


def words_for(found: dict[str, Any] | None, largest: int | None = None) -> str:
    if found is None:
        return "not run"
    took = f"{len(found['tries'])} runs, {found['ooms']} OOM, {found['seconds']:.0f} s"
    answer = found["answer"]
    if answer is None:
        return f"none ({found['because'].partition('. ')[0]}; {took})"
    share = f" ({answer / largest:.3f})" if largest else ""
    ran = any(one["batch_size"] == answer and one["ran"] for one in found["tries"])
    return f"{answer}{share}{'' if ran else ', never run'}; {took}"


if __name__ == "__main__":
    sys.exit(main())
