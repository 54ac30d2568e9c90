"""Ways to train, each by the README's loop in a process of its own, timed in turn: no part of amptune measures here.

A loop takes a fresh batch from the workload's loader for each step, and copies it to the device. It waits for the
device at the ends of a block alone. Blocks last half a second; or each has the same number of steps, all of which count
after the first ones, so that what is compiled or recorded later is part of the time.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

from autotune import Bridged  # beside this program

from amptune.policy.serialization import policy_from_dict, policy_to_dict
from amptune.policy.settings import AUTOTUNED_MODES, Policy
from amptune.search.plan.budget import Budget

if TYPE_CHECKING:
    import torch

    from amptune.workload.workload import Workload

BLOCKS, BLOCK_S, FEWEST_STEPS = 4, 0.5, 5
# Steps before anything is timed: compiling, and recording CUDA graphs; and those that follow another process's block.
FIRST_STEPS, UNTIMED_STEPS = 10, 3
# Blocks of a given number of steps; one that takes longer than this ends before.
LONG_BLOCKS, LONGEST_BLOCK_S = 6, 20.0
# A warm-up ends with steps that take as long as this.
WARM_S = 1.0
# An answer that takes longer is a failure. max-autotune took up to 212 s where others published it.
LONGEST_S = 300.0
# Without a loader of its own, a workload's batches are drawn before, since drawing them takes longer than a step.
BATCHES_HELD = 4


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to train, under all its names: a policy, or a configuration that pytorch-autotune returned."""

    names: tuple[str, ...]
    caches: Path
    policy: Policy | None = None
    config: Mapping[str, Any] | None = None

    @property
    def chooses_by_time(self) -> bool:
        """Whether it times kernels while it warms up, so that nothing else may run."""
        return self.policy is None or self.policy.cudnn_benchmark or self.policy.compile in AUTOTUNED_MODES


class LimitReachedError(Exception):
    """The command's time is over; what was not finished says nothing."""


# --- in this process -----------------------------------------------------------------------------------------------


def in_turn(
    arms: Sequence[Arm], target: str, device: str | None, limit: Budget, *, seed: str = "", steps: int | None = None
) -> list[dict[str, Any]]:
    """Returns a row for each arm: the ms a step of each of its blocks, or its failure. A block may have given `steps`.

    All processes start and compile beside one another. Then they take turns, in an order drawn anew for each round. An
    arm that ran out of memory beside others has another try alone. Raises `LimitReachedError`.
    """
    order = random.Random(seed)  # noqa: S311  # an order, no secret
    started_s = time.monotonic()
    with ExitStack() as stack:
        launched = [stack.enter_context(Launched(arm, target, device, limit, steps)) for arm in arms]
        for one in launched:
            one.hear()
        beside = [one for one in launched if not one.arm.chooses_by_time]
        for group in (beside, *([one] for one in launched if one.arm.chooses_by_time)):
            for one in group:
                one.tell("warm_up")
            for one in group:
                one.hear()
        for _ in range(LONG_BLOCKS if steps else BLOCKS):
            for one in order.sample(launched, len(launched)):
                one.tell("block")
                one.hear()
    seconds = round(time.monotonic() - started_s, 1)
    crowded = [one.arm for one in launched if len(arms) > 1 and "out of memory" in (one.failure or "").lower()]
    rows = [{**one.row(), "launch_s": seconds} for one in launched if one.arm not in crowded]
    return rows + [row for arm in crowded for row in in_turn([arm], target, device, limit, steps=steps)]


@contextmanager
def compile_caches(kept: Path) -> Iterator[Path]:
    """Has torch.compile and Triton keep what they make in this folder; worker processes inherit that."""
    names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    before = {name: os.environ[name] for name in names if name in os.environ}
    folder = kept.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        os.environ.update({name: str(folder / name.lower()) for name in names})
        yield folder
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


