"""Claims of a study's workers on policies, and each worker's signs of life.

A worker writes its claims, and a counter, into an attribute of the study. One whose counter stands still for a while,
by the reader's own clock, is gone: clocks of several hosts need not agree. One whose process has ended is gone at once,
where the reader can see that. What a worker that is gone has claimed is free.
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

from amptune.search.sampler.backend import attributes_of
from amptune.search.sampler.records import Claim, WorkerRecord, from_plain, to_plain

__all__ = ["Claims"]

# The prefix of a worker's attribute.
WORKER = "worker"
# A worker counts on this often, and is gone if it has not for this long.
BEAT_S, GONE_S = 5.0, 45.0


@dataclass
class Claims:
    """The claims of one worker of a study, and its view of the others'. `clock` gives seconds that never go back."""

    study: optuna.Study
    clock: Callable[[], float] = time.monotonic
    worker: str = field(default_factory=lambda: _own_name())
    own: WorkerRecord = field(default_factory=WorkerRecord)
    _writing: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)
    # The last counter seen of each other worker, and when it was first seen.
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def begin(self) -> None:
        """Counts on, in a thread of its own, until `end`: a trial may take minutes."""
        self.beat()
        threading.Thread(target=self._go_on, daemon=True).start()

    def end(self) -> None:
        """Claims nothing more."""
        self._ended.set()
        self._write(claims=())

    def beat(self) -> None:
        """Counts on once."""
        self._write()

    def take(self, claim: Claim) -> bool:
        """Claims something; returns False, and claims nothing, if another worker has it.

        Two workers that claim the same at one moment see each other, and neither gets it.
        """
        self._write(claims=tuple({*self.own.claims, claim}))
        if claim not in self.others():
            return True
        self.give_back(claim)
        return False

    def give_back(self, claim: Claim) -> None:
        """Ends a claim."""
        if claim in self.own.claims:
            self._write(claims=tuple({*self.own.claims} - {claim}))

    def others(self) -> frozenset[Claim]:
        """Returns what other workers claim that are alive."""
        found: set[Claim] = set()
        for key, value in attributes_of(self.study).items():
            kind, _, worker = key.partition(" ")
            if kind == WORKER and worker != self.worker:
                record = from_plain(WorkerRecord, value)
                if record.claims and not self._is_gone(worker, record.beats):
                    found.update(record.claims)
        return frozenset(found)

    def _is_gone(self, worker: str, beats: int) -> bool:
        if _has_ended_here(worker):
            return True
        before, since_s = self._seen.get(worker, (-1, 0.0))
        if beats != before:
            self._seen[worker] = beats, self.clock()
            return False
        return self.clock() - since_s > GONE_S

    def _write(self, claims: tuple[Claim, ...] | None = None) -> None:
        """Counts on, with other claims if any are given; the thread that counts gives none."""
        with self._writing:
            own = self.own.claims if claims is None else claims
            record = WorkerRecord(beats=self.own.beats + 1, claims=own)
            self.study.set_user_attr(f"{WORKER} {self.worker}", to_plain(WorkerRecord, record))
            self.own = record

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


def _has_ended_here(worker: str) -> bool:
    """Returns True if a worker's process ran where this one does, and has ended; its parent may not have reaped it."""
    match worker.split():
        case [_, place, pid] if place == _place() != "-":
            try:
                return psutil.Process(int(pid)).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            except psutil.Error:
                return True
        case _:
            return False
