"""The bench: one workload, built once in a worker and measured under one policy after another."""

from __future__ import annotations

import gc
import math
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy

from amptune.changes.tensor_tree import map_tensors, tensors_in
from amptune.errors import TargetError
from amptune.hardware.nvml import NvmlGpu
from amptune.measure.bench.clocks import clock_for
from amptune.measure.bench.compilation import Compilations
from amptune.measure.bench.drawn_batches import DrawnBatches, seed_everything
from amptune.measure.bench.failures import NonFiniteError, failure_of
from amptune.measure.bench.peak_memory import memory_for
from amptune.measure.bench.readings import Instruments
from amptune.measure.bench.step import Stepper, nonfinite_in
from amptune.measure.bench.step_timing import StepTimer, Surroundings, WarmUp
from amptune.measure.bench.stillness import Stillness
from amptune.measure.results.outcome import Effort, Measurement, Outcome
from amptune.policy.settings import Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.graphs.check import CHECK_EVERY
from amptune.runtime.graphs.dispatch import Recordings
from amptune.runtime.graphs.graphed_model import GraphedModel
from amptune.runtime.tuned import Tuned
from amptune.workload.user_errors import user_code
from amptune.workload.workload import Workload

__all__ = ["Batches", "Bench"]

SEED = 0
# What is not timed needs no more different batches.
FEW_BATCHES = 3
# The losses of the first steps are kept to compare policies; fewer if a step is slow. CUDA graphs are recorded in the
# second step, so only a later step shows their step time.
FIRST_STEPS = 8
LEAST_FIRST_STEPS, LEAST_FIRST_STEPS_COMPILED = 3, 5
FIRST_STEPS_S = 1.0
# Waiting for graphs that are still compiled or recorded takes at most this share of a trial's time limit, twice.
SETTLE_SHARE = 1 / 4
# A step too slow to be of interest is timed only this often.
SLOW_STEPS = 2
# Initial weights of at most this share of the device's memory are kept on it while training restarts from them often.
NEAR_SHARE = 1 / 32
# CUDA graphs keep their memory between trials of one policy, up to this share of the device's memory.
GRAPHS_SHARE = 1 / 8


class Batches(Protocol):
    """An endless iterator of batches on the device."""

    def __iter__(self) -> Iterator[Any]: ...

    def __next__(self) -> Any: ...

    def begin_block(self) -> None:
        """Is called before each block of steps that is timed."""
        ...


class _Sequence:
    """An endless cycle of batches. Each block begins with the first of them, after `begin`."""

    def __init__(self, batches: Sequence[Any], begin: Callable[[], None]) -> None:
        self._batches, self._begin, self._at = batches, begin, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self._at += 1
        return self._batches[(self._at - 1) % len(self._batches)]

    def begin_block(self) -> None:
        self._at = 0
        self._begin()


