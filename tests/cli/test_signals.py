"""Signals to a command, and a reader of its progress that goes away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import click
import pytest

from amptune.cli.entry import _without_reader, cli

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")

# A command that is sent a signal by itself.
SENT = """
import os, signal, sys
from amptune.cli import entry
def command(obj):
    try:
        os.kill(os.getpid(), int(sys.argv[1]))
        print("ended")
    except KeyboardInterrupt:
        os.kill(os.getpid(), int(sys.argv[1]))
        print("interrupted once")
entry.cli = command
entry.main()
"""


def said_after(number: signal.Signals, before: Callable[[], object]) -> str:
    command = [sys.executable, "-c", SENT, str(int(number))]
    return subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=before).stdout.strip()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_once_so_that_the_best_so_far_is_written(number: signal.Signals) -> None:
    assert said_after(number, lambda: None) == "interrupted once"


def test_nohup_is_respected() -> None:
    assert said_after(signal.SIGHUP, lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) == "ended"


def test_progress_that_nobody_reads_is_lost_and_ends_nothing() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stderr:
        stream = _without_reader(stderr)
        print("seen", file=stream)
        assert os.read(reader, 100) == b"seen\n"
        os.close(reader)
        print("lost", file=stream, flush=True)
        assert not stream.isatty()
        stream.close()


def test_too_few_threads_are_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def without_threads(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(click.Group, "main", without_threads)
    with pytest.raises(SystemExit) as ended:
        cli.main(["probe"])
    assert (ended.value.code, capsys.readouterr().err) == (2, "error: can't start new thread\n")
