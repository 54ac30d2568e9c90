"""A worker's share of the CPU: its threads, its compilers, and how often it collects garbage."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "cores",
    "cores_for",
    "cores_of_this_process",
    "graphs_at_once",
    "limit_threads",
    "rarely_collecting_garbage",
    "share_compilers",
    "sharing_threads",
]


# Eight graphs on sixteen cores take 1.7 times as long as one (VGG16, reports/h200/oracle).
CORES_PER_GRAPH = 4


@contextmanager
def rarely_collecting_garbage() -> Iterator[None]:
    """Compiling makes millions of small objects: collecting garbage as often as usual takes a fifth of its time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(50_000, 50, 50)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@contextmanager
def sharing_threads(among: int) -> Iterator[None]:
    """Limits the process to its share of CPU threads: workers that all use every thread would wait for each other.

    Not used for compiling, because the thread count is compiled in.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // among))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def limit_threads(threads: int) -> None:
    """Lets no operation on the CPU use more threads from now on."""
    import torch

    torch.set_num_threads(min(threads, torch.get_num_threads()))


def share_compilers(among: int) -> None:
    """Limits this worker's compile processes to its share: torch.compile would start one for every core."""
    import torch._inductor.config as inductor

    if "TORCHINDUCTOR_COMPILE_THREADS" not in os.environ:
        inductor.compile_threads = min(inductor.compile_threads or cores(), max(1, cores() // among))


def graphs_at_once() -> int:
    """Returns how many graphs can compile at once without much disturbing one another."""
    return max(1, cores() // CORES_PER_GRAPH)


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(cores_of_this_process())


def cores_for(workers: int) -> list[tuple[int, ...]]:
    """Returns each worker's share of the CPU cores; nothing for each if they cannot be shared.

    What Linux counts as CPUs are threads of a core, as a rule two: those of one core stay together.
    """
    own = sorted(cores_of_this_process(), key=_first_of_core)
    each = len(own) // workers if sys.platform == "linux" else 0
    return [tuple(own[number * each : (number + 1) * each]) for number in range(workers)]


def _first_of_core(cpu: int) -> tuple[int, int]:
    try:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
    except OSError:
        return cpu, cpu
    return int(re.split(r"\D", siblings)[0]), cpu


def cores_of_this_process() -> list[int]:
    """Returns the numbers of the CPU cores that this process may use, in order."""
    return sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else list(range(os.cpu_count() or 1))
