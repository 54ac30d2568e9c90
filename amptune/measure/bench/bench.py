"""The bench: one workload, built once in a worker and measured under one policy after another."""

from __future__ import annotations

import gc
import math
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch

from amptune.changes.tensor_tree import moved_to
from amptune.hardware.nvml import NvmlGpu
from amptune.measure.bench.built_model import built
from amptune.measure.bench.clocks import clock_for
from amptune.measure.bench.compilation import Compilations
from amptune.measure.bench.drawn_batches import Batches, BatchSequence, DrawnBatches, seed_everything, sums_of
from amptune.measure.bench.failures import failure_of
from amptune.measure.bench.initial_state import InitialState
from amptune.measure.bench.peak_memory import memory_for
from amptune.measure.bench.policy_timer import PolicyTimer
from amptune.measure.bench.readings import Instruments
from amptune.measure.bench.step import Stepper, nonfinite_in
from amptune.measure.bench.step_timing import StepTimer
from amptune.measure.bench.stillness import Stillness
from amptune.measure.bench.trial_group import NEXT_BLOCK, Leader, TrialGroup, classes_put_back
from amptune.measure.results.outcome import Effort, Measurement, Outcome
from amptune.policy.settings import STOCK, Policy
from amptune.runtime.apply_policy import apply
from amptune.runtime.tuned import Tuned
from amptune.workload.copied_model import copy_of
from amptune.workload.workload import Workload

__all__ = ["Bench"]

SEED = 0
# Ranks train on different batches and random numbers: those of one have the seed and some behind it.
SEEDS_APART = 1000
# What is not timed needs no more different batches.
FEW_BATCHES = 2
# CUDA graphs keep their memory between trials of one policy, up to this share of the device's memory.
GRAPHS_SHARE = 1 / 8


