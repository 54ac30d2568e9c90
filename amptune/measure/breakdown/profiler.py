"""Profiling of a few training steps with PyTorch's profiler; each module's forward is marked as a range."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.hooks import RemovableHandle

from amptune.measure.bench.bench import Bench
from amptune.measure.bench.clocks import FEW_STEPS, clock_for, finish
from amptune.measure.breakdown.figures import distil
from amptune.measure.breakdown.step_trace import MODULE_RANGE, STEP_RANGE, StepTrace, read_trace
from amptune.measure.results.step_profile import StepProfile
from amptune.policy.settings import Policy

__all__ = ["profile_step"]

# Enough steps in a row for a median, in a time that a user will wait for a diagnosis; no fewer than are profiled.
TIMED_STEPS, TIMED_S, PROFILED_STEPS = 20, 2.0, 3
# No further step is profiled above this. An operation or kernel takes about 1 kB while its trace is read: 0.5 GB.
MAX_EVENTS = 500_000


def profile_step(bench: Bench, policy: Policy, *, steps: int = PROFILED_STEPS) -> StepProfile:
    """Trains a few steps under the policy and returns the profile of a step. Raises any error of the step.

    Each step is profiled separately: the wait for the device at its end costs nothing extra, and PyTorch's own events
    are in memory for one step at a time. Modules of a compiled model cannot be watched, because hooks would be
    compiled with them.
    """
    attributed = policy.compile == "off" and not policy.cuda_graphs
    try:
        with bench.on_device(policy) as (_, stepper):
            step_ms, host_ms = _timed(stepper, bench.device)
            with _ranges(bench.model) if attributed else nullcontext():
                traces = _traces(stepper, bench.device, steps)
    finally:
        bench.release()
    return distil(
        traces,
        device="cuda" if bench.device.type == "cuda" else "cpu",
        step_ms=step_ms,
        host_ms=host_ms,
        attributed=attributed,
    )


def _timed(step: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Returns (step time in a row of steps, host time of a step on an idle device) in ms; warms up first."""
    clock = clock_for(device)
    *_, last_ms = clock.time_steps(step, FEW_STEPS)  # kernels are loaded, cuDNN's plans searched, graphs compiled
    count = max(PROFILED_STEPS, min(TIMED_STEPS, int(1000 * TIMED_S / last_ms)))
    step_ms = statistics.median(clock.time_steps(step, count))
    return step_ms, statistics.median(_host_ms(step, device) for _ in range(min(count, FEW_STEPS)))


def _host_ms(step: Callable[[], object], device: torch.device) -> float:
    """Returns the time the host takes to issue a step, including any wait for the device inside the step."""
    finish(device)
    started_s = time.perf_counter()
    step()
    took_ms = 1000 * (time.perf_counter() - started_s)
    finish(device)
    return took_ms


def _traces(step: Callable[[], object], device: torch.device, steps: int) -> list[StepTrace]:
    """Returns one trace for each step, fewer if they are too large."""
    traces: list[StepTrace] = []
    events = 0
    _recorded(step, device)  # the first start loads the vendor's profiling library, which delays the step
    while len(traces) < steps and events < MAX_EVENTS:
        traces.append(read_trace(_events(_recorded(step, device))))
        events += len(traces[-1].ops) + len(traces[-1].kernels)
    return traces


def _recorded(step: Callable[[], object], device: torch.device) -> profile:
    """Returns the profiler after it recorded one step."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    finish(device)
    profiler = profile(activities=activities, record_shapes=True)
    with profiler:
        with record_function(STEP_RANGE):
            step()
        finish(device)
    return profiler


def _events(profiler: profile) -> list[dict[str, Any]]:
    """Reads the events from the trace file, the only complete form that PyTorch provides."""
    with tempfile.TemporaryDirectory(prefix="amptune-") as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return events


@contextmanager
def _ranges(model: nn.Module) -> Iterator[None]:
    """Marks every call of a module's forward as a range in the profile."""
    with ExitStack() as hooks:
        for path, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                for hook in _mark(module, path):
                    hooks.enter_context(hook)
        yield


def _mark(module: nn.Module, path: str) -> tuple[RemovableHandle, RemovableHandle]:
    """Opens a range before all other hooks of the call; closes it after them, even if forward raises."""
    open_ranges: list[record_function] = []

    def enter(_module: nn.Module, _inputs: Any) -> None:
        open_ranges.append(record_function(MODULE_RANGE + path))
        open_ranges[-1].__enter__()  # type: ignore[no-untyped-call]  # torch has not typed it

    def leave(_module: nn.Module, _inputs: Any, _output: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    return (
        module.register_forward_pre_hook(enter, prepend=True),
        module.register_forward_hook(leave, always_call=True),
    )
