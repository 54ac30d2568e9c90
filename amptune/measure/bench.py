"""The bench: one workload built once in a worker, and measured under one policy after another."""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from amptune.errors import TargetError
from amptune.hardware.nvml import NvmlGpu
from amptune.measure.clock import clock_for
from amptune.measure.failing import NonFiniteError, failure_of
from amptune.measure.memory import memory_for
from amptune.measure.outcome import Effort, Measurement, Outcome
from amptune.measure.stepping import Stepper
from amptune.policy.settings import Policy
from amptune.runtime.applying import apply
from amptune.runtime.nested import map_tensors
from amptune.runtime.tuned import Tuned
from amptune.workload.protocol import Workload
from amptune.workload.user_errors import user_code

__all__ = ["Bench"]

SEED = 0
# Enough different batches that a step cannot live on one cached input, few enough to keep on the device.
BATCHES = 3
# The first steps' losses are kept to compare policies; fewer where a step is slow.
FIRST_STEPS = 8
FIRST_STEPS_S = 2.0
# Warm-up is over when two successive blocks of steps agree this well.
STEADY = 0.03
BLOCK_S = 0.1


class Bench:
    """Holds the model between trials: on the CPU, with its initial weights aside, so every trial starts the same.

    Building raises `TargetError` or `UserCodeError`. A trial that fails is a value of `measure`; it raises only
    where the device is beyond giving its memory back.
    """

    def __init__(self, workload: Workload, device: torch.device, nvml: NvmlGpu | None = None) -> None:
        self.workload = workload
        self.device = device
        self._nvml = nvml
        self._clock = clock_for(device)
        self._memory = memory_for(device)
        self._batches: dict[int, list[Any]] = {}
        self._build()

    def _build(self) -> None:
        self.model = _built_model(self.workload)
        self._initial = [tensor.detach().clone() for tensor in self._state()]
        self._kinds = self._kinds_of_state()
        self._modes = {module: module.training for module in self.model.modules()}

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        """Trains for a moment under the policy, from the initial weights."""
        try:
            with self.on_device(policy) as (tuned, stepper):
                return self._measure(tuned, stepper, effort)
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything, SystemExit too
            traceback.print_exc()  # into the worker's log
            return failure_of(error)
        finally:
            self.release()

    @contextmanager
    def on_device(self, policy: Policy, batches: Iterator[Any] | None = None) -> Iterator[tuple[Tuned, Stepper]]:
        """The model on its device under the policy, and its training step; everything is put back after.

        The step takes the next of `batches`, which must be on the device; by default a few cached ones in turn.
        """
        self._restore()
        batches = batches or cycle(self._on_device(policy.batch_size or self.workload.batch_size))
        self._memory.reset()
        self.model.to(self.device)
        _seed_everything()
        with apply(policy, self.model, any_hardware=True) as tuned:
            yield tuned, Stepper(self.workload, tuned, batches)

    def _measure(self, tuned: Tuned, stepper: Stepper, effort: Effort) -> Measurement:
        losses, norm, last_ms = self._first_steps(stepper)
        slow = effort.abandon_above_ms is not None and last_ms > effort.abandon_above_ms
        start = time.perf_counter()
        warmup_steps = len(losses) if slow else len(losses) + self._warm_up(stepper, last_ms, effort)
        warmup_s = time.perf_counter() - start
        energy_j = self._nvml.energy_j() if self._nvml else None
        times = self._sample(stepper, last_ms, effort, slow=slow)
        used_j = _difference(self._nvml.energy_j() if self._nvml else None, energy_j)
        if not math.isfinite(stepper.last_loss):
            raise NonFiniteError(f"the loss is {stepper.last_loss} after {warmup_steps + len(times)} steps")
        skipped = stepper.require_sound(self.model, warmup_steps + len(times))
        samples = (tuned.policy.batch_size or self.workload.batch_size) * tuned.accumulate
        allocated, reserved = self._memory.peak_mib()
        return Measurement(
            samples_per_step=samples,
            step_ms=tuple(times),
            warmup_s=warmup_s,
            warmup_steps=warmup_steps,
            peak_allocated_mib=allocated,
            peak_reserved_mib=reserved,
            losses=losses,
            gradient_norm=norm,
            skipped_share=skipped,
            alloc_retries=self._memory.alloc_retries(),
            energy_j_per_sample=None if used_j is None else used_j / (samples * len(times)),
            clock_event_reasons=self._nvml.clock_event_reasons() if self._nvml else None,
            abandoned=slow,
        )

    def _first_steps(self, stepper: Stepper) -> tuple[tuple[float, ...], float | None, float]:
        """(losses, gradient norm of the first, time of the last in ms)."""
        start = time.perf_counter()
        loss, norm = stepper.first_step()
        losses = [loss]
        took_ms = 0.0
        while len(losses) < FIRST_STEPS and (len(losses) < 3 or time.perf_counter() - start < FIRST_STEPS_S):
            (took_ms,) = self._clock.time_steps(lambda: losses.append(float(stepper())), 1)
        broken = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if broken is not None:
            raise NonFiniteError(f"the loss is {losses[broken]} at step {broken + 1}")
        return tuple(losses), norm, took_ms

    def _warm_up(self, stepper: Stepper, step_ms: float, effort: Effort) -> int:
        """Runs blocks of steps until two agree; returns how many steps that took."""
        steps, before, deadline = 0, math.inf, time.perf_counter() + effort.warmup_s
        while time.perf_counter() < deadline:
            block = self._clock.time_steps(stepper, _block_length(step_ms))
            steps += len(block)
            step_ms = statistics.median(block)
            if abs(step_ms - before) <= STEADY * step_ms:
                break
            before = step_ms
        return steps

    def _sample(self, stepper: Stepper, step_ms: float, effort: Effort, *, slow: bool) -> list[float]:
        """Every timed step in ms."""
        times: list[float] = []
        enough_ms = 0.0 if slow else 1000 * effort.measure_s
        wanted = 2 if slow else effort.min_steps
        while (sum(times) < enough_ms or len(times) < wanted) and len(times) < effort.max_steps:
            times += self._clock.time_steps(stepper, min(_block_length(step_ms), effort.max_steps - len(times)))
            step_ms = statistics.median(times)
        return times

    def _on_device(self, samples: int) -> list[Any]:
        cached = self._cached_batches(samples)
        return [map_tensors(lambda tensor: tensor.to(self.device, copy=True), batch) for batch in cached]

    def _cached_batches(self, samples: int) -> list[Any]:
        """The same batches for every policy, drawn once under a fixed seed and kept on the CPU."""
        if samples not in self._batches:
            _seed_everything()
            with user_code(f"batch({samples})"):
                self._batches[samples] = [self.workload.batch(samples) for _ in range(BATCHES)]
        return self._batches[samples]

    def _state(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _kinds_of_state(self) -> list[tuple[torch.Size, torch.dtype, bool]]:
        return [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in self._state()]

    @torch.no_grad()
    def _restore(self) -> None:
        if self._kinds_of_state() != self._kinds:
            self._build()  # training made, dropped or converted a parameter or buffer: copying would not undo that
        for tensor, initial in zip(self._state(), self._initial, strict=True):
            if 0 not in tensor.stride():  # an expanded buffer: no step can have written to it, nor can this
                tensor.copy_(initial)
            tensor.grad = None
        for module, training in self._modes.items():
            module.training = training

    def release(self) -> None:
        """Gives the device's memory back, so that another worker finds it free."""
        for parameter in self.model.parameters():
            parameter.grad = None
        gc.collect()
        if self.device.type == "cuda":
            self.model.to("cpu")
            torch.cuda.empty_cache()


def _built_model(workload: Workload) -> torch.nn.Module:
    """The workload's model under a fixed seed, its lazy modules initialised. Raises `TargetError`, `UserCodeError`."""
    _seed_everything()
    with user_code("model()"):
        model = workload.model()
    if not isinstance(model, torch.nn.Module):
        raise TargetError(f"{workload.name}: model() returned {type(model).__name__}, not a torch.nn.Module")
    if any(is_lazy(parameter) for parameter in (*model.parameters(), *model.buffers())):
        _initialise_lazy(model, workload)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TargetError(f"{workload.name}: the model has no parameters that require a gradient; nothing to train")
    return model


def _initialise_lazy(model: torch.nn.Module, workload: Workload) -> None:
    """Runs one forward pass, which is what gives lazy modules their shapes."""
    if workload.loss is None:
        raise TargetError(f"{workload.name}: its lazy modules have no shapes yet; run one forward pass in model()")
    with torch.no_grad(), user_code("the first forward pass, for lazy modules"):
        workload.loss(model, workload.batch(workload.batch_size))


def _seed_everything() -> None:
    import random

    import numpy as np

    random.seed(SEED)
    np.random.seed(SEED)  # users draw from the global generator; that is the one to seed
    torch.manual_seed(SEED)


def _block_length(step_ms: float) -> int:
    return max(1, min(50, round(1000 * BLOCK_S / max(step_ms, 0.01))))


def _difference(after: float | None, before: float | None) -> float | None:
    return None if after is None or before is None else after - before
