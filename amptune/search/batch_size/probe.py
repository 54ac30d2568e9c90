"""One run at one batch size, and what it says about memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from amptune.measure.results.outcome import Measurement, Outcome

__all__ = ["Probe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One run at one batch size, and the seconds it cost."""

    batch_size: int
    outcome: Outcome
    seconds: float = 0.0

    @property
    def failure(self) -> str:
        """The kind of its failure; "" if it ran."""
        return "" if isinstance(self.outcome, Measurement) else self.outcome.kind

    @property
    def allocated_mib(self) -> float:
        """The peak of the memory in use; infinite if it failed."""
        return self.outcome.peak_allocated_mib if isinstance(self.outcome, Measurement) else math.inf

    @property
    def reserved_mib(self) -> float:
        """The peak of the memory that the allocator held; infinite if it failed."""
        return self.outcome.peak_reserved_mib if isinstance(self.outcome, Measurement) else math.inf

    @property
    def was_pressed(self) -> bool:
        """Whether the allocator had to release cached memory: its peak is the limit and says nothing of the batch."""
        return isinstance(self.outcome, Measurement) and self.outcome.alloc_retries > 0

    @property
    def why(self) -> str:
        """Says in words why it is not the answer."""
        if self.failure in ("", "oom"):
            return f"{self.batch_size} did not fit"
        return f"a batch of {self.batch_size} fails: {self.outcome}"

    def seconds_for(self, batch_size: int) -> float:
        """Returns the seconds of a probe of another size: its steps take longer in proportion, the rest does not."""
        if not isinstance(self.outcome, Measurement):
            return 0.0
        steps = self.outcome.warmup_steps + len(self.outcome.step_ms)
        steps_s = min(self.seconds, steps * self.outcome.mean_ms / 1000)
        return self.seconds - steps_s + steps_s * batch_size / self.batch_size
