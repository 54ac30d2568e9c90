"""Trains for a moment in FP32 and under a policy, over the same batches, and says how they differ."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from amptune.measure.bench import Bench
from amptune.measure.dropping import without_dropout
from amptune.measure.failing import NonFiniteError, failure_of
from amptune.measure.numerics import (
    ROUNDING,
    Gradients,
    LossCurve,
    Parity,
    Reference,
    Rounding,
    Run,
    Spread,
    Thoroughness,
    compare,
)
from amptune.measure.sketching import Sketcher
from amptune.measure.stepping import Stepper
from amptune.policy.settings import Policy
from amptune.runtime.nested import map_tensors
from amptune.runtime.tuned import Tuned
from amptune.workload.user_errors import user_code

__all__ = ["judge", "make_reference"]

# From 65536 the loss scale can be halved so often before it is below 1e-5, where no gradient is worth scaling.
MOST_HALVINGS = 33
# FP32 is held against itself (weights rounded, another seed) on so many batches.
SELF_BATCHES = 2
# A part of a batch has at least so many samples: BatchNorm takes no fewer than two.
SMALLEST_PART = 4
# The first is tried first; a slow step takes the first of these that the time is enough for, or the last.
THOROUGHNESS = (
    Thoroughness(batches=8, epochs=4, replicas=2),
    Thoroughness(batches=6, epochs=3, replicas=2),
    Thoroughness(batches=4, epochs=3, replicas=2),
    Thoroughness(batches=4, epochs=2, replicas=1),
    Thoroughness(batches=3, epochs=1, replicas=1),
)
# Batches up to this many bytes stay on the device.
RESIDENT_BYTES = 2**30


def make_reference(bench: Bench, policy: Policy, seconds: float) -> Reference:
    """Trains in FP32, the user's own (`policy`), as thoroughly as fits into `seconds`.

    Raises what the workload raises, and `NonFiniteError` where FP32 itself breaks.
    """
    start_s = time.perf_counter()
    policy = _judged(policy)
    with _Training.on(bench, policy, _batches_of(bench, THOROUGHNESS[0].batches)) as training:
        wanted = _affordable(seconds, training.step_s())
        training.feed.keep(wanted.batches)
        count = len(training.feed)
        run = Run(gradients=training.gradients(count), curve=training.curve(_order(count, wanted.epochs)))
        some = min(SELF_BATCHES, count)
        return Reference(
            policy=policy,
            run=run,
            rounded={kind: training.gradients(some, prepare=_rounder(share)) for kind, share in ROUNDING.items()},
            reseeded=training.gradients(some, seed=1),
            replicas=tuple(
                training.curve(_order(count, wanted.epochs, seed), seed) for seed in range(1, 1 + wanted.replicas)
            ),
            columns=training.sketcher.columns,
            module_of=training.sketcher.module_of,
            spread=training.feed.spread,
            thoroughness=replace(wanted, batches=count),
            fingerprint=bench.fingerprint(training.feed.batches),
            seconds=time.perf_counter() - start_s,
        )


def judge(bench: Bench, policy: Policy, reference: Reference) -> Parity:
    """Trains under the policy on the reference's batches. What breaks on the way is the answer's `failure`."""
    start_s = time.perf_counter()
    wanted = reference.thoroughness
    try:
        with _Training.on(bench, _judged(policy), _batches_of(bench, wanted.batches)) as training:
            count = len(training.feed)
            gradients = training.gradients(count)
            run = Run(gradients=gradients, curve=training.curve(_order(count, wanted.epochs)))
        return replace(compare(reference, run, _rounding_of(policy)), seconds=time.perf_counter() - start_s)
    except Exception as error:  # noqa: BLE001  # whatever breaks, it is the policy that is judged
        broken = error.modules if isinstance(error, NonFiniteError) else ()
        return Parity(failure=failure_of(error), broken=broken, seconds=time.perf_counter() - start_s)


@dataclass
class _Feed:
    """Hands out copies of one batch at a time, the one at `at`; made of a workload's batches or the parts of one."""

    batches: list[Any]
    spread: Spread
    device: torch.device
    at: int = 0
    _resident: list[Any] | None = None

    def __post_init__(self) -> None:
        if sum(map(_bytes_of, self.batches)) <= RESIDENT_BYTES:
            self._resident = [self._moved(batch) for batch in self.batches]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._resident is None:
            return self._moved(self.batches[self.at])
        return map_tensors(torch.Tensor.clone, self._resident[self.at])

    def keep(self, count: int) -> None:
        """Forgets all but the first `count` batches."""
        self.batches = self.batches[:count]

    def _moved(self, batch: Any) -> Any:
        return map_tensors(lambda tensor: tensor.to(self.device, copy=True), batch)


