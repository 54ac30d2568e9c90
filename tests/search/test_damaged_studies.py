"""Damaged studies: what stands in a journal is read, or refused with exit code 2, its file and its line."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import commands
import pytest
from studies import BF16, OOM, OUTCOMES, compared
from test_study import opened, sensitivity, trial_of

from amptune.errors import StudyError
from amptune.measure.results.training_runs import Parity
from amptune.policy.findings import Finding
from amptune.policy.settings import Policy
from amptune.search.gate.judgement import judged
from amptune.search.sampler.storage import keep_findings

VALUES: list[Any] = [None, True, 0, -1, 1e308, float("nan"), "", "\x1b", [], ["x"], {}, {"a": 1}, 10**30, "9" * 5000]
ONE_LINE = [b"3\n", b"[]\n", b"null\n", b"{}\n", b"\xff\xfe\n", b"\0" * 20 + b"\n", b"[" * 99_999 + b"\n"]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    """The lines of a study's journal."""
    folder = tmp_path_factory.mktemp("tuned")
    study = opened(folder)
    for policy, outcome in {**OUTCOMES, Policy(threads=3): OOM}.items():
        assert study.claim(policy)
        study.tell(trial_of(policy, study, outcome))
    for row in compared(rounds=1):
        study.add(row)
    study.keep_sensed("contiguous", sensitivity(1))
    study.keep(judged(BF16, Parity(losses=(2.0, 1.0), losses_fp32=((2.0, 1.0),))))
    study.end([{"stage": "search"}])
    keep_findings(folder, study.run, [Finding(code="input-bound", message="it waits", figures={"share": 0.2})])
    return (folder / "journal.log").read_bytes().splitlines(keepends=True)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in entries:
        yield from paths(item, (*path, name))


def changed(value: Any, path: tuple[Any, ...], change: Callable[[Any, Any], None]) -> bytes:
    """The record with `change` made to what holds the last of the path."""
    holder = value
    for name in path[:-1]:
        holder = holder[name]
    change(holder, path[-1])
    return json.dumps(value).encode() + b"\n"


def damaged(line: bytes, chance: random.Random) -> bytes:
    record = json.loads(line)
    path = chance.choice(list(paths(record))[1:])
    match chance.randrange(5):
        case 0:
            return changed(record, path, lambda holder, name: holder.__setitem__(name, chance.choice(VALUES)))
        case 1:
            return changed(record, path, lambda holder, name: holder.__delitem__(name))
        case 2:
            return chance.choice(ONE_LINE)
        case 3:
            return line[: chance.randrange(1, len(line) - 1)] + b"\n"
        case _:
            place = chance.randrange(len(line) - 1)
            return line[:place] + bytes([chance.randrange(128, 256)]) + line[place + 1 :]


def report(content: bytes, folder: Path, *options: str) -> commands.Done:
    (folder / "journal.log").write_bytes(content)
    return commands.run("report", str(folder), *options, folder=folder)


@pytest.mark.parametrize("seed", range(80))
def test_any_damage_is_read_or_told_with_its_line(lines: list[bytes], tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    place = chance.randrange(len(lines))
    content = b"".join([*lines[:place], damaged(lines[place], chance), *lines[place + 1 :]])
    done = report(content, tmp_path, *chance.choice([(), ("--json",), ("-o", str(tmp_path / "r.html"))]))
    assert done.returncode == 0 or (done.returncode == 2 and re.search(r"journal\.log:\d+: ", done.stderr))
    assert (tmp_path / "journal.log").read_bytes() == content


@pytest.mark.parametrize("operation", [-1, 1, 10, 99, True, "2", None])
def test_an_operation_that_the_journal_does_not_know_is_refused(
    lines: list[bytes], tmp_path: Path, operation: Any
) -> None:
    record = {**json.loads(lines[1]), "op_code": operation}
    content = b"".join([lines[0], json.dumps(record).encode() + b"\n", *lines[2:]])
    done = report(content, tmp_path)
    assert (done.returncode, "journal.log:2: is no record of a study" in done.stderr) == (2, True)


def test_a_worker_refuses_damage_and_leaves_the_journal_as_it_is(lines: list[bytes], tmp_path: Path) -> None:
    content = b"".join([*lines, b"\xff\xfe\n"])
    (tmp_path / "journal.log").write_bytes(content)
    with pytest.raises(StudyError, match=rf"journal\.log:{len(lines) + 1}: "):
        opened(tmp_path)
    assert (tmp_path / "journal.log").read_bytes() == content


@pytest.mark.parametrize("lost", [1, 20])
def test_half_a_record_at_the_end_is_dropped(lost: int, lines: list[bytes], tmp_path: Path) -> None:
    (tmp_path / "journal.log").write_bytes(b"".join(lines)[: -len(lines[-1]) + lost])
    opened(tmp_path)
    assert (tmp_path / "journal.log").read_bytes().startswith(b"".join(lines[:-1]) + b'{"op_code"')


def test_a_record_whose_line_break_is_lost_is_kept(lines: list[bytes], tmp_path: Path) -> None:
    content = b"".join(lines).rstrip(b"\n")
    whole = report(b"".join(lines), tmp_path, "--json").stdout
    assert report(content, tmp_path, "--json").stdout == whole
    opened(tmp_path, "later")
    assert (tmp_path / "journal.log").read_bytes().startswith(content + b"\n{")
