"""Compares training's first steps with the policy file's step time, and tells once if they are clearly slower."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch

from amptune.changes.tensor_tree import tensors_in
from amptune.policy.findings import Finding
from amptune.runtime.ranks import world_size

if TYPE_CHECKING:
    from collections.abc import Callable

    from amptune.policy.policy_file import PolicyFile

__all__ = ["STEPS", "ClaimWatch", "claims_step"]

STEPS = 200
_TO_SETTLE, _FEWEST = 50, 75
_CLEARLY = 1.25


def claims_step(claim: PolicyFile) -> bool:
    """Returns True if there is a step time, which people write by hand too, for a batch size and these many devices."""
    step_ms = claim.evidence.get("step_ms")
    is_time = isinstance(step_ms, int | float) and step_ms is not True and 0 < step_ms < math.inf
    return is_time and claim.policy.batch_size is not None and world_size() == claim.evidence.get("devices", 1)


class ClaimWatch:
    """A watch on the steps of the first optimizer it is given. It never waits for the GPU.

    A step is timed from its first forward pass to the end of `optimizer.step()`. It is left out if it has another
    number of passes than the policy has: the scaler skipped one before, or a validation was there.
    """

    def __init__(self, claim: PolicyFile, say: Callable[[Finding], None]) -> None:
        self.finding: Finding | None = None
        self.has_measured_size = False
        self._claim, self._say, self._is_on = claim, say, True
        self._handle: Any = None
        self._steps = self._passes = 0
        self._device_type, self._began = "", None
        self._timed: list[tuple[Any, Any]] = []

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        if self._is_on and self._handle is None and hasattr(optimizer, "_optimizer_step_post_hooks"):
            self._handle = optimizer.register_step_post_hook(self._stepped)

    def batch_given(self, batch: Any) -> None:
        if self._is_on and not self.has_measured_size:
            size = (self._claim.policy.batch_size,)
            self.has_measured_size = any(tensor.shape[:1] == size for tensor in tensors_in(batch))

    def pass_begins(self, device_type: str) -> None:
        """Notes a forward pass. One after the last step ends the watch, since a step's hook cannot remove itself."""
        if self._is_on:
            self._device_type = device_type
            self._began = self._began if self._passes else _moment(device_type)
            self._passes += 1
        if self._is_on and self._steps == STEPS:
            with suppress(RuntimeError, ValueError):  # until the GPU has done the last step
                self._compare([1000 * (b - a) if isinstance(a, float) else a.elapsed_time(b) for a, b in self._timed])

    def end(self) -> None:
        self._is_on = False
        if self._handle is not None:
            self._handle.remove()

    def _stepped(self, *_: Any) -> None:
        if not torch.compiler.is_compiling() and self._steps < STEPS:
            self._steps += 1
            began, ended, passes = self._began, _moment(self._device_type), self._passes
            self._passes = 0
            if self._steps > _TO_SETTLE and passes == self._claim.policy.accumulate and None not in (began, ended):
                self._timed.append((began, ended))

    def _compare(self, steps_ms: list[float]) -> None:
        """Takes the mean of all steps but the slowest tenth, in which something is done once."""
        self.end()
        usual_ms, promised_ms = sorted(steps_ms)[: len(steps_ms) * 9 // 10], self._claim.evidence["step_ms"]
        if self.has_measured_size and len(steps_ms) >= _FEWEST and fmean(usual_ms) > _CLEARLY * promised_ms:
            figures = {"step_ms": round(fmean(usual_ms), 2), "tuned_step_ms": promised_ms}
            words = "your steps take {step_ms:g} ms from the forward pass to the optimizer, this policy promised "
            words += "{tuned_step_ms:g}: `amptune verify` says why"
            self.finding = Finding(code="slower-than-promised", message=words.format(**figures), figures=figures)
            self._say(self.finding)


def _moment(device_type: str) -> Any:
    """Returns an event in the GPU's stream, or the host's time; None if there is no time or no evidence."""
    if device_type != "cuda" or torch.cuda.is_current_stream_capturing():
        return time.perf_counter() if device_type == "cpu" else None
    return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
