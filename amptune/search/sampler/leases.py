"""Leases: which worker has each trial of a study, and whether that worker is still alive.

A worker counts on while it lives, in an attribute of the study. One whose counter stands still for a while, by the
reader's own clock, is gone: clocks of several hosts need not agree. One whose process has ended is gone at once, where
the reader can see that. Its trials are given up, and tried again.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import optuna
import psutil
from optuna.trial import TrialState

__all__ = ["Leases"]

# The attribute of a trial that names its worker, and the prefix of a worker's counter among the study's attributes.
WORKER, COUNTER = "worker", "alive"
# A worker counts on this often, and is gone if it has not for this long.
BEAT_S, GONE_S = 5.0, 45.0


@dataclass
class Leases:
    """The leases of one worker of a study, and its view of the others'. `clock` gives seconds that never go back."""

    study: optuna.Study
    clock: Callable[[], float] = time.monotonic
    worker: str = field(default_factory=lambda: _own_name())
    _beats: int = 0
    _ended: threading.Event = field(default_factory=threading.Event)
    # The last counter seen of each other worker, and when it was first seen.
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def begin(self) -> None:
        """Counts on, in a thread of its own, until `end`: a trial may take minutes."""
        self.beat()
        threading.Thread(target=self._go_on, daemon=True).start()

    def beat(self) -> None:
        """Counts on once."""
        self._beats += 1
        self.study.set_user_attr(f"{COUNTER} {self.worker}", self._beats)

    def end(self) -> None:
        """Stops counting: what this worker has not ended by now is tried by others."""
        self._ended.set()

    def take(self, handle: optuna.Trial) -> None:
        """Says that this worker has a trial."""
        handle.set_user_attr(WORKER, self.worker)

    def give_up_what_nobody_has(self) -> None:
        """Ends the running trials of workers that are gone; whichever worker sees that first does so."""
        running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        # it is named a moment after it begins
        owners = {one.number: one.user_attrs.get(WORKER, f"trial {one.number}") for one in running}
        others = {number: owner for number, owner in owners.items() if owner != self.worker}
        counters = self.study.user_attrs if others else {}
        for number, owner in others.items():
            if self._is_gone(owner, counters.get(f"{COUNTER} {owner}", 0)):
                self.study.tell(number, state=TrialState.FAIL, skip_if_finished=True)

    def _is_gone(self, owner: str, count: int) -> bool:
        if _has_ended_here(owner):
            return True
        before, since_s = self._seen.get(owner, (-1, 0.0))
        if count != before:
            self._seen[owner] = count, self.clock()
            return False
        return self.clock() - since_s > GONE_S

    def _go_on(self) -> None:
        while not self._ended.wait(BEAT_S):
            with suppress(Exception):  # the storage may come back, and the worker's own calls tell what is wrong
                self.beat()


def _own_name() -> str:
    """Returns a name for one worker of this process, which tells where the process runs."""
    return f"{uuid.uuid4().hex} {_place()} {os.getpid()}"


@cache
def _place() -> str:
    """Returns where process ids mean the same as here: this boot of this kernel, and this container; "-" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return "-"


def _has_ended_here(owner: str) -> bool:
    """Returns True if a worker's process ran where this one does, and has ended; its parent may not have reaped it."""
    match owner.split():
        case [_, place, pid] if place == _place() != "-":
            try:
                return psutil.Process(int(pid)).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            except psutil.Error:
                return True
        case _:
            return False
