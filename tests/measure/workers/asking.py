"""What a test asks of a worker process; it imports nothing that the process might not have."""

from __future__ import annotations

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
