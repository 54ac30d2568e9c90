"""A server of PostgreSQL for tests, stopped and started as they like."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

POSTGRESQL = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True)), None)


@dataclass(frozen=True, kw_only=True)
class Server:
    """A server with an empty database: its URL as docs/clusters.md has it, and how it is stopped and started."""

    url: str
    stop: Callable[[], None]
    start: Callable[[], None]


@contextmanager
def postgresql() -> Iterator[Server]:
    """A server of PostgreSQL on loopback, as Debian's packages bring it.

    Its folder is not in pytest's, which the next session of pytest closes to the server's user.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield from _served(Path(folder))


def _served(folder: Path) -> Iterator[Server]:
    assert POSTGRESQL is not None
    programs, data, port = POSTGRESQL.parent, folder / "data", _free_port()
    data.mkdir()
    as_owner: list[str] = []
    if os.geteuid() == 0:  # PostgreSQL refuses to run as root
        as_owner = ["runuser", "-u", "postgres", "--"]
        for place in (folder, data):
            shutil.chown(place, "postgres")

    def run(*command: str) -> None:
        subprocess.run([*as_owner, *command], check=True, capture_output=True, cwd="/")

    run(str(programs / "initdb"), "-D", str(data), "-U", "amptune", "-A", "trust", "--no-sync")
    control = str(programs / "pg_ctl"), "-D", str(data)
    options = f"-h 127.0.0.1 -p {port} -k {folder} -c fsync=off"
    server = Server(
        url=f"postgresql://amptune@127.0.0.1:{port}/postgres",
        stop=lambda: run(*control, "-m", "immediate", "stop"),
        start=lambda: run(*control, "-w", "-l", str(folder / "server.log"), "-o", options, "start"),
    )
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])
