"""Watches the first hundreds of training steps, and tells if they take clearly longer than the policy file says."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import torch

from amptune.changes.tensor_tree import tensors_in
from amptune.runtime.ranks import world_size
from amptune.runtime.step_claim import STEPS_COMPARED, STEPS_TO_SETTLE, missed

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from amptune.policy.findings import Finding
    from amptune.runtime.step_claim import StepClaim

__all__ = ["ClaimWatch"]

# A loop whose steps are mostly unlike the measured ones is given up.
_MOST_STEPS = 2 * (STEPS_TO_SETTLE + STEPS_COMPARED)


class ClaimWatch:
    """A watch on the optimizer's steps, until there are enough of them, or until `end`. It never waits for the GPU.

    A step begins with its first forward pass, which is known by `tuned.autocast()`, and ends with the optimizer's step.
    So loading data, validating, logging and saving between steps do not count. A step is left out if it has another
    number of passes than the policy has micro-batches: the loss scaler skipped one before, or a validation was there.
    Nothing is said if the batches had another size than the measured ones, or if the size did not become known, or if
    another number of devices trains together.
    """

    def __init__(self, claim: StepClaim, say: Callable[[Finding], None]) -> None:
        self.finding: Finding | None = None
        self._claim = claim
        self._say = say
        self._is_on = True
        self._has_measured_size = False
        self._optimizer: torch.optim.Optimizer | None = None
        self._handle: RemovableHandle | None = None
        self._clock: _Clock | None = None
        self._passes = 0
        self._began: Any = None
        self._steps = 0
        self._compared: list[tuple[Any, Any]] = []

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Follows the first optimizer it is given: if there are more, each training step has a step of each."""
        if self._is_on and self._optimizer is None:
            self._optimizer = optimizer

    def size_is_as_measured(self) -> None:
        """Notes that the loop takes its batch size from the policy."""
        self._has_measured_size = True

    def batch_given(self, batch: Any) -> None:
        """Looks for the measured batch size in the first dimension of the batch's tensors."""
        if self._is_on and not self._has_measured_size:
            self._has_measured_size = any(t.shape[:1] == (self._claim.batch_size,) for t in tensors_in(batch))

    def pass_begins(self, device_type: str) -> None:
        """Notes that a forward pass begins. The first after the last step to watch ends the watch.

        A step's hook cannot end it: PyTorch is iterating over the hooks then.
        """
        if not self._is_on or self._optimizer is None:
            return
        try:
            finding = self._pass_begins(device_type)
        except (AttributeError, RuntimeError):  # an optimizer without hooks of its own; events of another device
            self.end()
            return
        if finding is not None:
            self.finding = finding
            self._say(finding)

    def end(self) -> None:
        """Removes the hook, and forgets what was noted."""
        self._is_on = False
        self._optimizer = self._began = None
        self._compared = []
        if self._handle is not None:
            self._handle.remove()

    def _pass_begins(self, device_type: str) -> Finding | None:
        if self._handle is None and self._optimizer is not None:
            self._clock = _clock_of(device_type)
            self._handle = self._optimizer.register_step_post_hook(self._stepped)
        clock = self._clock
        if clock is None or self._steps >= _MOST_STEPS or not clock.is_running():
            self.end()
            return None
        if len(self._compared) == STEPS_COMPARED:
            return self._conclude(clock)
        self._passes += 1
        if self._passes == 1:
            self._began = clock.moment()
        return None

    def _conclude(self, clock: _Clock) -> Finding | None:
        """Returns the finding if there is one, and ends; does neither while the GPU has not done the last step."""
        if not clock.has_passed(self._compared[-1][1]):
            return None
        steps_ms = [clock.ms_between(began, ended) for began, ended in self._compared]
        comparable = self._has_measured_size and world_size() == self._claim.devices
        self.end()
        return missed(self._claim, steps_ms) if comparable else None

    def _stepped(self, *_: Any) -> None:
        clock = self._clock
        if torch.compiler.is_compiling() or clock is None or not self._is_on:
            return
        began, passes = self._began, self._passes
        self._began, self._passes = None, 0
        self._steps += 1
        is_due = self._steps > STEPS_TO_SETTLE and len(self._compared) < STEPS_COMPARED
        if is_due and passes == self._claim.accumulate and clock.is_running():
            with suppress(RuntimeError):  # whatever is wrong with the GPU, training hears of it without this
                self._compared.append((began, clock.moment()))


class _Clock(Protocol):
    """A clock whose moments are read later."""

    def is_running(self) -> bool: ...

    def moment(self) -> Any: ...

    def has_passed(self, moment: Any) -> bool: ...

    def ms_between(self, began: Any, ended: Any) -> float: ...


class _HostClock:
    """The clock of a model on the CPU."""

    def is_running(self) -> bool:
        return True

    def moment(self) -> float:
        return time.perf_counter()

    def has_passed(self, moment: float) -> bool:  # noqa: ARG002
        return True

    def ms_between(self, began: float, ended: float) -> float:
        return 1000 * (ended - began)


class _GpuClock:
    """The clock of a model on a GPU: CUDA events in the stream of the step.

    The host may be many steps ahead of the GPU, and wait for it wherever the loop reads a loss, so its own clock shows
    the mean of a step only if the loop never pauses.
    """

    def is_running(self) -> bool:
        """Returns False inside the capture of a CUDA graph, where an event has no time."""
        return not torch.cuda.is_current_stream_capturing()

    def moment(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch has not typed it
        event.record()
        return event

    def has_passed(self, moment: Any) -> bool:
        return bool(moment.query())

    def ms_between(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended))


def _clock_of(device_type: str) -> _Clock | None:
    """Returns None for a device that no evidence is of."""
    if device_type == "cuda":
        return _GpuClock()
    return _HostClock() if device_type == "cpu" else None
