"""Real trees of processes: they stand still while a block is timed, and none stays stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest

from amptune.measure.bench import stillness as module
from amptune.measure.bench.stillness import ProcessIdentity, Stillness

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="this system cannot stop processes")

# Each process of a tree writes a byte a millisecond into a file of its own, until its parent ends.
TREE = """
import os, subprocess, sys, time
folder, below = sys.argv[1], int(sys.argv[2])
if below > 0:
    subprocess.Popen([sys.executable, "-S", "-c", sys.argv[3], folder, str(below - 1), sys.argv[3]])
parent = os.getppid()
with open(os.path.join(folder, str(os.getpid())), "ab", buffering=0) as out:
    while os.getppid() == parent:
        out.write(b".")
        time.sleep(0.001)
"""


class Tree:
    """A process that started another, which started a third."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self._process = subprocess.Popen([sys.executable, "-S", "-c", TREE, str(folder), "2", TREE])
        until(lambda: len(self.written()) == 3 and min(self.written().values()) > 0)
        self.identity = ProcessIdentity(pid=self._process.pid, started_s=module.start_of(self._process.pid))

    def written(self) -> dict[str, int]:
        return {file.name: file.stat().st_size for file in self.folder.iterdir() if file.name.isdigit()}

    @property
    def stands_still(self) -> bool:
        before = self.written()
        time.sleep(0.1)
        return self.written() == before

    @property
    def all_go_on(self) -> bool:
        before = self.written()
        until(lambda: all(size > before[name] for name, size in self.written().items()))
        return True

    def end(self) -> None:
        processes = [psutil.Process(self._process.pid), *psutil.Process(self._process.pid).children(recursive=True)]
        for process in processes:
            process.kill()
        self._process.wait()


def until(holds: Callable[[], bool]) -> None:
    """Waits until it holds; a test that waits in vain ends at its own limit."""
    while not holds():
        time.sleep(0.01)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    tree = Tree(tmp_path / "tree")
    yield tree
    tree.end()


@pytest.fixture(autouse=True)
def busy_machines_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 300)
    monkeypatch.setattr(module, "SETTLE_S", 300.0)


def test_a_whole_tree_stands_still_in_a_pause_and_goes_on_after_it_also_after_an_error(tree: Tree) -> None:
    stillness, before = Stillness([tree.identity]), psutil.Process().children(recursive=True)
    for error in (ValueError, KeyError):
        with suppress(error), stillness.pause() as stopped:
            assert stopped.has_stopped
            assert tree.stands_still
            assert stopped.is_quiet
            raise error
        assert tree.all_go_on
    assert set(psutil.Process().children(recursive=True)) == set(before), "no watchdog is left behind"


MEASURES = """
import sys, time
from amptune.measure.bench import stillness
stillness.LIMIT_S = 2
with stillness.Stillness([stillness.ProcessIdentity(pid=int(sys.argv[1]), started_s=float(sys.argv[2]))]).pause():
    print("stopped", flush=True)
    time.sleep(600)
"""


def test_the_tree_goes_on_after_the_process_that_stopped_it_was_killed(tree: Tree) -> None:
    command = [sys.executable, "-c", MEASURES, str(tree.identity.pid), repr(tree.identity.started_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as measuring:
        assert measuring.stdout is not None
        assert measuring.stdout.readline() == b"stopped\n"
        measuring.kill()
    assert tree.all_go_on


def test_no_pause_is_longer_than_its_limit_and_a_longer_block_is_not_quiet(
    tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog = module._watchdog

    def after_three_seconds(processes: list[psutil.Process]) -> subprocess.Popen[bytes]:
        monkeypatch.setattr(module, "LIMIT_S", 3)  # when all have been found, however long that took
        monkeypatch.setattr(module, "SETTLE_S", 30.0)  # looks again at them before they go on
        return watchdog(processes)

    monkeypatch.setattr(module, "_watchdog", after_three_seconds)
    stillness = Stillness([tree.identity])
    with stillness.pause() as stopped:
        assert tree.all_go_on
        assert not stopped.is_quiet
    assert tree.all_go_on


def test_the_tree_goes_on_as_soon_as_the_measured_process_compiles(tree: Tree) -> None:
    import torch
    from torch._dynamo.callback import callback_handler

    stillness = Stillness([tree.identity])
    callbacks = list(callback_handler.start_callbacks)
    with stillness.pause() as stopped:
        torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
        assert not stopped.is_quiet
        assert tree.all_go_on
    assert callback_handler.start_callbacks == callbacks
    with stillness.pause():
        callback_handler.clear()  # as a step that drops all graphs does
    assert tree.all_go_on


def test_processes_that_have_ended_do_no_harm() -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as process:
        identity = ProcessIdentity(pid=process.pid, started_s=module.start_of(process.pid))
        until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        with Stillness([identity]).pause() as stopped:
            assert stopped.is_quiet
    stillness = Stillness([identity])
    with stillness.pause() as stopped:
        assert stopped.is_quiet
        assert not stopped.has_stopped


def test_a_process_that_has_another_ones_id_is_never_signalled(tree: Tree, tmp_path: Path) -> None:
    other = Tree(tmp_path / "other")
    try:
        earlier = ProcessIdentity(pid=other.identity.pid, started_s=other.identity.started_s - 3600)
        with Stillness([earlier, tree.identity]).pause() as stopped:
            assert tree.stands_still
            assert other.all_go_on
            assert stopped.is_quiet
    finally:
        other.end()


@pytest.mark.parametrize("impossible", ["to stop", "to watch over", "by request"])
def test_where_processes_are_not_stopped_that_is_known(
    tree: Tree, monkeypatch: pytest.MonkeyPatch, impossible: str
) -> None:
    if impossible == "to stop":
        monkeypatch.delattr(signal, "SIGSTOP")
    elif impossible == "to watch over":
        monkeypatch.setattr(module, "_watchdog", Mock(side_effect=BlockingIOError(11, "temporarily unavailable")))
    stillness = Stillness([tree.identity], go_on=impossible == "by request")
    with stillness.pause() as stopped:
        assert tree.all_go_on
        assert (stopped.has_stopped, stopped.is_quiet) == (False, False)
