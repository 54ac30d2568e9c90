"""The samples of one optimizer step over all devices, which a search keeps whatever the batch size is. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from amptune.errors import SpaceError
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy

__all__ = ["GlobalBatch", "accumulated"]

# The number of batch sizes that an error suggests in place of one that is not allowed.
NEAREST = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The samples of one optimizer step, over all devices: batch_size × accumulate × devices, exactly.

    Raises `SpaceError` if they cannot be divided evenly among the devices.
    """

    samples: int
    devices: int = 1

    def __post_init__(self) -> None:
        if self.samples % self.devices:
            raise SpaceError(
                f"a global batch of {self.samples} cannot be shared out evenly among {self.devices} devices"
            )

    @property
    def per_device(self) -> int:
        return self.samples // self.devices

    def allows(self, batch_size: int) -> bool:
        """Returns whether a whole number of batches adds up to the global batch."""
        return self.per_device % batch_size == 0

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes that it allows, the smallest first."""
        small = [n for n in range(1, math.isqrt(self.per_device) + 1) if self.allows(n)]
        return tuple(sorted({*small, *(self.per_device // n for n in small)}))

    def kept_by(self, policy: Policy) -> Finding:
        """Returns a finding that says how a policy's batches add up to the global batch."""
        size, accumulate = policy.batch_size, policy.accumulate
        devices = f" × {self.devices} devices" if self.devices > 1 else ""
        return Finding(
            code="global-batch",
            message=f"the global batch stays {self.samples}: {size} × accumulate {accumulate}{devices}",
            figures={"samples": self.samples, "devices": self.devices, "accumulate": accumulate, "batch_size": size},
        )

    def require(self, batch_size: int) -> None:
        """Raises `SpaceError`, with the nearest allowed sizes, if the batch size does not divide the global batch."""
        if not self.allows(batch_size):
            near = sorted(sorted(self.batch_sizes, key=lambda n: abs(math.log(n / batch_size)))[:NEAREST])
            each = f"{self.per_device} samples a device" if self.devices > 1 else f"{self.samples} samples"
            raise SpaceError(
                f"batches of {batch_size} do not add up to the global batch's {each}; name one that does with "
                f"--batch-size: {', '.join(map(str, near))}"
            )


def accumulated(batch_size: int | None, whole: GlobalBatch | None) -> int:
    """Returns how many batches make one optimizer step: 1 unless they are to add up to a global batch."""
    return 1 if whole is None or batch_size is None else whole.per_device // batch_size
