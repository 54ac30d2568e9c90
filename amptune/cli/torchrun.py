"""`torchrun -m amptune …`: the first process runs the command, and the others wait for its end.

The first one starts a process for each rank by itself, for one trial after another. So the others have nothing to do.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

__all__ = ["Torchrun", "take_over", "wait_for_first"]

# What it gives each process (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables).
_OWN = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Torchrun:
    """The job that torchrun started: this process's rank, the number of processes, and of those on this node."""

    rank: int
    processes: int
    on_this_node: int


def take_over() -> Torchrun | None:
    """Returns torchrun's job, None outside one; its variables are then gone from the environment.

    A workload that found them would wait for processes that do not run it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    names = [name for name in os.environ if name in _OWN or name.startswith("TORCHELASTIC_")]
    found = {name: os.environ.pop(name) for name in names}
    return Torchrun(
        rank=int(found["RANK"]), processes=int(found["WORLD_SIZE"]), on_this_node=int(found["LOCAL_WORLD_SIZE"])
    )


def wait_for_first() -> None:
    """Waits until the process of rank 0 has ended: torchrun's exit code is that one's."""
    import psutil

    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first one has to say something, this one has not
    for process in psutil.Process(os.getppid()).children():
        try:
            if process.environ().get("RANK") == "0":
                process.wait()
        except psutil.Error:  # it has just ended
            continue
