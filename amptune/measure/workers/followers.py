"""The other ranks of a worker: processes that run the same steps as it does, each on a device of its own.

They are forked from the worker before it has threads or a CUDA context, and end with it. In a trial the worker is rank
0 of a process group, decides all, and tells them before each step; they only follow. A group in which anything failed
is not used again: the worker says that it is broken, and is replaced with all of them.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NoReturn

from amptune.measure.results.outcome import LOADER_FAILED, Effort, Failure, Measurement, Outcome
from amptune.measure.workers.death import death_of, kernel_oom_kills
from amptune.measure.workers.setting import Setting, built_bench
from amptune.policy.settings import Policy

if TYPE_CHECKING:
    from amptune.measure.bench.bench import Bench
    from amptune.measure.bench.drawn_batches import Batches
    from amptune.measure.bench.trial_group import TrialGroup

__all__ = ["Followers"]

LOCALHOST = "127.0.0.1"
BUILD, LEAVE = b"build", b"end"
# A rank that has run its last step gives its memory back; another one whose process still works has failed by now.
LEAVE_S = 30.0
# If a rank fails, others that waited for it fail too. Whose failure came first is known a moment later.
HEAR_S = 1.0
# linux/prctl.h
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Begin:
    """The start of a trial: the ranks meet at a store of this name, at rank 0's port."""

    policy: Policy
    effort: Effort
    get_none: bool
    port: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """A rank's failure, and its moment on `time.monotonic`, which all processes of a machine share."""

    failure: Failure
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Here:
    """A rank is ready for a trial, or has ended it: with its peak memory as (allocated, reserved) in MiB."""

    peak_mib: tuple[float, float] = (0.0, 0.0)


@dataclass(slots=True)
class _Follower:
    rank: int
    pid: int
    pipe: Connection
    answers: queue.SimpleQueue[_Here]


class Followers:
    """The processes of all ranks but the first."""

    def __init__(self, setting: Setting) -> None:
        """Forks them. To be called while this process has one thread and no CUDA context."""
        self._setting = setting
        self._followers: list[_Follower] = []
        self._failed: list[_Failed] = []
        self._has_heard = threading.Event()
        self._store: Any = None
        self._trials = 0
        self._is_building = False
        self._kills_before = kernel_oom_kills()
        # a rank's error is handled here; NCCL's own watchdog would end the process
        os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
        if sys.platform == "linux":  # all ranks are here: nothing listens for other hosts
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        for rank in range(1, setting.ranks):
            self._fork(rank)

    def _fork(self, rank: int) -> None:
        worker, (ours, theirs) = os.getpid(), multiprocessing.Pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _end_with(worker)
                for pipe in (ours, *(one.pipe for one in self._followers)):  # else nobody would see a pipe's end
                    pipe.close()
                _Rank(self._setting, rank, theirs).follow()
            finally:
                os._exit(0)
        theirs.close()
        self._followers.append(_Follower(rank, pid, ours, queue.SimpleQueue()))

    def build(self) -> None:
        """Begins to build the workload in all of them; returns at once. A second call does nothing."""
        if self._is_building:
            return
        self._is_building = True
        self._tell(BUILD)
        for follower in self._followers:
            threading.Thread(target=self._listen, args=[follower], daemon=True).start()

    def lead(
        self, policy: Policy, effort: Effort, trial: Callable[[TrialGroup], Measurement], *, get_none: bool
    ) -> Outcome:
        """Runs the trial as rank 0, and the same steps on all others.

        Samples are those of all ranks, peaks of memory the largest of any. A failure of any rank is the trial's: of
        several, the first.
        """
        self._trials += 1
        try:
            name, port = f"trial {self._trials}", self._port()
            begin = _Begin(policy=policy, effort=effort, get_none=get_none, port=port, name=name)
            measured, others_mib = self._trial(begin, trial)
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything, SystemExit too
            return self._first_failure(error)
        allocated, reserved = zip((measured.peak_allocated_mib, measured.peak_reserved_mib), *others_mib, strict=True)
        return replace(
            measured,
            devices=self._setting.ranks,
            samples_per_step=self._setting.ranks * measured.samples_per_step,
            peak_allocated_mib=max(allocated),
            peak_reserved_mib=max(reserved),
        )

    def _port(self) -> int:
        """Returns the port of the store at which all ranks meet, which is opened once."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not say that it exports them

        if self._store is None:  # by itself it listens on all interfaces, and trusts whoever comes
            listener = socket.create_server((LOCALHOST, 0))
            port, handle = listener.getsockname()[1], listener.detach()
            self._store = TCPStore(LOCALHOST, port, is_master=True, wait_for_workers=False, master_listen_fd=handle)
        return int(self._store.port)

    def _trial(
        self, begin: _Begin, trial: Callable[[TrialGroup], Measurement]
    ) -> tuple[Measurement, list[tuple[float, float]]]:
        """Returns rank 0's measurement, and the peaks of the others."""
        from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # as above

        from amptune.measure.bench.trial_group import TrialGroup, joined

        self._tell(pickle.dumps(begin))
        self._answers(begin.effort.time_limit_s)
        with joined(0, self._setting.ranks, PrefixStore(begin.name, self._store)):
            measured = trial(TrialGroup(get_none=begin.get_none, tell=self._tell))
            self._tell(LEAVE)
        return measured, [one.peak_mib for one in self._answers(LEAVE_S)]

    def _answers(self, limit_s: float) -> list[_Here]:
        """Waits until all ranks have answered. Raises `TooSlowError` if one does not, `RuntimeError` if one failed."""
        from amptune.measure.bench.failures import TooSlowError

        until_s = time.monotonic() + limit_s
        try:
            found = [one.answers.get(timeout=max(0.0, until_s - time.monotonic())) for one in self._followers]
        except queue.Empty:
            raise TooSlowError(f"a rank has not answered within {limit_s:.0f} s") from None
        if self._failed:
            raise RuntimeError("another rank has failed")
        return found

    def _first_failure(self, error: BaseException) -> Failure:
        """Returns rank 0's own failure, or another rank's that came before."""
        from amptune.measure.bench.failures import failure_of

        at_s = time.monotonic()
        traceback.print_exception(error)  # into the worker's log
        self._has_heard.wait(HEAR_S)
        return min([*self._failed, _Failed(failure=failure_of(error), at_s=at_s)], key=lambda one: one.at_s).failure

    def _tell(self, message: bytes) -> None:
        for follower in self._followers:
            with suppress(OSError):  # it has died, which its listener hears
                follower.pipe.send_bytes(message)

    def _listen(self, follower: _Follower) -> None:
        has_failed = False
        try:
            while not has_failed:
                said = follower.pipe.recv()
                has_failed = isinstance(said, _Failed)
                self._hear(said) if has_failed else follower.answers.put(said)
        except (EOFError, OSError):
            code = os.waitstatus_to_exitcode(os.waitpid(follower.pid, 0)[1])
            failure = death_of(f"process of rank {follower.rank}", code, self._setting.log, self._kills_before)
            self._hear(_Failed(failure=failure, at_s=0.0))  # the first: none dies because another rank has failed

    def _hear(self, failed: _Failed) -> None:
        """Ends all waiting for the ranks: this worker's part of the trial fails as well."""
        from amptune.measure.bench.trial_group import end_waiting

        self._failed.append(failed)
        self._has_heard.set()
        end_waiting()
        for follower in self._followers:
            follower.answers.put(_Here())