class Launched:
    """An arm's process. What it answered is in `blocks` and `failure`."""

    def __init__(self, arm: Arm, target: str, device: str | None, limit: Budget, steps: int | None) -> None:
        self.arm = arm
        self.failure: str | None = None
        self._limit = limit
        self._steps = steps
        self._answers: list[dict[str, Any]] = []
        told = {
            "target": target,
            "policy": None if arm.policy is None else policy_to_dict(arm.policy),
            "config": arm.config,
            "steps": steps,
        }
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        with compile_caches(arm.caches) as folder:  # the process keeps the environment that it was started in
            log = folder / "plain_loop.log"
            self._process = context.Process(target=serve, args=(theirs, told, device, log))
            self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process with all that it started."""
        self._pipe.close()
        with suppress(ProcessLookupError):  # it ended, or does not lead a group yet
            os.killpg(cast("int", self._process.pid), signal.SIGKILL)
        self._process.kill()
        self._process.join()

    def tell(self, task: str) -> None:
        if self.failure is None:
            try:
                self._pipe.send(task)
            except OSError:
                self.failure = "its process died"

    def hear(self) -> None:
        if self.failure is not None:
            return
        wait_s = max(0.0, min(LONGEST_S, self._limit.left_s))
        if not self._pipe.poll(wait_s):
            if wait_s < LONGEST_S:
                raise LimitReachedError
            self.failure = f"no answer within {LONGEST_S:.0f} s"
            return
        try:
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self.failure = "its process died"
            return
        self.failure = answer.get("failure")
        self._answers.append(answer)

    def row(self) -> dict[str, Any]:
        return {
            "names": list(self.arm.names),
            "policy": None if self.arm.policy is None else policy_to_dict(self.arm.policy),
            "failure": self.failure,
            "warm_s": next((answer["warm_s"] for answer in self._answers if "warm_s" in answer), None),
            "ms": [answer["ms"] for answer in self._answers if "ms" in answer],
            "block_steps": self._steps,
            "steps": [answer["steps"] for answer in self._answers if "ms" in answer],
            "losses": [answer["loss"] for answer in self._answers if "ms" in answer],
            "peak_mib": max((answer["peak_mib"] for answer in self._answers if "ms" in answer), default=None),
        }


# --- in the arm's process ------------------------------------------------------------------------------------------


def serve(pipe: Connection, told: Mapping[str, Any], device: str | None, log: Path) -> None:
    """Builds what it was told, then does each task that comes, and answers. Prints into the log."""
    os.setsid()
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        loop = Loop(told, device)
        pipe.send({})
        while True:
            pipe.send(getattr(loop, pipe.recv())())
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001  # the model may raise anything: that is the answer
        pipe.send({"failure": f"{type(error).__name__}: {error}"[:500]})


class Loop:
    """A training loop that runs on from block to block."""

    def __init__(self, told: Mapping[str, Any], device: str | None) -> None:
        from amptune.workload.targets import load_workload, parse_target

        seed_all()
        on = device_or_default(device)
        self._on_gpu = on.startswith("cuda")
        workload = load_workload(parse_target(told["target"]))
        if told["config"] is not None:
            self._step = step_of_autotune(told["config"], workload, on)
        else:
            self._step = step_under(policy_from_dict(told["policy"]), workload, on)
        self._steps = told["steps"]
        self._records = told["policy"] is not None and told["policy"].get("cuda_graphs", False)

    def warm_up(self) -> dict[str, float]:
        warm_s = self._seconds(FIRST_STEPS)
        steps, seconds = FEWEST_STEPS, 0.0
        # Blocks of a given number of steps begin at the same step for all: steps may get faster as a model learns.
        while self._steps is None and (seconds := self._seconds(steps)) < WARM_S:
            steps *= 2
        if self._on_gpu and not self._records:  # others need what only compiling or choosing kernels needed
            import torch

            torch.cuda.empty_cache()
        return {"warm_s": round(warm_s + seconds, 2)}

    def block(self) -> dict[str, float]:
        if self._steps is None:
            self._seconds(UNTIMED_STEPS)
            steps = max(FEWEST_STEPS, math.ceil(BLOCK_S * FEWEST_STEPS / self._seconds(FEWEST_STEPS)))
            seconds = self._seconds(steps)
        else:
            steps = seconds = 0
            while steps < self._steps and seconds < LONGEST_BLOCK_S:
                fewer = min(FEWEST_STEPS, self._steps - steps)
                seconds += self._seconds(fewer)
                steps += fewer
        loss = round(float(self._loss.detach()), 5)
        return {"ms": round(1000 * seconds / steps, 4), "steps": steps, "loss": loss, "peak_mib": self._peak_mib()}

    def _peak_mib(self) -> int:
        import torch

        return torch.cuda.max_memory_reserved() >> 20 if self._on_gpu else 0

    def _seconds(self, steps: int) -> float:
        self._wait()
        started_s = time.perf_counter()
        for _ in range(steps):
            self._loss = self._step()
        self._wait()
        return time.perf_counter() - started_s

    def _wait(self) -> None:
        if self._on_gpu:
            import torch

            torch.cuda.synchronize()


def seed_all() -> None:
    """Seeds the global generators: arms that draw alike get the same numbers."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def device_or_default(device: str | None) -> str:
    import torch

    return device or ("cuda" if torch.cuda.is_available() else "cpu")


def step_under(policy: Policy, workload: Workload, device: str) -> Callable[[], torch.Tensor]:
    """Returns one step of the README's loop under a policy: the one call."""
    import amptune

    model = workload.model().to(device)
    tuned = amptune.apply(policy, model, guard=False)
    train, _ = one_call(tuned, workload, model)
    seed_all()
    fresh = batches(workload, device)
    return lambda: train(next(fresh))


def one_call(tuned: Any, workload: Workload, model: torch.nn.Module) -> tuple[Callable[[Any], Any], Sequence[Any]]:
    """Returns the call that trains on a batch, and its optimizers."""
    built = workload.optimizer(model)
    optimizers = [*map(tuned.optimizer, built if isinstance(built, tuple | list) else [built])]
    if workload.loss is not None:
        return tuned.training_step(workload.loss, optimizers[0], workload.clip), optimizers
    return tuned.training_step(step=workload.step, optimizer=built), optimizers


def step_of_autotune(config: Mapping[str, Any], workload: Workload, device: str) -> Callable[[], torch.Tensor]:
    """Returns the step that pytorch-autotune returned with this configuration."""
    fresh = batches(workload, device)
    bridged = Bridged(workload, next(fresh))
    result = bridged.restored(config, device)
    return lambda: bridged.step(result, next(fresh))


def batches(workload: Workload, device: str) -> Iterator[Any]:
    """Yields the loader's batches without end, each copied to the device while the one before is trained on."""
    import torch

    from amptune.changes.tensor_tree import moved_to

    size = workload.batch_size
    loader = workload.loader(size) if workload.loader else [workload.batch(size) for _ in range(BATCHES_HELD)]
    while True:
        for batch in loader:
            yield moved_to(torch.device(device), batch, lambda tensor: tensor.to(device, non_blocking=True))
