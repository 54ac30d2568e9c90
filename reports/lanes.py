"""Runs commands beside one another, each in a lane with a GPU and CPU cores of its own, within a time limit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import psutil

from amptune.search.plan.budget import Budget

POLL_S = 0.2
# A command that was told to end has this long to end what it started.
ENDING_S = 5.0
# Earlier than the limit of all, so that a command can end by itself.
EARLIER_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """A command, without the option `--limit`, which it takes. It ends itself when its standard input closes."""

    name: str
    command: tuple[str, ...]
    expected_s: float


class Lane(Protocol):
    """Where one job runs at a time."""

    def begin(self, job: Job, limit_s: float) -> None: ...
    def ended(self) -> int | None:
        """Returns the exit code of the job that was begun, None while it runs."""

    def end(self) -> None: ...


# Returns the first job that may begin, given those that run or failed and the seconds that are left.
Next = Callable[[Sequence[Job], Sequence[Job], float], Job | None]


def run(lanes: Sequence[Lane], next_job: Next, limit: Budget) -> list[Job]:
    """Runs jobs until none is left that may begin, or the time is over; returns those that failed or were ended."""
    running: dict[int, Job] = {}
    failed: list[Job] = []
    try:
        while True:
            for number, lane in enumerate(lanes):
                if number not in running and (job := next_job([*running.values()], failed, limit.left_s)):
                    lane.begin(job, limit.left_s - EARLIER_S)
                    running[number] = job
            if not running:
                return failed
            for number in list(running):
                if (code := lanes[number].ended()) is not None:
                    job = running.pop(number)
                    failed += [job] if code else []
                    print(f"{job.name}: {'done' if code == 0 else f'exit code {code}'}", file=sys.stderr, flush=True)
            if limit.left_s <= 0:
                return failed + list(running.values())
            time.sleep(POLL_S)
    finally:
        for number in running:
            lanes[number].end()


@dataclass
class ProcessLane:
    """A lane whose jobs are processes. Without a number of the GPU, they see all; cores are CPU numbers."""

    gpu: str | None
    cores: frozenset[int]
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def begin(self, job: Job, limit_s: float) -> None:
        told = {} if self.gpu is None else {"CUDA_VISIBLE_DEVICES": self.gpu}
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)  # the process inherits it
        try:
            self._process = subprocess.Popen(  # noqa: S603  # a program of this folder, with its own arguments
                [*job.command, "--limit", f"{limit_s:.1f}"], stdin=subprocess.PIPE, env={**os.environ, **told}
            )
        finally:
            os.sched_setaffinity(0, before)

    def ended(self) -> int | None:
        if self._process is None or self._process.poll() is None:
            return None
        self._close()
        return self._process.returncode

    def end(self) -> None:
        if self._process is not None:
            self._close()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ENDING_S)
            self._process.kill()
            self._process.wait()

    def _close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()


def lanes_of(count: int, *, gpus: bool) -> list[ProcessLane]:
    """Returns lanes that share the CPU cores evenly; threads of one core stay together."""
    cores = sorted(os.sched_getaffinity(0), key=lambda cpu: (_first_sibling(cpu), cpu))
    size = max(1, len(cores) // count)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if os.environ.get("CUDA_VISIBLE_DEVICES") else None
    return [
        ProcessLane(
            gpu=None if not gpus or count == 1 else visible[number] if visible else str(number),
            cores=frozenset(cores[number * size : (number + 1) * size] if count > 1 else cores) or frozenset(cores),
        )
        for number in range(count)
    ]


def _first_sibling(cpu: int) -> int:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    text = path.read_text() if path.exists() else str(cpu)
    return int(text.replace("-", ",").split(",")[0])


def end_with_parent() -> None:
    """Ends this process, with all that it started, when its standard input closes: its parent ended, or wants that."""

    def wait() -> None:
        while os.read(0, 1024):
            pass
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                process.kill()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