class Bench:
    """A built workload that runs trials. Between them the model is on the CPU; all start from its initial weights.

    `seed` is used for weights, batches and training. A trial whose peak is above `memory_mib` fails. Building raises
    `TargetError` or `UserCodeError`. `measure` returns a failed trial as a value; it raises only if the device's memory
    cannot be freed. It trains with the other ranks of the `leader`, if there is one; all else runs on one device.
    """

    def __init__(
        self,
        workload: Workload,
        device: torch.device,
        nvml: NvmlGpu | None = None,
        *,
        seed: int = SEED,
        memory_mib: float | None = None,
        rank: int = 0,
        leader: Leader | None = None,
    ) -> None:
        self.workload = workload
        self._seed = seed
        self.device = device
        clock, self._memory = clock_for(device), memory_for(device)
        self._leader = leader
        self._some_get_none: bool | None = None
        self._own_seed = seed + SEEDS_APART * rank
        self.drawn = DrawnBatches(workload, self._own_seed)
        self._compilations = Compilations()
        self._timer = PolicyTimer(
            workload=workload,
            clock=clock,
            memory=self._memory,
            steps=StepTimer(clock, Instruments(nvml, self._memory)),
            compilations=self._compilations,
            memory_mib=memory_mib,
        )
        self._tuned: Tuned | None = None
        self._stays = False
        self._build()

    def _build(self) -> None:
        self._compilations.forget()
        self.model = built(self.workload, self._seed)
        self._initial = InitialState(self.model, self.device)
        self.nonfinite = frozenset(nonfinite_in(self.model))

    def measure(
        self,
        policy: Policy,
        effort: Effort,
        batches: Batches | None = None,
        stillness: Stillness | None = None,
    ) -> Outcome:
        """Trains for a short time under the policy, from the initial weights.

        Without `batches`, on a sequence that is the same for every policy. Blocks begin with the same random numbers,
        which are not those of the steps before them.
        `stillness` stops the processes that compile beside it while steps are timed.
        """
        try:
            trial = partial(self._trial, policy, effort, batches, stillness or Stillness())
            if self._leader is None:
                return trial()
            return self._leader.lead(policy, effort, trial, get_none=self._get_none(policy))
        except BaseException as error:  # noqa: BLE001  # the user's code may raise anything, SystemExit too
            traceback.print_exc()  # into the worker's log
            failure = failure_of(error)
            if failure.kind != "nonfinite" or policy != STOCK or self._leader is not None:
                return failure
            which = self._broken_batches(effort)
            return replace(failure, message=f"{failure.message}; {which}", in_batches=True) if which else failure
        finally:
            self.release()

    def _broken_batches(self, effort: Effort) -> str:
        """Returns in words which batches of `sequence` break stock PyTorch's loss by themselves; "" if all or none."""
        batches, given = self._on_device(self.workload.batch_size, effort.batches), list[Any]()
        with self.on_device(STOCK, iter(given.pop, None)) as (_, stepper):

            def loss_of(batch: Any) -> float:
                self.restart()
                given.append(batch)
                return float(stepper())

            try:
                broken = [number for number, batch in enumerate(batches, 1) if not math.isfinite(loss_of(batch))]
            except Exception:  # noqa: BLE001  # that training broke is known already
                return ""
        if not broken or len(broken) == len(batches):
            return ""
        named = f"{len(broken)} of {len(batches)} batches, the first of them number {broken[0]}"
        return f"{named}, have a loss that is not finite before anything was trained"

    def _get_none(self, policy: Policy) -> bool:
        """Returns True if a step leaves parameters without gradients, which a group of ranks would wait for."""
        if self.workload.parallel is not None:
            return False  # it does not ask, and on one device the step may not fit
        if self._some_get_none is None:
            with self.on_device(replace(STOCK, batch_size=policy.batch_size)) as (_, stepper):
                self._some_get_none = stepper.leaves_out_some()
        return self._some_get_none

    def sequence(self, policy: Policy, effort: Effort) -> Batches:
        """Returns the batches on the device that are the same for every policy."""
        size = policy.batch_size or self.workload.batch_size
        return BatchSequence(self._on_device(size, effort.batches), lambda: seed_everything(self._own_seed + 1))

    def _trial(
        self,
        policy: Policy,
        effort: Effort,
        batches: Batches | None,
        stillness: Stillness,
        group: TrialGroup | None = None,
    ) -> Measurement:
        """Runs one trial in its own frame: batches and optimizer state are freed before memory is given back."""
        fed = batches or self.sequence(policy, effort)

        def begin() -> None:
            if group is not None:
                group.tell(NEXT_BLOCK)
            fed.begin_block()

        with self.on_device(policy, fed, group=group) as (tuned, stepper):
            return self._timer.measured(
                tuned,
                stepper,
                effort,
                begin=begin,
                require_sound=lambda steps: stepper.require_sound(steps, self.nonfinite),
                stillness=stillness,
            )

    @contextmanager
    def on_device(
        self,
        policy: Policy,
        batches: Iterator[Any] | None = None,
        *,
        guarded: bool = False,
        group: TrialGroup | None = None,
    ) -> Iterator[tuple[Tuned, Stepper]]:
        """Yields the model on its device under the policy, and its training step; restores everything afterwards.

        Each step takes the next of `batches`, which must be on the device; the default is a cycle of a few batches.
        `guarded` steps run under the guard. In a `group` every step is one of all its ranks; if the workload shares the
        model by itself, they train a copy, as nothing takes sharding back.
        """
        self._restore()
        is_copied = group is not None and self.workload.parallel is not None
        model = copy_of(self.model) if is_copied else self.model
        if is_copied:
            self._compilations.forget()  # another copy's graphs fit none of its modules, and count as recompiled
        self._compilations.begin(policy)
        batches = batches or cycle(self._on_device(policy.batch_size or self.workload.batch_size, FEW_BATCHES))
        self._memory.reset()
        model.to(self.device)
        if self._stays:
            self._initial.keep_near()
        seed_everything(self._own_seed)
        way_back = classes_put_back(model) if is_copied else nullcontext()
        # no guard for what is timed, whatever the environment says: its time would be in the figures
        with apply(policy, model, any_hardware=True, guard=guarded) as tuned, way_back:
            self._tuned = tuned
            try:
                stepper = Stepper(self.workload, tuned, batches, group)
                if is_copied:  # the whole weights are free by now, and no part of what training takes
                    gc.collect()
                    torch.cuda.empty_cache()
                    self._memory.reset()
                if tuned.recordings is not None:
                    tuned.recordings.checks = False  # their price is added, see `price_of_checks`
                yield tuned, stepper
            finally:
                self._tuned = None

    def peak_mib(self) -> tuple[float, float]:
        """Returns the peak of memory since the model came to its device: (allocated, reserved)."""
        return self._memory.peak_mib()

    def _on_device(self, samples: int, count: int | None = None) -> list[Any]:
        sequence = self.drawn.sequence(samples, count)
        return [moved_to(self.device, batch, lambda tensor: tensor.to(self.device, copy=True)) for batch in sequence]

    def restart(self, offset: int = 0, weights: Sequence[torch.Tensor] = ()) -> None:
        """Restores the initial weights and seeds random generators with seed + `offset`; only within `on_device`.

        With `weights`, one for each parameter, the parameters get these.
        """
        self._initial.put_back(weights, None if self._tuned is None else self._tuned.write)
        seed_everything(self._own_seed + offset)

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
            self._stays = False
            self._initial.forget_near()
            self.release()

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy, on the device if the initial weights are kept there, else on the CPU."""
        return tensor.detach().to(self.device if self._initial.is_near else "cpu", copy=True)

    def fingerprint(self, batches: Sequence[Any]) -> tuple[float, ...]:
        """Returns sums of weights and batches; processes with comparable gradients have equal ones."""
        return self._initial.sums() + sums_of(batches)

    def _restore(self) -> None:
        if not self._initial.fits:
            self._build()
        self._initial.put_back()

    def release(self) -> None:
        """Frees the device's memory for other workers, unless the model stays there."""
        for parameter in self.model.parameters():
            parameter.grad = None
        if self._stays:
            return
        gc.collect()
        if self.device.type == "cuda":
            self._initial.replace_trained()
            self.model.to("cpu")
            torch._C._cuda_clearCublasWorkspaces()  # they hold 64 MiB on Hopper
            torch.cuda.empty_cache()
            if torch.cuda.memory_reserved() > GRAPHS_SHARE * torch.cuda.get_device_properties(self.device).total_memory:
                self._compilations.forget()
                torch.cuda.empty_cache()
