"""Training of the workload under one policy, restarted from the initial weights as often as needed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import torch

from amptune.changes.tensor_tree import stored_in
from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.bench.failures import NonFiniteError
from amptune.measure.bench.step import Stepper
from amptune.measure.numerics.batches import Feed, batches_of
from amptune.measure.numerics.randomness import DrawingInFp32, OwnGenerators, without_dropout
from amptune.measure.numerics.sketches import Sketcher
from amptune.measure.results.training_runs import Floats, Gradients, LossCurve
from amptune.policy.settings import Policy
from amptune.runtime.tuned import Tuned
from amptune.workload.user_errors import user_code

__all__ = ["Training", "Weights"]

Weights = Sequence[torch.Tensor]

# The loss scale of 65536 can be halved this often until it is below 1e-5, where scaling has no use.
MOST_HALVINGS = 33
# Of a larger buffer, about this many elements are compared with FP32's.
LARGEST_BUFFER = 2**16
# A loss on the device is read only this often: reading it waits for the device.
NOTICED_AFTER = 64
# Distance between the seeds of two runs.
SEED_STRIDE = 10_000


@dataclass
class Training:
    """The workload's training step under one policy, which can restart from the initial weights.

    Optimizers are known by their place among the step's: each stepper has its own.
    """

    bench: Bench
    tuned: Tuned
    feed: Feed
    _captured: list[tuple[int, torch.Tensor, torch.Tensor]] = field(default_factory=list)
    _never_step: set[int] = field(default_factory=set)
    _taken: int = 0
    _buffers: list[tuple[torch.nn.Module, dict[str, torch.Tensor | None]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        modules = self.bench.model.modules()
        others = (module for module in modules if not isinstance(module, torch.jit.ScriptModule))  # they drop no buffer
        self._buffers = [(module, dict(module._buffers)) for module in others]

    @staticmethod
    def on(bench: Bench, policy: Policy, *, divided: bool = False) -> AbstractContextManager[Training]:
        """Returns a context of training on the bench's device, over batches of the workload's own size.

        With `divided`, and if all batches are equal, it trains over the parts of one batch.
        """
        return Training.over(Feed(*batches_of(bench, divided=divided), device=bench.device), bench, policy)

    @staticmethod
    @contextmanager
    def over(feed: Feed, bench: Bench, policy: Policy) -> Iterator[Training]:
        """Yields training on the bench's device, over the batches of `feed`."""
        with bench.staying_on_device():
            try:
                with bench.on_device(_bare(policy), feed) as (tuned, _):
                    training = Training(bench, tuned, feed)
                    try:
                        yield training
                    finally:
                        training._put_buffers_back()
                        training.__dict__.pop("sketcher", None)  # its signs take a byte for every parameter
            finally:
                feed.forget()

    @cached_property
    def _generators(self) -> OwnGenerators:
        if not self._taken:
            self.step()  # the first pass may make some
        return OwnGenerators(self.bench.workload, self.bench.model)

    @cached_property
    def sketcher(self) -> Sketcher:
        """The sketcher, made when gradients are first needed: tracing and sensing may not need it."""
        return Sketcher(self.bench.model)

    def restart(self, offset: int = 0, weights: Weights = ()) -> None:
        """Restores the initial weights (or `weights`) and buffers, and seeds the generators with seed + `offset`."""
        generators = self._generators
        self._put_buffers_back()
        with torch._C.DisableTorchFunction():  # modes are for the user's code, and take microseconds for each call
            self.bench.restart(offset, weights)
        generators.seed(offset)

    def step(self) -> None:
        """Takes one training step with a fresh optimizer."""
        self._step(self._stepper())

    def step_s(self) -> float:
        """Returns the seconds of the second step; the first one may include one-time costs."""
        stepper = self._stepper()
        float(self._step(stepper)[0])
        start_s = time.perf_counter()
        float(self._step(stepper)[0])
        return time.perf_counter() - start_s

    def weights(self) -> Weights:
        """Returns a copy of the model's parameters."""
        return tuple(map(self.bench.copied, self.bench.model.parameters()))

    def gradients(
        self,
        count: int,
        *,
        weights: Weights = (),
        prepare: Callable[[torch.nn.Module], None] | None = None,
    ) -> Gradients:
        """Returns gradients of the first `count` batches without dropout.

        Each starts from the initial weights (or `weights`), which `prepare` may change.
        """
        sketches, noticeable = [], []
        with without_dropout(self.tuned.model), DrawingInFp32():
            stepper = self._stepper(capture=True)
            for self.feed.at in range(count):
                start = partial(self.restart, self.feed.at, weights)
                self._capture_one(stepper, start, prepare)
                # Summed over the optimizer steps of one training step: a GAN takes several.
                sketch = torch.stack([one for _, one, _ in self._captured]).sum(0)
                counts = torch.stack([one for _, _, one in self._captured]).sum(0)
                self._require_finite(sketch)
                sketches.append(sketch.numpy())
                noticeable.append(counts.numpy())
        return Gradients(sketches=np.stack(sketches), noticeable=np.stack(noticeable))

    def curve(self, order: Iterable[int], seed: int = 0) -> LossCurve:
        """Trains from the initial weights over the batches at these places in this order; returns the loss curve.

        In the first epoch a step that the loss scaler skips is repeated, because its scale is still coming down. A loss
        that is not finite is noticed within `NOTICED_AFTER` steps.
        """
        self.restart(SEED_STRIDE * seed)
        stepper = self._stepper()
        losses: list[torch.Tensor] = []
        skipped, settling = 0, MOST_HALVINGS
        with ExitStack() as drawing:
            mode = drawing.enter_context(DrawingInFp32())
            for place, self.feed.at in enumerate(order):
                if place == len(self.feed) and not mode.has_drawn:
                    drawing.close()  # it draws nothing, and looking takes a third of a small model's step
                loss, went = self._step(stepper)
                while not went and place < len(self.feed) and settling:
                    settling -= 1
                    loss, went = self._step(stepper)
                skipped += not went
                losses.append(loss.reshape(()).clone())  # a CUDA graph writes its next result into the same memory
                if len(losses) % NOTICED_AFTER == 0 and not math.isfinite(float(loss)):
                    break
        found = torch.stack(losses).float().tolist()
        broken = next((i for i, loss in enumerate(found) if not math.isfinite(loss)), None)
        if broken is not None:
            raise NonFiniteError(f"the loss is {found[broken]} at step {broken + 1}")
        # Repeated steps count too: the scale came down in them.
        stepper.require_sound(self._taken, self.bench.nonfinite)
        return LossCurve(
            losses=tuple(found),
            skipped=skipped,
            scale=float(self.tuned.scaler.get_scale()),
            buffers=self._floating_buffers(),
            evaluated=self._evaluated(),
        )

    def _floating_buffers(self) -> dict[str, Floats]:
        """Returns the buffers, each flat; of a large one, elements at a fixed distance."""
        found = {}
        for name, buffer in self.bench.model.named_buffers():
            if buffer.is_floating_point():
                values = stored_in(buffer)[-1]
                every = max(1, math.ceil(values.numel() / LARGEST_BUFFER))
                found[name] = values.detach().flatten()[::every].float().cpu().numpy().copy()
        return found

    def _put_buffers_back(self) -> None:
        """Restores the original buffers: the step may have replaced, made or dropped some."""
        for module, buffers in self._buffers:
            module._buffers.clear()
            module._buffers.update(buffers)

    def _capture_one(
        self, stepper: Stepper, start: Callable[[], None], prepare: Callable[[torch.nn.Module], None] | None
    ) -> None:
        """Repeats the step until each optimizer's gradients were captured, in the call in which it steps first.

        An optimizer may step every few calls. A call that steps none goes on where the last ended, as a micro-batch.
        """
        kept: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        waited_for = {*range(len(stepper.optimizers))} - self._never_step
        begins = True
        for _ in range(MOST_HALVINGS):
            if begins:
                start()
                if prepare is not None:
                    prepare(self.tuned.model)
            self._captured.clear()
            last, went = self._step(stepper)
            loss = float(last)
            if not math.isfinite(loss):
                raise NonFiniteError(f"the loss is {loss} in the first step of batch {self.feed.at + 1}")
            begins = bool(self._captured) or not went
            if went:
                kept += [one for one in self._captured if one[0] in waited_for]
                waited_for -= {own for own, _, _ in self._captured}
            if kept and not waited_for:
                break
        if kept:
            self._never_step |= waited_for
            self._captured[:] = kept
            return
        if not self.tuned.scaler.is_enabled():
            raise TargetError(
                f"the optimizer that optimizer(model) returned took no step in {MOST_HALVINGS} training steps"
            )
        raise NonFiniteError("the gradient overflows at every loss scale, so no step is taken")

    def _capture(self, stepper: Stepper, optimizer: torch.optim.Optimizer, held: Collection[int]) -> None:
        """Captures the gradients that an optimizer steps with, unless they overflowed: some skip by themselves."""
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is None or not float(found_inf):
            scale = getattr(optimizer, "grad_scale", None)
            place = next(place for place, one in enumerate(stepper.optimizers) if one is optimizer)
            with torch._C.DisableTorchFunction():
                self._captured.append((place, *self.sketcher(1.0 if scale is None else scale, held)))

    def _require_finite(self, sketch: torch.Tensor) -> None:
        if not torch.isfinite(sketch).all():
            where = torch.nonzero(~torch.isfinite(sketch)).flatten().tolist()
            names = (self.sketcher.names[i] for i in self.sketcher.parameters_of(where))
            modules = dict.fromkeys(name.rpartition(".")[0] for name in names)
            first, more = next(iter(modules)), len(modules) - 1
            others = f" and those of {more} modules more" if more else ""
            raise NonFiniteError(f"the gradient of {first or 'the model itself'}{others} is not finite", tuple(modules))

    def _step(self, stepper: Stepper) -> tuple[torch.Tensor, bool]:
        """Returns (the loss, True if the loss scaler did not skip the step)."""
        scaler = self.tuned.scaler
        before = scaler.get_scale()
        self._taken += 1
        loss = stepper()
        return loss, not scaler.is_enabled() or scaler.get_scale() >= before

    def _stepper(self, *, capture: bool = False) -> Stepper:
        stepper = Stepper(self.bench.workload, self.tuned, self.feed)
        if capture:
            stepper.before_optimizer(partial(self._capture, stepper))
        return stepper

    def evaluated_at_start(self) -> float | None:
        """Returns what the workload's `evaluate` gives before training; None if that is nothing or no number."""
        self.restart()
        try:
            return self._evaluated()
        except NonFiniteError:
            return None

    def _evaluated(self) -> float | None:
        evaluate = self.bench.workload.evaluate
        if evaluate is None:
            return None
        with user_code("evaluate(model)"), torch.no_grad():
            evaluated = float(evaluate(self.tuned.model))
        if not math.isfinite(evaluated):
            raise NonFiniteError(f"evaluate(model) gives {evaluated}")
        return evaluated


def _bare(policy: Policy) -> Policy:
    """Returns the policy with the workload's own batch, unaccumulated, without CUDA graphs: only precision matters.

    A CUDA graph runs the same kernels, but hooks on modules and gradients do not run inside it.
    """
    return replace(policy, batch_size=None, accumulate=1, cuda_graphs=False)
