"""Tasks inside a worker process. Its stdout and stderr go to the study's log, its answers through the pool's pipe."""

from __future__ import annotations

import io
import math
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, TypeVar

from amptune.measure.bench.stillness import ProcessIdentity, Stillness
from amptune.measure.results.outcome import Effort, Failure, Outcome
from amptune.measure.results.subject import Prepared
from amptune.measure.workers.cpu_share import cores, rarely_collecting_garbage, share_compilers, sharing_threads
from amptune.measure.workers.followers import Followers
from amptune.measure.workers.log_stream import LogStream
from amptune.measure.workers.setting import Setting, built_bench
from amptune.measure.workers.source import digest_of
from amptune.policy.settings import Policy
from amptune.workload.user_errors import tell_of_user_code

if TYPE_CHECKING:
    from amptune.measure.bench.bench import Bench
    from amptune.measure.results.half_effects import Half, ModuleTrace, Sensitivity
    from amptune.measure.results.loop_timing import LoaderTrial
    from amptune.measure.results.step_profile import StepProfile
    from amptune.measure.results.training_runs import LossCurve, Parity, Reference

__all__ = [
    "Activity",
    "Reply",
    "get_ready",
    "import_compiler",
    "is_measuring",
    "judge",
    "measure",
    "prepare",
    "profile",
    "refer",
    "sense",
    "start",
    "trace",
    "train_long",
    "try_loaders",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """An outcome; `broken` if its process is unusable from now on: a sticky CUDA error, a group with a failed rank."""

    outcome: Outcome
    broken: bool = False


# Just enough steps to compile a policy's graphs.
A_FEW_STEPS = Effort(warmup_s=0.0, measure_s=0.0, settle_s=0.0, min_steps=1)


# The longest note of an activity, in bytes.
LONGEST = 1024


class Activity:
    """A note of what a worker is doing and since when, passed to its process when that is started."""

    def __init__(self, context: BaseContext) -> None:
        self._text = context.RawArray("c", LONGEST)
        self.note("starting")

    def note(self, doing: str) -> None:
        """Notes what begins now, on the clock that all processes share."""
        self._text.value = f"{time.monotonic():.1f} {doing}".encode()[: LONGEST - 1]

    def __str__(self) -> str:
        since_s, _, doing = self._text.value.decode(errors="replace").partition(" ")
        return f"{doing} for {time.monotonic() - float(since_s):.0f} s"


class _State:
    """The process's single bench. The first task builds it, so a failed start-up is the answer to that task."""

    setting: Setting
    followers: Followers | None = None
    bench: Bench | None = None
    is_measuring = False
    began_s = 0.0
    """The moment of the process's start, on `time.monotonic`."""


def start(setting: Setting, environment: Mapping[str, str], start_method: str | None, activity: Activity) -> None:
    """Initializes a pool's process: takes the parent's environment, sends output to the log, ignores Ctrl-C.

    Processes of the user's code (a DataLoader's) start as in training, by `start_method`.
    """
    os.environ.clear()
    os.environ.update(environment)
    multiprocessing.set_start_method(start_method, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = LogStream(setting.log, "a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    stream = io.TextIOWrapper(io.BufferedWriter(log), encoding="utf-8", errors="replace", line_buffering=True)
    sys.stdout = sys.stderr = stream
    if setting.source.target is not None:
        from amptune.workload.targets import Target

        sys.argv = [Target(setting.source.target).place, *setting.source.arguments]
    _State.setting, _State.is_measuring, _State.began_s = setting, True, time.monotonic()
    _State.followers = Followers(setting) if setting.ranks > 1 else None
    tell_of_user_code(activity.note)


def is_measuring() -> bool:
    """Returns True in a worker process."""
    return _State.is_measuring


def prepare() -> Prepared:
    """Builds the workload, checks its inputs and its own step, inspects its model.

    Raises `TargetError`, `UserCodeError` or `DeviceError`.
    """
    from amptune.hardware.detect import probe
    from amptune.measure.bench.peak_memory import available_mib
    from amptune.measure.loop.input_checks import NO_LOADER, changing_shapes, require_sound_input
    from amptune.measure.loop.step_mistakes import batches_that_go_on, mistakes_in_step
    from amptune.measure.modules.inspection import inspect_model

    limit = _State.setting.memory_mib
    try:
        bench = _bench()
        start_s = time.monotonic() - _State.began_s
        batches, draw_s = bench.drawn.sequence_in_time()
        loader = require_sound_input(bench) if batches else NO_LOADER
        subject = inspect_model(bench, digest_of(_State.setting.source))
        return Prepared(
            hardware=probe(_State.setting.device),
            subject=subject,
            noticed=(*mistakes_in_step(bench), *batches_that_go_on(bench), *changing_shapes(bench), *subject.noticed)
            if batches
            else (),
            memory_mib=min(available_mib(bench.device), math.inf if limit is None else limit),
            start_s=start_s,
            draw_s=draw_s,
            batches=max(1, batches),
            devices=_State.setting.ranks,
            own_parallel=bench.workload.parallel is not None,
            most_samples=loader.samples,
            has_data_loader=loader.is_data_loader,
        )
    except Exception:
        traceback.print_exc()  # into the log; the caller gets only the message
        raise


def get_ready(policy: Policy, at_once: int, for_turns_of: int | None = None) -> Outcome | None:
    """Builds the workload before its first trial and warms the process up; `at_once` workers do so at the same time.

    For turns of the loop of so many batches, draws these, unless a loader gives them. If the policy uses torch.compile,
    compiles it (CPU work) and returns the outcome of its first steps. A failure is reported by the trial. With other
    ranks it ends the process, since their group is lost.
    """
    outcome = _attempt(lambda: _ready(policy, at_once, for_turns_of))
    if _State.followers is not None and isinstance(outcome, Failure):
        os._exit(1)
    return outcome


def _ready(policy: Policy, at_once: int, for_turns_of: int | None) -> Outcome | None:
    from amptune.measure.loop.own_loop import measure_in_loop
    from amptune.measure.workers.warm_start import warm_up

    with sharing_threads(at_once):
        bench = _bench()
        warm_up(bench.device)
        draws = for_turns_of is not None and bench.workload.loader is None
        if draws:
            bench.drawn.fresh_sequence(policy.batch_size or bench.workload.batch_size, for_turns_of)
    if policy.compile == "off":
        return None
    share_compilers(at_once)
    with rarely_collecting_garbage():
        effort = replace(A_FEW_STEPS, batches=for_turns_of)
        return measure_in_loop(bench, policy, effort) if draws else bench.measure(policy, effort)


def import_compiler() -> None:
    """Imports what torch.compile needs at its first graph, which takes 3 s, while the process has nothing to do."""
    import torch._inductor.compile_fx  # noqa: F401


def measure(policy: Policy, effort: Effort, beside: Sequence[ProcessIdentity] = ()) -> Reply:
    """Runs one trial. The processes that compile `beside` it stop while a block of steps is timed, unless it says no.

    A bench that cannot be built, or be restored after a CUDA error, also gives a failure.
    """
    from amptune.measure.bench.failures import cuda_is_broken, failure_of
    from amptune.measure.loop.own_loop import measure_in_loop
    from amptune.measure.workers.kept_artifacts import keep_artifacts

    stillness = Stillness(beside, go_on=effort.beside_compiling)
    try:
        bench = _bench()
        if effort.in_loop:
            outcome = measure_in_loop(bench, policy, effort, stillness)
        else:
            outcome = bench.measure(policy, effort, stillness=stillness)
        keep_artifacts(policy, outcome, bench.device, _State.setting.artifacts)
    except Exception as error:  # noqa: BLE001  # whatever it was, it costs this worker and this trial
        traceback.print_exc()  # into the log
        return Reply(outcome=failure_of(error), broken=True)
    is_lost = _State.followers is not None and isinstance(outcome, Failure)
    return Reply(outcome=outcome, broken=is_lost or cuda_is_broken())


def try_loaders(policy: Policy, seconds: float) -> tuple[LoaderTrial, ...] | Failure:
    """Times steps of the user's loop with other settings of its DataLoader, for about `seconds`."""
    from amptune.measure.loop.loader_trials import try_loaders

    return _attempt(lambda: try_loaders(_bench(), policy, seconds, cores()))


def refer(fp32: Policy, seconds: float) -> Reference | Failure:
    """Trains in FP32 for about `seconds`, to make the reference for the numerics of policies."""
    from amptune.measure.numerics.reference import make_reference

    return _attempt(lambda: make_reference(_bench(), fp32, seconds))


def judge(policy: Policy, reference: Reference, limit_s: float) -> Parity:
    """Compares training under the policy with the reference."""
    from amptune.measure.numerics.parity import judge

    start_s = time.perf_counter()
    bench = _bench()
    return judge(bench, policy, reference, limit_s - (time.perf_counter() - start_s))


def train_long(policy: Policy, steps: int, seed: int, seconds: float) -> LossCurve | Failure:
    """Trains in the user's loop for so many steps, or until the seconds are over."""
    from amptune.measure.loop.long_training import train_long

    return _attempt(lambda: train_long(_bench(), policy, steps, seed, seconds))


def trace(policy: Policy, fp32: Policy) -> tuple[ModuleTrace, ...] | Failure:
    """Traces one step module by module, to find where numbers go wrong."""
    from amptune.measure.numerics.traces import trace_step

    return _attempt(lambda: trace_step(_bench(), policy, fp32))


def sense(policy: Policy, dtypes: tuple[Half, ...]) -> Sensitivity | Failure:
    """Measures the effect of half precision on each module alone."""
    from amptune.measure.modules.sensitivity_pass import sense

    return _attempt(lambda: sense(_bench(), policy, dtypes))


def profile(policy: Policy) -> StepProfile | Failure:
    """Profiles the time of a step."""
    from amptune.measure.breakdown.profiler import profile_step

    return _attempt(lambda: profile_step(_bench(), policy))


def _attempt(act: Callable[[], T]) -> T | Failure:
    from amptune.measure.bench.failures import failure_of

    try:
        return act()
    except BaseException as error:  # noqa: BLE001  # the user's code may raise anything, SystemExit too
        traceback.print_exc()  # into the log
        return failure_of(error)


def _bench() -> Bench:
    if _State.bench is None:
        if _State.followers is not None:
            _State.followers.build()
        _State.bench = built_bench(_State.setting, leader=_State.followers)
    return _State.bench
