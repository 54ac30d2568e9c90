"""`amptune tune --workers N`: the same command once more for each other device, on the same study."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

import click

from amptune.cli.device import require_devices
from amptune.cli.options import say

if TYPE_CHECKING:
    from amptune.search.events import Observer
    from amptune.search.request import TuningRequest

__all__ = ["Part", "beside", "end_with_parent", "parts_of", "use_cores"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """The part of one worker: its GPU as `CUDA_VISIBLE_DEVICES` has it, its CPU cores, its number of trials.

    Without a GPU or cores of its own it has what this process has.
    """

    gpu: str | None = None
    cores: tuple[int, ...] = ()
    trials: int | None = None


def parts_of(workers: int, device: str | None, trials: int | None) -> list[Part]:
    """Returns the part of each worker, the first for this process. Cores are shared, so that none disturbs another.

    Raises `DeviceError` if there are fewer devices than workers, `click.BadParameter` if there are fewer trials.
    """
    if workers == 1:
        return [Part(trials=trials)]
    if trials is not None and trials < workers:
        raise click.BadParameter(f"{workers} workers need at least as many --trials", param_hint="--workers")
    require_devices(workers, device)
    from amptune.measure.workers.cpu_share import cores_for

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = dict(enumerate(visible.split(","))) if visible else {}
    each, more = (None, 0) if trials is None else divmod(trials, workers)
    return [
        Part(
            gpu=None if device == "cpu" else gpus.get(number, str(number)),
            cores=cores,
            trials=None if each is None else each + (number < more),
        )
        for number, cores in enumerate(cores_for(workers))
    ]


def use_cores(cores: Sequence[int]) -> None:
    """Keeps this process, and those that it starts, on the cores until the command ends; none are all."""
    if cores:
        before = os.sched_getaffinity(0)
        click.get_current_context().call_on_close(lambda: os.sched_setaffinity(0, before))
        os.sched_setaffinity(0, cores)


@contextmanager
def beside(others: Sequence[Part], request: TuningRequest, observer: Observer) -> Iterator[None]:
    """Runs a worker for each of the parts on this run's study; they end with the block, or with this process."""
    processes = [_started(part, request) for part in others]
    is_ending = threading.Event()
    for number, process in enumerate(processes, start=2):
        threading.Thread(target=_tell, args=(number, process, observer, is_ending), daemon=True).start()
    try:
        yield
    finally:
        is_ending.set()
        _end(processes)


def end_with_parent() -> None:
    """Interrupts this process once its parent closes the pipe to it or has died; ignores Ctrl-C, which reaches both."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_interrupt_at_end_of_input, daemon=True).start()


def _interrupt_at_end_of_input() -> None:
    os.read(0, 1)  # of `sys.stdin`, a thread that waits would hold a lock that Python needs to exit
    os.kill(os.getpid(), signal.SIGTERM)


def _started(part: Part, request: TuningRequest) -> subprocess.Popen[str]:
    """Starts this command once more, with the part's GPU, cores and trials, for the time that is left.

    Its run counts as begun before this one, so that the study's last run is the one that decides.
    """
    before = datetime.fromisoformat(request.began) - timedelta(milliseconds=1)
    own = sys.orig_argv[1:]
    end = own.index("--") if "--" in own else len(own)
    more = ["--workers", "1", "--worker", before.isoformat(timespec="milliseconds")]
    more += ["--budget", f"{max(1.0, request.budget.left_s):.1f}s"]
    more += [] if part.trials is None else ["--trials", str(part.trials)]
    mine = os.sched_getaffinity(0) if part.cores else set()
    if part.cores:
        os.sched_setaffinity(0, part.cores)
    try:
        return subprocess.Popen(  # noqa: S603  # the command that runs now
            [sys.executable, *own[:end], *more, *own[end:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=None if part.gpu is None else {**os.environ, "CUDA_VISIBLE_DEVICES": part.gpu},
        )
    finally:
        if part.cores:
            os.sched_setaffinity(0, mine)


def _tell(number: int, process: subprocess.Popen[str], observer: Observer, is_ending: threading.Event) -> None:
    """Passes on what a worker tells, and says if it ends by an error."""
    from amptune.search.events import WorkerSaid

    for line in process.stderr or ():
        if not is_ending.is_set():
            observer(WorkerSaid(worker=number, text=line.rstrip()))
    code = process.wait()
    if code and not is_ending.is_set():
        what = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        say(f"worker {number} {what}; the others go on, and its trial is tried again", err=True)


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Ends the workers: each gives back what it measures; one that does not end in time is killed."""
    from amptune.measure.workers.processes import END_LIMIT_S

    for process in processes:
        if process.stdin is not None:
            process.stdin.close()
    until_s = time.monotonic() + END_LIMIT_S
    for process in processes:
        try:
            process.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