@dataclass
class _Training:
    """The workload's training step under one policy, begun anew from the initial weights as often as asked."""

    bench: Bench
    tuned: Tuned
    feed: _Feed
    sketcher: Sketcher
    _captured: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @staticmethod
    @contextmanager
    def on(bench: Bench, policy: Policy, batches: tuple[list[Any], Spread]) -> Iterator[_Training]:
        """On the bench's device, until the block ends."""
        feed = _Feed(*batches, device=bench.device)
        try:
            with bench.on_device(policy, feed) as (tuned, _):
                yield _Training(bench, tuned, feed, Sketcher(tuned.model))
        finally:
            bench.release()

    def step_s(self) -> float:
        """Seconds that a step takes, the first one aside."""
        stepper = self._stepper()
        float(stepper())
        start_s = time.perf_counter()
        float(stepper())
        return time.perf_counter() - start_s

    def gradients(
        self, count: int, *, seed: int = 0, prepare: Callable[[torch.nn.Module], None] | None = None
    ) -> Gradients:
        """Of the first `count` batches, each from the initial weights (after `prepare`), without dropout."""
        sketches, nonzero, losses = [], [], []
        with without_dropout(self.tuned.model):
            stepper = self._stepper(capture=True)
            for self.feed.at in range(count):
                losses.append(self._capture_one(stepper, SEED_STRIDE * seed + self.feed.at, prepare))
                sketch, counts = self._captured.pop()
                self._require_finite(sketch)
                sketches.append(sketch.numpy())
                nonzero.append(counts.numpy())
        return Gradients(sketches=np.stack(sketches), nonzero=np.stack(nonzero), losses=tuple(losses))

    def curve(self, order: Sequence[int], seed: int = 0) -> LossCurve:
        """Trains from the initial weights over the batches in this order.

        In the first epoch a step that the loss scaler skips is repeated: its scale is still coming down.
        """
        self.bench.restart(SEED_STRIDE * seed)
        stepper = self._stepper()
        losses: list[torch.Tensor] = []
        skipped, settling = 0, MOST_HALVINGS
        for place, self.feed.at in enumerate(order):
            loss, went = self._step(stepper)
            while not went and place < len(self.feed) and settling:
                settling -= 1
                loss, went = self._step(stepper)
            skipped += not went
            losses.append(loss)
        found = torch.stack(losses).float().tolist()
        broken = next((i for i, loss in enumerate(found) if not math.isfinite(loss)), None)
        if broken is not None:
            raise NonFiniteError(f"the loss is {found[broken]} at step {broken + 1}")
        stepper.require_sound(self.tuned.model, len(found))
        return LossCurve(
            losses=tuple(found),
            skipped=skipped,
            scale=float(self.tuned.scaler.get_scale()),
            evaluated=self._evaluated(),
        )

    def _capture_one(self, stepper: Stepper, seed: int, prepare: Callable[[torch.nn.Module], None] | None) -> float:
        """Steps until the optimizer was reached, so that a gradient was captured; returns the loss."""
        for _ in range(MOST_HALVINGS):
            self.bench.restart(seed)
            if prepare is not None:
                prepare(self.tuned.model)
            self._captured.clear()
            loss = float(stepper())
            if not math.isfinite(loss):
                raise NonFiniteError(f"the loss is {loss} in the first step of batch {self.feed.at + 1}")
            if self._captured:
                del self._captured[1:]
                return loss
        raise NonFiniteError("the gradient overflows at every loss scale, so no step is taken")

    def _capture(self, optimizer: torch.optim.Optimizer) -> None:
        """Before each optimizer step. One that scales by itself is called for overflowed gradients too."""
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not float(found_inf):
            scale = getattr(optimizer, "grad_scale", None)
            self._captured.append(self.sketcher(1.0 if scale is None else scale))

    def _require_finite(self, sketch: torch.Tensor) -> None:
        if not torch.isfinite(sketch).all():
            where = torch.nonzero(~torch.isfinite(sketch)).flatten().tolist()
            modules = dict.fromkeys(self.sketcher.module_of[i] for i in self.sketcher.parameters_of(where))
            first, more = next(iter(modules)), len(modules) - 1
            others = f" and those of {more} modules more" if more else ""
            raise NonFiniteError(f"the gradient of {first or 'the model itself'}{others} is not finite", tuple(modules))

    def _step(self, stepper: Stepper) -> tuple[torch.Tensor, bool]:
        """(the loss, whether the loss scaler let the step through)."""
        scaler = self.tuned.scaler
        before = scaler.get_scale()
        loss = stepper()
        return loss, not scaler.is_enabled() or scaler.get_scale() >= before

    def _stepper(self, *, capture: bool = False) -> Stepper:
        stepper = Stepper(self.bench.workload, self.tuned, self.feed)
        if capture:
            stepper.before_optimizer(self._capture)
        return stepper

    def _evaluated(self) -> float | None:
        evaluate = self.bench.workload.evaluate
        if evaluate is None:
            return None
        with user_code("evaluate(model)"), torch.no_grad():
            return float(evaluate(self.tuned.model))


