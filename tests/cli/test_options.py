"""Options as users meet them: what is not overwritten, help in groups, completion, environment variables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Machine, run

from amptune.policy.file_io import load
from amptune.policy.file_mark import mark_of, marked

REPOSITORY = Path(__file__).parents[2]
TUNE = ("tune", "train.py:small", "--budget", "60s", "--trials", "3", "-q")


def test_the_same_command_for_the_same_target_replaces_the_policy_it_wrote_and_an_empty_file(folder: Path) -> None:
    (folder / "policy.yaml").touch()
    for target in ("train.py:small", "./train.py:small"):
        done = run("tune", target, *TUNE[2:], folder=folder, evaluator=Machine())
        assert done.returncode == 0, done.stderr
        mark = mark_of((folder / "policy.yaml").read_text())
        assert mark is not None
        assert (mark.is_intact, mark.target) == (True, target)
    assert run(*TUNE, "-o", os.devnull, folder=folder, evaluator=Machine()).returncode == 0


@pytest.mark.parametrize(
    ("content", "because"),
    [
        ("schema: amptune.policy/1\nautocast: bf16\n", "exists, and `amptune tune` did not write it"),
        (marked("schema: amptune.policy/1\n", "train.py:small") + "autocast: bf16\n", "was edited since"),
        (marked("schema: amptune.policy/1\n", "other.py"), "holds the policy of other.py, not of train.py:small"),
        ("\udcff\n", "exists, and `amptune tune` did not write it"),
    ],
)
def test_a_file_that_tune_did_not_write_is_refused_before_anything_is_measured(
    folder: Path, content: str, because: str
) -> None:
    policy = folder / "policy.yaml"
    policy.write_bytes(content.encode(errors="surrogateescape"))
    machine = Machine()
    done = run(*TUNE, folder=folder, evaluator=machine)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: policy.yaml {because}")
    assert done.stderr.endswith("; write to another file with -o, or replace this one with --force\n")
    assert machine.measured == []
    assert policy.read_bytes() == content.encode(errors="surrogateescape")
    assert run(*TUNE, "-o", "other.yaml", folder=folder, evaluator=Machine()).returncode == 0
    forced = run(*TUNE, "--force", folder=folder, evaluator=Machine())
    assert forced.returncode == 0, forced.stderr
    assert load(policy).evidence["speedup"] > 2


def test_quiet_is_an_option_of_every_command_that_shows_progress(folder: Path) -> None:
    tuning = ("tune", "train.py:small", "--budget", "60s", "--trials", "2")
    for command in (tuning, ("verify", "amp-bf16", "train.py:small", "--numerics"), ("diagnose", "train.py:small")):
        loud, quiet = (run(*command, *more, folder=folder, evaluator=Machine()) for more in ((), ("-q",)))
        assert "s left]" in loud.stderr
        assert quiet.stderr == ""
        assert quiet.returncode == loud.returncode


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("amptune ver", "plain,verify"),
        ("amptune tune --forc", "plain,--force"),
        ("amptune tune --objective mem", "plain,memory"),
        ("amptune tune train.py -o pol", "file,pol"),
    ],
)
def test_shells_complete_commands_options_values_and_files(words: str, answer: str, folder: Path) -> None:
    count = len(words.split()) - 1
    environment = {"_AMPTUNE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(count)}
    code = "import sys; sys.argv = ['amptune']; from amptune.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert answer in done.stdout.splitlines()


def test_every_environment_variable_stands_in_the_docs() -> None:
    own = {"AMPTUNE_LIBRARIES"}  # from a process to its own workers
    sources = "".join(path.read_text() for path in (REPOSITORY / "amptune").rglob("*.py"))
    documented = (REPOSITORY / "docs" / "commands.md").read_text()
    named = set(re.findall(r"\bAMPTUNE_[A-Z_]+", sources)) - own
    assert "AMPTUNE_GUARD" in named
    assert {name for name in named if f"`{name}=" not in documented} == set()
    assert "_AMPTUNE_COMPLETE" in documented
