"""Why a process ended, as the failure of what it was measuring."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from amptune.measure.results.outcome import Failure, FailureKind

__all__ = ["death_of", "kernel_oom_kills"]

# The signals by which others end a process; the rest come from what it does itself.
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, *([] if sys.platform == "win32" else [signal.SIGHUP]))


def death_of(who: str, exitcode: int | None, log: Path, kills_before: int) -> Failure:
    """Returns the failure. `kills_before` is the count of `kernel_oom_kills` from when it began."""
    if exitcode == -signal.SIGKILL and kernel_oom_kills() > kills_before:
        return Failure(kind="oom", message=f"the kernel killed the {who} for its memory")
    if exitcode is not None and exitcode < 0:
        how = f"was ended by {signal.Signals(-exitcode).name}"
    else:
        how = f"ended with exit code {exitcode}"
    kind: FailureKind = "killed" if exitcode is not None and -exitcode in FROM_OUTSIDE else "crash"
    return Failure(kind=kind, message=f"the {who} {how}; its output is in {log}")


def kernel_oom_kills() -> int:
    """Returns how many processes of this control group the kernel killed for memory (cgroup v2); 0 if unknown."""
    try:
        group = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2]
        events = Path("/sys/fs/cgroup") / group.lstrip("/") / "memory.events"
        lines = events.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