class _Rank:
    """One of the other ranks, in its own process."""

    def __init__(self, setting: Setting, rank: int, pipe: Connection) -> None:
        self._setting = setting
        self._rank = rank
        self._pipe = pipe
        self._bench: Bench | None = None
        self._batches: Batches | None = None

    def follow(self) -> None:
        """Builds the workload when told so, and takes part in trials, until the worker ends or it fails itself."""
        try:
            while True:
                message = self._pipe.recv_bytes()
                if message == BUILD:
                    self._bench = built_bench(self._setting, self._rank)
                else:
                    self._take_part(pickle.loads(message))  # noqa: S301  # what the worker has pickled
        except EOFError:  # the worker has ended
            return
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything, SystemExit too
            self._fail(error)

    def _take_part(self, begin: _Begin) -> None:
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # as above

        from amptune.measure.bench.trial_group import joined

        assert self._bench is not None  # noqa: S101  # it is told to build first
        bench, store = self._bench, TCPStore(LOCALHOST, begin.port)
        self._pipe.send(_Here())
        with joined(self._rank, self._setting.ranks, PrefixStore(begin.name, store)):
            try:
                peak_mib = self._steps(bench, begin)
            except BaseException as error:  # noqa: BLE001  # as above
                self._fail(error)
        bench.release()
        self._pipe.send(_Here(peak_mib=peak_mib))

    def _steps(self, bench: Bench, begin: _Begin) -> tuple[float, float]:
        """Runs the steps that rank 0 asks for; returns the peak of memory. Of a sharded model it checks its part."""
        from amptune.measure.bench.trial_group import NEXT_BLOCK, NEXT_STEP, TrialGroup
        from amptune.measure.loop.own_loop import feeding

        policy, group = begin.policy, TrialGroup(get_none=begin.get_none)
        with (
            feeding(bench, policy, begin.effort) as batches,
            bench.on_device(policy, batches, group=group) as (_, step),
        ):
            self._batches, steps = batches, 0
            while (message := self._pipe.recv_bytes()) != LEAVE:
                if message == NEXT_STEP:
                    step() if steps else step.first_step()
                    steps += 1
                elif message == NEXT_BLOCK:
                    batches.begin_block()
            if bench.workload.parallel is not None and steps:
                step.require_sound(steps, bench.nonfinite)
            return bench.peak_mib()

    def _fail(self, error: BaseException) -> NoReturn:
        """Tells rank 0 of an error and ends this process, and with it all waiting for this rank."""
        from amptune.measure.bench.failures import failure_of
        from amptune.measure.loop.own_loop import loader_has_failed

        at_s = time.monotonic()
        traceback.print_exception(error)  # into the worker's log
        own = failure_of(error)
        exception = LOADER_FAILED if loader_has_failed(self._batches) else own.exception
        failure = replace(own, message=f"{own.message} (rank {self._rank})", exception=exception)
        with suppress(OSError):  # the worker has ended too
            self._pipe.send(_Failed(failure=failure, at_s=at_s))
        os._exit(1)


def _end_with(worker: int) -> None:
    """Lets the kernel end this process together with its parent, whatever it is doing then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != worker:  # it has ended before
        os._exit(1)
