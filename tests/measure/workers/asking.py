"""What a test asks of a worker process; it imports nothing that the process might not have."""

from __future__ import annotations

import os
import signal
import sys


def has_imported(module: str) -> bool:
    return module in sys.modules


def argv() -> list[str]:
    return sys.argv


def drawn() -> tuple[float, ...]:
    """The sums of the weights and of a batch."""
    from amptune.measure.workers.worker import _bench

    bench = _bench()
    return bench.fingerprint(bench.drawn.batches(8, 1))


def killed_once(marker: str, *, parent: bool = False) -> str:
    """Kills this process, or the one that it was forked from, unless that was done before; then waits for its end."""
    if os.path.exists(marker):
        return "answered"
    with open(marker, "w") as file:
        file.write(str(os.getpid()))
    os.kill(os.getppid() if parent else os.getpid(), signal.SIGKILL)
    while True:
        signal.pause()


def come(marker: str) -> str:
    while not os.path.exists(marker):
        pass
    return "come"
