"""A training script that runs unchanged, as a workload: an iteration of its own loop is the step.

The script runs in a greenlet of the worker's main thread (https://greenlet.readthedocs.io): it stands still between two
iterations, and goes on for one when the bench asks for a step. So nothing of it is read, rebuilt or called anew.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from amptune.changes.flags import fp32_math_now, take_defaults
from amptune.changes.layout import format_of
from amptune.changes.tensor_tree import tensors_in
from amptune.errors import ScriptEndedError, TargetError
from amptune.policy.settings import Policy
from amptune.runtime.script.hooks import LedIterator, Listener, ScriptHooks
from amptune.runtime.script.in_place import InPlace
from amptune.runtime.script.loaders import are_alike
from amptune.runtime.script.main_script import no_processes, run_as_main
from amptune.runtime.script.optimizer_snapshot import OptimizerSnapshot
from amptune.runtime.script.scaling import Scaling
from amptune.runtime.script.script_training import (
    AGREEING,
    WRITE_WORKLOAD,
    Iteration,
    ScriptTraining,
    copy_of_batch,
    require_comparable,
    several_models,
    take_turns,
)
from amptune.workload.fresh_iterations import FreshIterations
from amptune.workload.loader_batches import LARGE_BYTES
from amptune.workload.untouched_files import UntouchedFiles
from amptune.workload.user_errors import user_script
from amptune.workload.workload import Workload

if TYPE_CHECKING:
    from amptune.runtime.tuned import Tuned

__all__ = ["RunningScript", "workload_of_script"]

# A script that has not shown what it trains after so many updates, or so many seconds, is none that can be tuned.
MOST_UPDATES, MOST_S = 64, 600.0
# Nor is one whose optimizer makes no step in so many backward passes, more than any accumulates.
MOST_PASSES = 512
# So many iterations are kept, of at most `LARGE_BYTES`, and given again to each policy.
MOST_KEPT = 8
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


def workload_of_script(path: Path, arguments: Sequence[str], scratch: Path | None = None) -> Workload:
    """Starts a script and returns the workload that its training is. Raises `TargetError` or `UserCodeError`.

    What it writes goes to a folder within `scratch`.
    """
    return RunningScript(path, arguments, scratch).workload()


class RunningScript(Listener):
    """A script under hooks, from its start until it `is_over`, and its process is of no more use."""

    def __init__(self, path: Path, arguments: Sequence[str], scratch: Path | None = None) -> None:
        self.is_over = False
        self._path, self._arguments = path, [*arguments]
        self._main, self._script = getcurrent(), greenlet(self._run)
        self._hooks, self._files = ScriptHooks(self), UntouchedFiles(self._is_users, scratch)
        self._is_drawing = False
        self._training: ScriptTraining | None = None
        self._own = Policy()  # what the script sets by itself
        # of the iteration that runs now, and those before
        self._now, self._past = Iteration(), list[Iteration]()
        self._loaders, self._iterators = list[Any](), list[LedIterator]()
        self._kept: list[Iteration] = []
        self._given: dict[int, deque[Any]] = {}
        self._losses: list[torch.Tensor] = []
        self._stepped: set[torch.optim.Optimizer] = set()
        self._spared = self._steps = self._ended = 0
        # An epoch goes on while steps are measured; for a script that breaks by that, the processes after it end it.
        self._is_broken = self._is_beyond = self._draws_with_grad = False
        self._breaks = None if scratch is None else scratch / "breaks-behind-epochs"
        self._ends_epochs = self._breaks is not None and self._breaks.exists()
        self._scales = False
        self._writes_to_batches = False
        self._began_s = time.monotonic()
        # the policy that is in place
        self._tuned: Tuned | None = None
        self._in_place: InPlace | None = None
        self._scaling = Scaling()

    # --- what the bench asks for ----------------------------------------------------------------------------------

    def workload(self) -> Workload:
        """Runs the script until its training is known. Raises `TargetError` or `UserCodeError`."""
        self._hooks.watch_modules()
        with user_script(f"running {self._path.name}"):
            self._go_on()
        training = self._training
        if training is None:
            raise TargetError(f"{self._path.name} ended before it had trained for a few steps alike: {self._seen()}")
        self._hooks.watch_no_modules()
        self._keep_more(training)
        self._own = replace(
            self._own,
            fp32_math=fp32_math_now(),
            cudnn_benchmark=torch.backends.cudnn.benchmark,
            memory_format=format_of(training.model),  # type: ignore[arg-type]
        )
        take_defaults()
        self._optimizers = [(one, OptimizerSnapshot(one)) for one in training.optimizers]
        self._model = training.model
        self._device = next(self._model.parameters()).device
        for parameter in self._model.parameters():
            parameter.grad = None
        batches = cycle(self._kept)
        return Workload(
            name=self._path.stem,
            model=lambda: self._model.to("cpu"),
            batch=lambda _: next(batches),
            step=self.step,
            optimizer=self._optimizer,
            loader=self._fresh if training.loaders else None,
            batch_size=max(1, training.iteration.samples),
            own_loop=False,
            as_is=self._own,
            ended_epochs=lambda: self._ended,
            summary=self._summary(training),
        )

    def step(self, tuned: Tuned, model: Any, optimizers: Any, iteration: Iteration) -> torch.Tensor:  # noqa: ARG002
        """Has the script do an iteration with these batches, under the policy. Returns the sum of its losses."""
        if self.is_over:
            raise ScriptEndedError(f"{self._path.name} has ended, by the count of its own loop or by an error before")
        if tuned is not self._tuned:
            self._require_device()
            self._put_in_place(tuned)
        if self._is_broken:  # what is left of an iteration that another policy broke
            self._is_broken = False
            self._one(iteration)
        return self._one(iteration)

    def _require_device(self) -> None:
        here = next(self._model.parameters()).device.type
        if here != self._device.type:
            raise TargetError(
                f"{self._path.name} trains on {self._device}, and amptune measures on {here}: say --device "
                f"{self._device.type}, or have the script train on {here}"
            )

    def _one(self, iteration: Iteration) -> torch.Tensor:
        self._given = {loader: deque() for loader, _ in iteration.batches}
        for loader, batch in iteration.batches:
            self._given[loader].append(batch)
        self._losses.clear()
        self._stepped.clear()
        try:
            self._go_on()
        except Exception as error:
            if not (self.is_over and self._is_beyond):
                raise
            if self._breaks is not None:
                self._breaks.touch()
            raise ScriptEndedError(f"{self._path.name} raised in an epoch longer than its loader: {error}") from None
        self._steps += 1
        if self.is_over:
            raise ScriptEndedError(
                f"{self._path.name} ended by itself after {self._steps} steps: let it train for more, to be timed"
            )
        return sum(self._losses[1:], self._losses[0]) if self._losses else torch.zeros(())

    def _go_on(self) -> None:
        """Runs the script until it hands over. Raises what broke it."""
        self._main, grad = getcurrent(), torch.is_grad_enabled()
        try:
            told = self._script.switch()
        finally:
            torch.set_grad_enabled(grad)
            self.is_over = self._script.dead
        if isinstance(told, Exception):
            raise told

    def _put_in_place(self, tuned: Tuned) -> None:
        assert self._training is not None  # noqa: S101  # as `workload` made the step
        self._take_back()
        self._tuned = tuned
        self._in_place = InPlace(tuned, self._training.called, self._broken, self._begins)
        self._scaling.begin(tuned.policy, list(self._model.parameters()))
        tuned.before_undo(self._take_back)

    def _take_back(self) -> None:
        if self._in_place is not None:
            self._in_place.undo()
            self._scaling.end()
            for one, snapshot in self._optimizers:
                snapshot.put_back(one)
        self._in_place = self._tuned = None

    def _optimizer(self, _: Any) -> Any:
        """Returns the script's own optimizers, in the state that they had."""
        for one, snapshot in self._optimizers:
            snapshot.put_state_back(one)
        found = [one for one, _ in self._optimizers]
        return found[0] if len(found) == 1 else found

    def _fresh(self, _: int) -> FreshIterations:
        """Returns iterations of new batches from the script's own loaders, without end."""
        pattern = [loader for loader, _ in self._past[-1].batches]
        return FreshIterations(pattern, self._loaders, self._iterators, self._drawing)

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        self._is_drawing = True
        try:
            yield
        finally:
            self._is_drawing = False

    def _keep_more(self, training: ScriptTraining) -> None:
        """Keeps iterations of further batches, beside those that the script has trained on."""
        self._writes_to_batches = any(one.was_written_to for one in self._past)
        seen = [one for one in self._past[-AGREEING:] if one.batches and not one.was_written_to]
        self._kept = seen if seen or training.loaders else [Iteration()]
        if training.loaders:
            fresh = iter(self._fresh(0))
            while len(self._kept) < MOST_KEPT and _bytes_of(self._kept) < LARGE_BYTES:
                self._kept.append(next(fresh))

    # --- what the script does, in its greenlet --------------------------------------------------------------------

    def _run(self) -> None:
        with (
            self._files,
            no_processes(f"{self._path.name} trains in processes that it starts itself: {WRITE_WORKLOAD}"),
        ):
            run_as_main(self._path, self._arguments)

    def _hand_over(self, error: Exception | None = None) -> None:
        grad = torch.is_grad_enabled()
        self._main.switch(error)
        torch.set_grad_enabled(grad)

    def is_script(self) -> bool:
        return bool(getcurrent() is self._script)

    def _is_users(self) -> bool:
        """Returns True for the script's code in whatever thread, and for its dataset while the bench draws batches."""
        return self._is_drawing or getcurrent() is not self._main

    def batch(self, loader: Any, own: LedIterator) -> Any:
        number = self._number_of(loader)
        if number == len(self._loaders):
            self._loaders.append(loader)
            self._iterators.append(own)
        if self._training is None and self._now.optimizers:
            self._end_iteration()
        training = self._training
        if training is None:
            self._draws_with_grad |= torch.is_grad_enabled()
            self._iterators[number], batch = own, own.draw()
            self._now.keep(number, batch)
            return batch
        may_train = torch.is_grad_enabled() or not self._draws_with_grad
        if not may_train or self._loaders[number] not in training.loaders:  # validation has one batch
            if own.drawn:
                raise StopIteration
            return own.draw()
        if self._has_updated:
            self._hand_over()
        self._is_beyond = own.is_at_end
        if self._is_beyond and self._ends_epochs:
            self._ended += 1
            raise StopIteration
        # a loader with a look ahead takes one more at the beginning of an epoch
        given = self._given[number].popleft() if self._given.get(number) else self._spare(number)
        return copy_of_batch(given, tensors=self._writes_to_batches)

    def draws_later(self) -> bool:
        return self._training is not None

    def _number_of(self, loader: Any) -> int:
        """Returns the number of a loader, or of one like it that the script has built anew for this epoch."""
        known = [one is loader for one in self._loaders]
        if self._training is not None and not any(known):
            known = [are_alike(one, loader) for one in self._loaders]
        return known.index(True) if any(known) else len(known)

    def _spare(self, number: int) -> Any:
        batches = [batch for one in self._kept for loader, batch in one.batches if loader == number]
        self._spared += 1
        return batches[self._spared % len(batches)]

    @property
    def _has_updated(self) -> bool:
        return self._training is not None and self._stepped.issuperset(self._training.optimizers)

    def called(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if not any(one.requires_grad for one in module.parameters()):
            return
        if self._now.optimizers and not self._now.batches:
            self._end_iteration()
        self._now.modules[module] += 1
        first = next((one for one in tensors_in(args) if one.dim() > 1), None)
        self._now.rows += 0 if first is None else len(first)

    def backward(self, loss: torch.Tensor, run: Callable[[torch.Tensor], None]) -> None:
        self._now.backwards += 1
        if self._training is None and not self._now.optimizers and self._now.backwards > MOST_PASSES:
            raise TargetError(
                f"no optimizer made a step in {MOST_PASSES} backward passes of {self._path.name}: {WRITE_WORKLOAD}"
            )
        self._losses.append(loss.detach())
        try:
            run(self._scaling.scaled(loss))
        except Exception as error:
            if self._training is None:
                raise
            self._broken(error.with_traceback(None))

    def updated(self, optimizer: torch.optim.Optimizer) -> None:
        if self._training is None:
            self._now.optimizers.append(optimizer)
            return
        if optimizer in self._stepped:  # the scaler's step, after the optimizer's own
            return
        self._stepped.add(optimizer)

    def _begins(self) -> bool:
        """Ends an iteration without batches of a loader, when the first pass of the next one begins."""
        training = self._training
        if training is None or training.loaders or not (self._has_updated and torch.is_grad_enabled()):
            return False
        before = self._tuned
        self._hand_over()
        return self._tuned is not before

    def scaler(self, scaler: Any) -> None:
        self._scaling.of_script = scaler
        if self._training is None and scaler.is_enabled():
            self._scales = True
            self._own = replace(self._own, autocast="fp16")

    def leaves_out_autocast(self, dtype: torch.dtype) -> bool:
        if self._training is not None:
            return True
        if self._own.autocast == "off" and dtype in _DTYPES:
            self._own = replace(self._own, autocast=_DTYPES[dtype])  # type: ignore[arg-type]
        return False

    def leaves_out_compile(self, mode: str) -> bool:
        self._own = replace(self._own, compile=mode)  # type: ignore[arg-type]
        return True

    def schedules(self) -> bool:
        return self._training is None

    def _broken(self, error: Exception) -> None:
        """Costs the policy that is in place its trial; returns once another one goes on."""
        self._is_broken = True
        self._hand_over(error)

    def _end_iteration(self) -> None:
        """Ends an iteration that is watched; hands over once what is trained is known."""
        self._past.append(self._now)
        alike = self._past[-AGREEING:]
        self._now = Iteration()
        if len(alike) == AGREEING and all(alike[0].is_like(one) for one in alike[1:]):
            if len({one.passes for one in alike}) > 1:
                require_comparable(self._past[AGREEING:])
                if len(self._past) < AGREEING + MOST_KEPT:
                    return
            trains = dict.fromkeys(number for number, _ in alike[-1].batches)
            self._training = ScriptTraining.of(alike[-1], [self._loaders[number] for number in trains])
            self._hand_over()
        elif take_turns(self._past[-2 * AGREEING :]):
            raise several_models([one for step in alike for one in step.modules])
        elif len(self._past) > MOST_UPDATES or time.monotonic() - self._began_s > MOST_S:
            raise TargetError(f"no two steps of {self._path.name} are alike: {WRITE_WORKLOAD}")

    def _summary(self, training: ScriptTraining) -> str:
        scaler = ", a loss scaler of its own" if self._scales else ""
        return f"{training}; {self._own} today{scaler}"

    def _seen(self) -> str:
        if self._past or self._now.optimizers:
            return "it made too few steps"
        return "no optimizer made a step" if self._now.modules else "no module was called in training in this process"


def _bytes_of(kept: Sequence[Iteration]) -> int:
    return sum(one.nbytes for iteration in kept for _, batch in iteration.batches for one in tensors_in(batch))