class Bench:
    """A built workload that runs trials. Between them the model is on the CPU; all start from its initial weights.

    `seed` is used for weights, batches and training. A trial whose peak is above `memory_mib` fails. Building raises
    `TargetError` or `UserCodeError`. `measure` returns a failed trial as a value; it raises only if the device's memory
    cannot be freed.
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        nvml: NvmlGpu | None = None,
        *,
        seed: int = SEED,
        memory_mib: float | None = None,
    ) -> None:
        self.workload = workload
        self._seed = seed
        self.device = device
        self._memory_mib = memory_mib
        self._clock = clock_for(device)
        self._memory = memory_for(device)
        self._sampler = StepTimer(self._clock, Instruments(nvml, self._memory))
        self.drawn = DrawnBatches(workload, seed)
        self._compilations = Compilations()
        self._tuned: Tuned | None = None
        self._stays = False
        self._build()

    def _build(self) -> None:
        self._compilations.forget()
        self.model = _built_model(self.workload, self._seed)
        self._initial = list(map(self._kept, self._state()))
        self._near: list[torch.Tensor] | None = None  # only while the model stays on the device
        self._initial_sums: tuple[float, ...] | None = None
        self.nonfinite = frozenset(nonfinite_in(self.model))
        self._kinds = self._kinds_of_state()
        self._modes = {module: module.training for module in self.model.modules()}

    def _kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor's value, for good: what is trained on another device is a copy of it already."""
        value = tensor.detach()
        return value if tensor.device.type == "cpu" and self.device.type != "cpu" else value.clone()

    def measure(
        self,
        policy: Policy,
        effort: Effort,
        batches: Batches | None = None,
        stillness: Stillness | None = None,
    ) -> Outcome:
        """Trains for a short time under the policy, from the initial weights.

        Without `batches`, on a sequence that is the same for every policy; blocks begin with the same random numbers.
        `stillness` stops the processes that compile beside it while steps are timed.
        """
        try:
            return self._trial(policy, effort, batches, stillness or Stillness())
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything, SystemExit too
            traceback.print_exc()  # into the worker's log
            return failure_of(error)
        finally:
            self.release()

    def _trial(self, policy: Policy, effort: Effort, batches: Batches | None, stillness: Stillness) -> Measurement:
        """Runs one trial in its own frame: batches and optimizer state are freed before memory is given back."""
        if batches is None:
            size = policy.batch_size or self.workload.batch_size
            batches = _Sequence(self._on_device(size, effort.batches), lambda: seed_everything(self._seed))
        with self.on_device(policy, batches) as (tuned, stepper):
            around = Surroundings(
                begin=batches.begin_block, prepared=partial(self._prepared, tuned), stillness=stillness
            )
            return self._measure(tuned, stepper, effort, around)

    @contextmanager
    def on_device(
        self, policy: Policy, batches: Iterator[Any] | None = None, *, guarded: bool = False
    ) -> Iterator[tuple[Tuned, Stepper]]:
        """Yields the model on its device under the policy, and its training step; restores everything afterwards.

        Each step takes the next of `batches`, which must be on the device; the default is a cycle of a few batches.
        `guarded` steps run under the guard.
        """
        self._restore()
        self._compilations.begin(policy)
        batches = batches or cycle(self._on_device(policy.batch_size or self.workload.batch_size, FEW_BATCHES))
        self._memory.reset()
        self.model.to(self.device)
        if self._stays and self._near is None and self._is_small:
            self._near = [tensor.detach().clone() for tensor in self._state()]
        seed_everything(self._seed)
        # no guard for what is timed, whatever the environment says: its time would be in the figures
        with apply(policy, self.model, any_hardware=True, guard=guarded) as tuned:
            self._tuned = tuned
            if (recordings := _recordings_of(tuned)) is not None:
                recordings.checks = False  # their price is added, see below
            try:
                yield tuned, Stepper(self.workload, tuned, batches)
            finally:
                self._tuned = None

    def _measure(self, tuned: Tuned, stepper: Stepper, effort: Effort, around: Surroundings) -> Measurement:
        started_s = self._clock.now_s()
        effort = replace(effort, settle_s=min(effort.settle_s, SETTLE_SHARE * effort.time_limit_s))
        eager = tuned.policy.compile == "off" and not tuned.policy.cuda_graphs
        least = LEAST_FIRST_STEPS if eager else LEAST_FIRST_STEPS_COMPILED
        losses, norm, last_ms = self._first_steps(stepper, least)
        recordings = _recordings_of(tuned)
        price_ms = 0.0 if recordings is None else self._price_of_checks(recordings, stepper, last_ms)
        warm_s = self._clock.now_s()
        compiled = self._compilations.graphs
        slow = effort.abandon_above_ms is not None and last_ms > effort.abandon_above_ms
        warm_up = WarmUp(step_ms=last_ms) if slow else self._sampler.warm_up(stepper, last_ms, effort, around)
        warmup_s = self._clock.now_s() - warm_s
        effort = _glance(effort) if slow else effort
        sample = self._sampler.sample(stepper, warm_up.step_ms, effort, started_s, around)
        warmup_steps = len(losses) + warm_up.steps
        steps = warmup_steps + sample.steps
        if not math.isfinite(stepper.last_loss):
            raise NonFiniteError(f"the loss is {stepper.last_loss} after {steps} steps")
        skipped = stepper.require_sound(self.model, steps, self.nonfinite)
        taken = tuned.accumulate if self.workload.step is None else 1  # batches; the user's own step takes one
        samples = (tuned.policy.batch_size or self.workload.batch_size) * taken
        allocated, reserved = self._memory.peak_mib()
        self._require_within_limit(allocated)
        kept = sample.kept
        return Measurement(
            samples_per_step=samples,
            step_ms=tuple(ms + price_ms for ms in kept.step_ms),
            warmup_s=warmup_s,
            warmup_steps=warmup_steps,
            peak_allocated_mib=allocated,
            peak_reserved_mib=reserved,
            losses=losses,
            gradient_norm=norm,
            skipped_share=skipped,
            alloc_retries=self._memory.alloc_retries(),
            energy_j_per_sample=None if kept.energy_j is None else kept.energy_j / (samples * len(kept.step_ms)),
            clock_event_reasons=kept.after.clock_event_reasons,
            abandoned=slow,
            steady=warm_up.steady,
            discarded=sample.discarded,
            startup_s=max(0.0, warm_s - started_s - len(losses) * last_ms / 1000),
            graph_breaks=self._compilations.breaks,
            recompiled=self._compilations.graphs - compiled,
            settled=kept.settled,
            contaminated_by=kept.contaminated_by,
            sm_clock_mhz=kept.after.sm_clock_mhz,
            temperature_c=kept.after.temperature_c,
            host_delay=kept.host_delay,
        )

    def _price_of_checks(self, recordings: Recordings, stepper: Stepper, step_ms: float) -> float:
        """Returns the time in ms that comparing recordings with the model adds to a step in a long training.

        Its memory counts too. Raises `PolicyApplyError` if nothing was recorded, or if a replay differs.
        """
        recordings.require_some()
        checked_ms, before = math.inf, recordings.calls
        for _ in range(2):
            recordings.check_next()
            checked_ms = min(checked_ms, *self._clock.time_steps(stepper, 1))
        calls_per_step = (recordings.calls - before) / 2
        if recordings.is_doubted():
            self._clock.time_steps(stepper, 1)
        recordings.require_agreement()
        return max(0.0, checked_ms - step_ms) * calls_per_step / CHECK_EVERY

    def _prepared(self, tuned: Tuned) -> int:
        """Returns how many graphs were compiled or recorded so far."""
        recordings = _recordings_of(tuned)
        return self._compilations.begun + (0 if recordings is None else recordings.made)

    def _require_within_limit(self, peak_mib: float) -> None:
        """Raises `MemoryError` above the limit; only a CPU needs this, a GPU's allocator enforces its limit."""
        if self._memory_mib is not None and peak_mib > self._memory_mib:
            allowed = f"{self._memory_mib:,.0f}" if self._memory_mib >= 1 else f"{self._memory_mib:.2g}"
            raise MemoryError(f"its peak of {peak_mib:,.0f} MiB is above the {allowed} MiB allowed")

    def _first_steps(self, stepper: Stepper, least: int) -> tuple[tuple[float, ...], float | None, float]:
        """Returns (losses, gradient norm of the first step, time of the last step in ms)."""
        start_s = self._clock.now_s()
        loss, norm = stepper.first_step()
        losses = [loss]
        took_ms = 0.0
        while len(losses) < FIRST_STEPS and (len(losses) < least or self._clock.now_s() - start_s < FIRST_STEPS_S):
            (took_ms,) = self._clock.time_steps(lambda: losses.append(float(stepper())), 1)
        broken = next((i for i, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if broken is not None:
            raise NonFiniteError(f"the loss is {losses[broken]} at step {broken + 1}")
        return tuple(losses), norm, took_ms

    def _on_device(self, samples: int, count: int | None = None) -> list[Any]:
        sequence = self.drawn.sequence(samples, count)
        return [map_tensors(lambda tensor: tensor.to(self.device, copy=True), batch) for batch in sequence]

    def restart(self, offset: int = 0, weights: Sequence[torch.Tensor] = ()) -> None:
        """Restores the initial weights and seeds random generators with seed + `offset`; only within `on_device`.

        With `weights`, one for each parameter, the parameters get these.
        """
        self._put_back(weights)
        seed_everything(self._seed + offset)

    @contextmanager
    def staying_on_device(self) -> Iterator[None]:
        """Leaves the model on its device until the end, with a copy of its initial weights if they are small.

        For what trains from them again and again: copying large ones from the CPU takes a second.
        """
        if self._stays:
            yield
            return
        self._stays = True
        try:
            yield
        finally:
            self._stays, self._near = False, None
            self.release()

    @property
    def _is_small(self) -> bool:
        if self.device.type != "cuda":
            return False
        total = torch.cuda.get_device_properties(self.device).total_memory
        return sum(tensor.nbytes for tensor in self._initial) <= NEAR_SHARE * total

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy, on the device if the initial weights are kept there, else on the CPU."""
        return tensor.detach().to("cpu" if self._near is None else self.device, copy=True)

    def fingerprint(self, batches: Sequence[Any]) -> tuple[float, ...]:
        """Returns sums of weights and batches; processes with comparable gradients have equal ones."""
        if self._initial_sums is None:
            self._initial_sums = _sums_of(self._initial)
        return self._initial_sums + _sums_of(batches)

    def _state(self) -> list[torch.Tensor]:
        return [*self.model.parameters(), *self.model.buffers()]

    def _kinds_of_state(self) -> list[tuple[torch.Size, torch.dtype, bool]]:
        return [(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in self._state()]

    def _restore(self) -> None:
        if self._kinds_of_state() != self._kinds:
            self._build()  # training made, dropped or converted a parameter or buffer; copying cannot undo that
        self._put_back()

    @torch.no_grad()
    def _put_back(self, weights: Sequence[torch.Tensor] = ()) -> None:
        initial_state = self._initial if self._near is None else self._near
        for tensor, initial in zip(self._state(), [*weights, *initial_state[len(weights) :]], strict=True):
            if 0 not in tensor.stride() and tensor.data_ptr() != initial.data_ptr():  # expanded ones cannot be written
                tensor.copy_(initial) if self._tuned is None else self._tuned.write(tensor, initial)
            tensor.grad = None
        for module, training in self._modes.items():
            module.training = training

    def release(self) -> None:
        """Frees the device's memory for other workers, unless the model stays there."""
        for parameter in self.model.parameters():
            parameter.grad = None
        if self._stays:
            return
        gc.collect()
        if self.device.type == "cuda":
            if self._kinds_of_state() == self._kinds:
                # what was trained is not needed again, and copying it to the CPU takes as long as a trial's first steps
                for parameter, initial in zip(self.model.parameters(), self._initial, strict=False):
                    parameter.data = initial
            self.model.to("cpu")
            torch._C._cuda_clearCublasWorkspaces()  # they hold 64 MiB on Hopper
            torch.cuda.empty_cache()
            if torch.cuda.memory_reserved() > GRAPHS_SHARE * torch.cuda.get_device_properties(self.device).total_memory:
                self._compilations.forget()
                torch.cuda.empty_cache()


def _sums_of(tensors: Sequence[Any]) -> tuple[float, ...]:
    """Returns the sum of the magnitudes in each tensor, at any depth."""
    return tuple(
        float((tensor.byte() if tensor.dtype is torch.bool else tensor.detach().abs()).sum(dtype=torch.float64))
        for tensor in tensors_in(list(tensors))
    )


def _built_model(workload: Workload, seed: int) -> torch.nn.Module:
    """Builds the workload's model and initialises lazy modules. Raises `TargetError`, `UserCodeError`."""
    seed_everything(seed)
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
    """Runs one forward pass, which gives lazy modules their shapes."""
    if workload.loss is None:
        raise TargetError(f"{workload.name}: its lazy modules have no shapes yet; run one forward pass in model()")
    with torch.no_grad(), user_code("the first forward pass, for lazy modules"):
        workload.loss(model, workload.batch(workload.batch_size))


def _glance(effort: Effort) -> Effort:
    """Returns the effort for a policy too slow to be of interest: `SLOW_STEPS` steps, not timed again."""
    return replace(effort, measure_s=0.0, settle_s=0.0, min_steps=SLOW_STEPS, time_limit_s=0.0)


def _recordings_of(tuned: Tuned) -> Recordings | None:
    return tuned.model.recordings if isinstance(tuned.model, GraphedModel) else None
