"""`amptune tune` and the file of what torch.compile made of the winner, on a recorded machine that keeps such files."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from commands import Done, Machine, interrupting, run

from amptune.measure.results.outcome import Effort, Measurement, Outcome
from amptune.policy.artifact_file import ArtifactFile, digest_of, kept_in
from amptune.policy.file_io import load
from amptune.policy.settings import Policy

KEPT = Path(".amptune/train.py-small/artifacts")
# no two policies of this space are equal on the machine but for settings that lose the tie
COMPILED = ("--set", "compile=reduce-overhead", "--set", "fused_optimizer=true", "--trials", "4")


@dataclass
class Compiling(Machine):
    """A machine whose workers keep what they compiled, as `measure.workers` does."""

    folder: Path = field(kw_only=True)

    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        outcome = super().measure(policy, effort)
        if policy.compile != "off" and isinstance(outcome, Measurement):
            path = kept_in(self.folder / KEPT, policy)
            path.parent.mkdir(exist_ok=True)
            fits = {"settings": digest_of(policy)}
            path.write_bytes(ArtifactFile(fits=fits, graphs=str(policy).encode()).to_bytes())
        return outcome


def tune(folder: Path, *options: str) -> Done:
    line = ("tune", "train.py:small", "--budget", "200s", *options)
    return run(*line, folder=folder, evaluator=Compiling(folder=folder))


def beside(folder: Path) -> ArtifactFile:
    return ArtifactFile.from_bytes((folder / "policy.yaml.artifacts").read_bytes())


def test_what_was_compiled_for_the_winner_lies_beside_its_policy_and_is_mentioned_in_a_line(folder: Path) -> None:
    done = tune(folder, *COMPILED)
    assert done.returncode == 0, done.stderr
    assert beside(folder).fits["settings"] == digest_of(load(folder / "policy.yaml").policy)
    (kept,) = (folder / KEPT).iterdir()
    assert kept.read_bytes() == (folder / "policy.yaml.artifacts").read_bytes()
    (line,) = [line for line in done.stderr.splitlines() if "artifacts" in line]
    assert line == "• compiled graphs are in policy.yaml.artifacts; amptune.apply(…, artifacts=True) loads them"


def test_another_policy_replaces_the_file_and_one_that_is_not_compiled_takes_it_away(folder: Path) -> None:
    tune(folder, *COMPILED)
    first = beside(folder)
    tune(folder, "--set", "compile=default", "--trials", "4")
    assert beside(folder) != first
    done = tune(folder, "--no-compile", "--trials", "4", "--json")
    assert json.loads(done.stdout)["policy"].get("compile", "off") == "off"
    assert json.loads(done.stdout)["artifacts"] is None
    assert not (folder / "policy.yaml.artifacts").exists()
    assert not list((folder / KEPT).iterdir())


def test_a_file_that_amptune_did_not_write_is_left_and_told_of(folder: Path) -> None:
    (folder / "policy.yaml.artifacts").write_text("mine")
    done = tune(folder, *COMPILED, "--json")
    assert done.returncode == 0
    assert "policy.yaml.artifacts exists, and `amptune tune` did not write it" in done.stderr
    assert json.loads(done.stdout)["artifacts"] is None
    assert (folder / "policy.yaml.artifacts").read_text() == "mine"
    tune(folder, "--no-compile", "--trials", "4")
    assert (folder / "policy.yaml.artifacts").read_text() == "mine"


def test_a_resumed_study_writes_again_what_an_earlier_run_compiled_though_it_is_interrupted(folder: Path) -> None:
    tune(folder, *COMPILED)
    first = beside(folder)
    for machine, code in ((Machine(), 0), (Machine(interfere=interrupting(1)), 130)):
        (folder / "policy.yaml.artifacts").unlink()
        done = run("tune", "train.py:small", "--budget", "200s", *COMPILED, "--json", folder=folder, evaluator=machine)
        assert done.returncode == code
        assert json.loads(done.stdout)["artifacts"] == "policy.yaml.artifacts"
        assert beside(folder) == first
