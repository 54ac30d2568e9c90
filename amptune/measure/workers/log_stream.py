"""The stream into which the user's code prints in a worker process."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING

from amptune.hardware.machine import MIB

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["LogStream"]

# A worker that prints in every step must not fill the disk.
MAX_LOG_BYTES = 20 * MIB


class LogStream(io.FileIO):
    """The stream for the user's prints. A full disk loses prints but does not fail the trial."""

    _left = MAX_LOG_BYTES

    def write(self, data: Buffer, /) -> int:
        kept = bytes(data)[: self._left]
        self._left -= len(kept)
        with contextlib.suppress(OSError):
            super().write(kept)
        return memoryview(data).nbytes
