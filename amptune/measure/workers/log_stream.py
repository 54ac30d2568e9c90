"""The stream into which the user's code prints in a worker process."""

from __future__ import annotations

import contextlib
import io
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["LogStream"]

# A worker that prints in every step must not fill the disk.
MAX_LOG_BYTES = 20 * 2**20


class LogStream(io.RawIOBase):
    """The stream for the user's prints. A full disk loses prints but does not fail the trial."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._left = MAX_LOG_BYTES

    def write(self, data: Buffer, /) -> int:
        kept = bytes(data)[: self._left]
        self._left -= len(kept)
        with contextlib.suppress(OSError):
            os.write(self._descriptor, kept)
        return memoryview(data).nbytes

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor
