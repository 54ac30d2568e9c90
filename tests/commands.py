"""Command lines: run in this process on a machine that is given, or in a process of their own as users run them."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from click.testing import CliRunner
from simulated.recorded import Interference, RecordedEvaluator, recorded_ms

from amptune.cli.entry import cli
from amptune.cli.session import Session
from amptune.measure.evaluator import Evaluator
from amptune.measure.results.outcome import Failure
from amptune.measure.results.step_profile import OperationTime, StepProfile
from amptune.measure.results.training_runs import Parity
from amptune.policy.settings import Policy

__all__ = ["WORKLOADS", "Done", "Machine", "budget_here", "interrupting", "process", "run", "start", "wait_for_trials"]

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
# A trial of it takes longer than the start of a second worker.
large = of(model=lambda: nn.Sequential(nn.Linear(64, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(),
                                       nn.Linear(2048, 8)), batch_size=256)
not_a_number = of(loss=lambda model, batch: model(batch[0]).mean() * float("nan"))
no_parameters = of(model=nn.ReLU)
no_workload = {"model": 3}

def fails_in_training(model, batch):
    raise ValueError("labels out of range")

raises = of(loss=fails_in_training)

def batch_up_to_64(n):
    if n > 64:
        raise torch.OutOfMemoryError("out of memory")
    return torch.randn(n, 64), torch.randint(8, (n,))

too_large = of(batch=batch_up_to_64, batch_size=512)
endless = of(batch=lambda n: time.sleep(600))
"""


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a command left behind, under the names that `subprocess` gives them."""

    returncode: int
    stdout: str
    stderr: str


@dataclass
class Machine(RecordedEvaluator):
    """A recorded H200 by a clock that measurements, launches and judgements move: the same command does the same."""

    takes_s: ClassVar[float] = 1.0
    launch_s: ClassVar[float] = 2.0

    workload: str = "resnet50"
    noise: float = 0.002

    def judge(self, policy: Policy, fp32: Policy, seconds: float, limit_s: float) -> Parity | Failure:
        self.clock.advance(seconds / 3)
        return super().judge(policy, fp32, seconds, limit_s)

    def profile(self, policy: Policy, limit_s: float) -> StepProfile:  # noqa: ARG002
        ms = recorded_ms(self.workload, policy)
        slowest = OperationTime(module="body.norm", operation="batch_norm", count=2, ms=ms / 2)
        return StepProfile(device="cuda", steps=10, step_ms=ms, host_ms=ms / 4, gpu_busy_ms=ms, operations=(slowest,))


def interrupting(after: int) -> Interference:
    """Presses Ctrl-C in the measurement behind so many."""
    left = [after]

    def interfere(_: Policy) -> Failure | None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return None

    return interfere


def run(*arguments: str, folder: Path, evaluator: Evaluator | None = None) -> Done:
    """Runs a command in this process, in a folder; where the evaluator has a `clock`, in the time of that."""
    clock = getattr(evaluator, "clock", time.monotonic)
    session = Session(started=clock(), clock=clock, evaluator=evaluator)
    with contextlib.chdir(folder):
        # click 8.1 mixes them unless told not to; later ones know no such argument
        apart: dict[str, Any] = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
        done = CliRunner(**apart).invoke(cli, arguments, prog_name="amptune", obj=session, catch_exceptions=False)
    return Done(returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr)


def process(*arguments: str, folder: Path, **environment: str) -> Done:
    """Runs a command in a process of its own, whose workers are this machine's."""
    with start(*arguments, folder=folder, **environment) as running:
        stdout, stderr = running.communicate()
    return Done(returncode=running.returncode, stdout=stdout, stderr=stderr)


@contextlib.contextmanager
def start(*arguments: str, folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a process of its own, under way; it does not outlive the block."""
    with subprocess.Popen(
        [sys.executable, "-m", "amptune", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as running:
        try:
            yield running
        finally:
            if running.poll() is None:
                running.kill()


def wait_for_trials(running: subprocess.Popen[str], count: int) -> None:
    """Reads what a tuning run tells until so many trials have ended."""
    assert running.stderr is not None
    while count:
        line = running.stderr.readline()
        assert line, "tuning ended before it was interrupted"
        count -= re.search(r" s left\] +\d+ ", line) is not None


@functools.cache
def import_s() -> float:
    """What importing torch in a fresh process takes here: on a machine where it takes longer, all does."""
    began_s = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began_s


def budget_here(imports: float) -> str:
    """A budget of so many imports of torch, which hold about as much work on any machine."""
    return f"{max(10.0, imports * import_s()):.0f}s"
