"""Streams that lose what they cannot write: that of the user's code in a worker process, and a command's progress."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from amptune.hardware.machine import MIB

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["LogStream", "LossyStream"]

# A worker that prints in every step must not fill the disk.
MAX_LOG_BYTES = 20 * MIB


class LossyStream(io.FileIO):
    """A stream whose reader, terminal or disk may be gone: what is written then is lost, and fails nothing."""

    def write(self, data: Buffer, /) -> int:
        size = memoryview(data).nbytes
        try:
            return super().write(data) or size
        except OSError:
            return size


class LogStream(LossyStream):
    """The stream for the user's prints. A full disk loses prints but does not fail the trial."""

    _left = MAX_LOG_BYTES

    def write(self, data: Buffer, /) -> int:
        kept = bytes(data)[: self._left]
        self._left -= len(kept)
        super().write(kept)
        return memoryview(data).nbytes