# Seeds of one run are this far from those of another.
SEED_STRIDE = 10_000


def _batches_of(bench: Bench, count: int) -> tuple[list[Any], Spread]:
    """(batches to train on, what gives them their spread): the workload's, or the parts of a constant one."""
    samples = bench.workload.batch_size
    batches = bench.batches(samples, count)
    if any(not _same(batch, batches[0]) for batch in batches[1:]):
        return batches, "batches"
    parts = min(count, samples // SMALLEST_PART)
    if parts < 2 or not _is_divisible(batches[0], samples):
        return batches[:1], "none"
    return [_part(batches[0], samples, parts, which) for which in range(parts)], "parts"


def _same(a: Any, b: Any) -> bool:
    ours, theirs = _tensors_in(a), _tensors_in(b)
    return len(ours) == len(theirs) and all(
        x.shape == y.shape and torch.equal(x, y) for x, y in zip(ours, theirs, strict=True)
    )


def _is_divisible(batch: Any, samples: int) -> bool:
    return any(tensor.dim() and tensor.size(0) == samples for tensor in _tensors_in(batch))


def _part(batch: Any, samples: int, parts: int, which: int) -> Any:
    """One of `parts` parts of a batch along its first dimension."""
    size = samples // parts

    def narrowed(tensor: torch.Tensor) -> torch.Tensor:
        of_samples = tensor.dim() and tensor.size(0) == samples
        return tensor.narrow(0, which * size, size) if of_samples else tensor

    return map_tensors(narrowed, batch)


def _tensors_in(batch: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    map_tensors(lambda tensor: found.append(tensor) or tensor, batch)  # type: ignore[func-returns-value]
    return found


def _bytes_of(batch: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors_in(batch))


def _order(count: int, epochs: int, seed: int | None = None) -> list[int]:
    """Which batch comes when: each once an epoch, in a random order for a seed."""
    if seed is None:
        return list(range(count)) * epochs
    random = np.random.default_rng(seed)
    return [int(i) for _ in range(epochs) for i in random.permutation(count)]


def _affordable(seconds: float, step_s: float) -> Thoroughness:
    fits = (one for one in THOROUGHNESS if one.reference_steps * step_s <= seconds)
    return next(fits, THOROUGHNESS[-1])


def _rounder(share: float) -> Callable[[torch.nn.Module], None]:
    """What changes every weight at random by this share of it, in the root mean square."""

    @torch.no_grad()
    def change(model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.mul_(1 + share * torch.randn_like(parameter))

    return change


def _rounding_of(policy: Policy) -> Rounding:
    return "bf16" if policy.autocast == "bf16" else "fp16"


def _judged(policy: Policy) -> Policy:
    """The policy over the workload's own batch, whatever it makes of that: precision alone is judged."""
    return replace(policy, batch_size=None, accumulate=1)
