"""What the commands say: help, errors, answers of files and studies written before, and the shape of every `--json`."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from commands import Done
from simulated.clock import SimulatedClock
from simulated.landscape import SyntheticEvaluator

from amptune.cli.entry import cli
from amptune.cli.session import Session
from frozen.decisions import Case, evaluator_of

__all__ = ["answers", "errors", "helps", "schemas", "shapes", "written_study"]

FILES = Path(__file__).parent / "files"
# Text is wrapped to this width, and not to that of the terminal the harness runs in; nothing is coloured.
PLAIN = {"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb", "AMPTUNE_ANY_HARDWARE": "0"}
# The tuning that all answers are of.
CASE = Case(workload="resnet50", seed=7, budget_s=300.0, objective="throughput", variant="own space")
TARGET = "train.py:small"
COMMANDS = ("probe", "tune", "init", "verify", "diagnose", "check", "explain", "report", "profile", "schema")

MISTAKES: Sequence[Sequence[str]] = (
    ("frobnicate",),
    ("tune",),
    ("tune", "nowhere.py:x"),
    ("tune", "train.py"),
    *(("tune", TARGET, *options) for options in (
        ("--set", "autcast=bf16"),
        ("--set", "autocast=bf15"),
        ("--set", "autocast"),
        ("--set", "autocast=bf16", "--set", "autocast=off"),
        ("--set", "batch_size=4"),
        ("--budget", "soon"),
        ("--trials", "0"),
        ("--batch-size", "0"),
        ("--batch-size", "many"),
        ("--global-batch", "100"),
        ("--global-batch", "101", "--devices", "2"),
        ("--devices", "2"),
        ("--max-memory", "60"),
        ("--objective", "beauty"),
        ("--objective", "memory", "--least-speed", "-1"),
        ("--least-speed", "0.9"),
        ("--baseline", "missing.yaml"),
        ("--baseline", "apex:O7"),
        ("--space", "atlantis"),
        ("--space", "bad-space.yaml"),
        ("--report", "no/such/page.html"),
        ("--report", "same", "-o", "./same"),
        ("-o", "no/such/folder/p.yaml"),
        ("--no-such-option",),
        ("--json", "--set", "autcast=bf16"),
    )),
    ("tune", "nowhere.py:x", "--json"),
    ("verify", "stock.yaml", TARGET),
    ("verify", "missing.yaml", TARGET),
    ("verify", "elsewhere.yaml", TARGET),
    ("verify", "objective.yaml", TARGET),
    ("check", "missing.yaml"),
    ("check", "elsewhere.yaml"),
    ("check", "bad-policy.yaml"),
    ("check", "bad-values.yaml"),
    ("check", "bad-rules.yaml"),
    ("check", "twice.yaml"),
    ("check", "alias.yaml"),
    ("check", "no-yaml.yaml"),
    ("check", "list.yaml"),
    ("check", "unknown-schema.yaml"),
    ("check", "bad-profile.yaml"),
    ("check", "bad-space.yaml"),
    ("explain", "train.py"),
    ("report", "nowhere"),
    ("report", "sqlite:///nowhere.db"),
    ("report", "empty"),
    ("report", "broken"),
    ("report", "study", "--name", "mine"),
    ("report", "study", "-o", "no/such/page.html"),
    ("report", "study", "--least-speed", "0.9"),
    ("profile", "build", "stock.yaml", "-o", "cluster.yaml"),
    ("profile", "build", "stock.yaml", "-o", "stock.yaml"),
    ("profile", "resolve", "stock.yaml"),
    ("profile", "resolve", "only-h200.yaml", "--label", "nvidia.com/gpu.product=A"),
    ("profile", "resolve", "only-h200.yaml", "--label", "nonsense"),
    ("schema", "poetry"),
    ("init", "workload.txt"),
    ("init", "train.py"),
    ("probe", "--device", "cuda:99"),
)  # fmt: skip

MALFORMED: Mapping[str, str] = {
    "bad-policy.yaml": "schema: amptune.policy/1\nautocast: bf15\nbatch_size: few\nautcast: off\n",
    "bad-values.yaml": "schema: amptune.policy/1\nbatch_size: 0\naccumulate: -1\nfp32_math: fast\nmemory_format: nchw\n"
    "cudnn_benchmark: perhaps\ncompile: always\nweights: quarter\nloss_scale: {init: -2, static: 3}\nvalid_for: [a]\n",
    "bad-rules.yaml": "schema: amptune.policy/1\nfp32_modules:\n  - {path: a, type: b}\n  - {}\n  - {pth: a}\n"
    "  - {path: ''}\nhalf_modules: {type: LayerNorm}\nautocast: bf16\nweights: half\ncompile: default\n"
    "cuda_graphs: true\n",
    "twice.yaml": "schema: amptune.policy/1\nautocast: bf16\nautocast: fp16\n",
    "alias.yaml": "schema: amptune.policy/1\nfp32_modules:\n  - path: *.head\n",
    "no-yaml.yaml": "schema: [amptune.policy/1\n",
    "list.yaml": "- schema\n- amptune.policy/1\n",
    "unknown-schema.yaml": "schema: amptune.policy/9\n",
    "bad-profile.yaml": "schema: amptune.profile/1\nentries:\n  - match: {a: 3}\n  - {policy: {autocast: bf15}}\n"
    "else: {}\n",
    "bad-space.yaml": "schema: amptune.space/1\narchitecture: x\nknobs: {autocast: [bf15], autcast: ['off']}\n"
    "try_first: [{autocast: fp16, speed: 9}]\nforbid: [{when: {autocast: fp16}}]\n",
    "elsewhere.yaml": "schema: amptune.policy/1\nvalid_for: {nvidia.com/gpu.product: NVIDIA-NOWHERE}\n"
    "evidence: {speedup: 2}\n",
    "objective.yaml": "schema: amptune.policy/1\nevidence: {speedup: 2, objective: beauty}\n",
    "stock.yaml": "schema: amptune.policy/1\n",
    "only-h200.yaml": "schema: amptune.profile/1\nentries:\n"
    "  - {match: {nvidia.com/gpu.product: NVIDIA-H200}, policy: {autocast: bf16}}\n",
}


def helps() -> str:
    """The help of the program and of every command."""
    groups = [(), *((name,) for name in COMMANDS), ("profile", "build"), ("profile", "resolve")]
    with _somewhere():
        return "\n".join(_shown((*group, "--help"), _ran(*group, "--help")) for group in groups)


def errors() -> str:
    """Exit code and text of every mistake; what reaches the machine meets the synthetic one."""
    with _somewhere() as folder:
        _write_study(folder / "study")
        (folder / "empty").mkdir()
        (folder / "empty" / "journal.log").write_text("")
        (folder / "broken").mkdir()
        (folder / "broken" / "journal.log").write_text("no journal\nat all\n")
        return "\n".join(_shown(arguments, _on_a_machine(arguments)) for arguments in MISTAKES)


def schemas() -> dict[str, str]:
    """The JSON Schemas, a page each."""
    return {f"schemas/{kind}.json": _ran("schema", kind).stdout for kind in ("policy", "profile", "space")}


def answers() -> str:
    """What files and a study that were written before say today."""
    with _somewhere() as folder:
        shutil.copytree(FILES, folder / "files")
        policies = sorted((folder / "files" / "policies").iterdir())
        lines: list[tuple[str, ...]] = []
        for path in (str(policy.relative_to(folder)) for policy in policies):
            lines += [("check", path), ("explain", path)]
        lines += [("check", "files/profile.yaml"), ("check", "files/space.yaml")]
        labels = ("nvidia.com/gpu.product=NVIDIA-H200", "nvidia.com/gpu.compute.major=8", "site.rack=b7")
        lines += [("profile", "resolve", "files/profile.yaml", "--label", label) for label in labels]
        lines += [("report", "files/study", "--objective", what) for what in ("throughput", "memory")]
        lines += [("explain", "files/study/policy.yaml"), ("report", "files/study", "--json")]
        return "\n".join(_shown(line, _ran(*line)) for line in lines)


def shapes() -> str:
    """The keys and types of what each command prints with `--json`."""
    study, policy = "study", "policy.yaml"
    with _somewhere() as folder:
        shutil.copytree(FILES, folder / "files")
        lines: list[tuple[str, ...]] = [
            ("probe", "--device", "cpu"),
            ("init", "mine.py"),
            ("tune", TARGET, "--study", study, "--budget", "300s", "-o", policy),
            ("report", study),
            ("explain", policy),
            ("diagnose", TARGET),
            ("check", policy),
            ("check", "files/profile.yaml"),
            ("check", "files/space.yaml"),
            ("profile", "build", policy, "-o", "cluster.yaml"),
            ("profile", "resolve", "files/profile.yaml", "--label", "site.rack=b7"),
            ("tune", "nowhere.py:x"),
        ]
        told = []
        for line in lines:
            ran = _on_a_machine((*line, "--json"))
            told.append(f"$ amptune {' '.join(line)} --json\n{_shape_of(ran, types=line[0] != 'probe')}")
        (folder / "claims.yaml").write_text("schema: amptune.policy/1\nautocast: bf16\nevidence: {speedup: 1.01}\n")
        told.append(f"$ amptune verify --json\n{_shape_of(_on_a_machine(('verify', 'claims.yaml', TARGET, '--json')))}")
    return "\n".join(told)


def written_study(folder: Path) -> None:
    """Tunes the synthetic machine into `folder`: journal, comparisons and policy, as a user's tuning leaves them."""
    with _somewhere():
        _write_study(folder)


def _write_study(folder: Path) -> None:
    line = ("tune", TARGET, "--study", str(folder), "--budget", "60s", "-o", "policy.yaml", "--no-compile")
    ran = _on_a_machine(line)
    if ran.returncode:
        raise RuntimeError(f"the synthetic machine was not tuned:\n{ran.stderr}")
    shutil.move("policy.yaml", folder / "policy.yaml")
    for lock in folder.glob(".lock*"):
        lock.unlink()


def _on_a_machine(arguments: Sequence[str]) -> Done:
    """What measures gets the synthetic machine; `verify` of a wrong file does not come to that."""
    if arguments[0] not in ("tune", "diagnose") and arguments[:2] != ("verify", "claims.yaml"):
        return _ran(*arguments)
    return _ran(*arguments, evaluator=evaluator_of(CASE, SimulatedClock()))


def _ran(*arguments: str, evaluator: SyntheticEvaluator | None = None) -> Done:
    """Runs a command in this process; click's own runner would wrap its help to another width."""
    clock = time.monotonic if evaluator is None else evaluator.clock
    session = Session(started=clock(), clock=clock, evaluator=evaluator)
    stdout, stderr, code = StringIO(), StringIO(), None
    with redirect_stdout(stdout), redirect_stderr(stderr):
        try:
            cli.main(arguments, prog_name="amptune", obj=session)
        except SystemExit as ended:
            code = ended.code
    return Done(returncode=code if isinstance(code, int) else 0, stdout=stdout.getvalue(), stderr=stderr.getvalue())


def _shown(arguments: Sequence[str], ran: Done) -> str:
    """A command line with all that came of it, paths of this run left out."""
    here = os.path.realpath(os.getcwd())
    streams = "".join(
        f"-- {name}\n" + "".join(f"{line.rstrip()}\n" for line in text.rstrip().splitlines())
        for name, text in (("stdout", ran.stdout), ("stderr", ran.stderr))
        if text.strip()
    )
    return f"$ amptune {' '.join(arguments)}\nexit {ran.returncode}\n{streams}".replace(f"{here}/", "").replace(
        here, "."
    )


def _shape_of(ran: Done, *, types: bool = True) -> str:
    """Keys and types, or keys alone: what a machine has not is null there."""
    lines = sorted({line if types else line.partition(": ")[0] for line in _paths(json.loads(ran.stdout), "")})
    return f"exit {ran.returncode}\n" + "\n".join(lines) + "\n"


def _paths(value: Any, path: str) -> Iterator[str]:
    """Every key with the type of what stands there; items of a list share a path."""
    if path.rpartition(".")[2] in ("labels", "valid_for"):
        yield f"{path}.*: str"  # which ones there are is the machine's
    elif isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _paths(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for item in value:
            yield from _paths(item, f"{path}[]")
    else:
        kind = "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__
        yield f"{path}: {kind}"


@contextmanager
def _somewhere() -> Iterator[Path]:
    """An empty folder to run commands in, with a script to name and malformed files, and the same width everywhere."""
    before, environment = Path.cwd(), dict(os.environ)
    imports = mock.patch("amptune.measure.workers.processes.start_importing")
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(), imports:
        warnings.simplefilter("ignore")
        folder = Path(os.path.realpath(name))
        (folder / "train.py").write_text("small = None\n")
        for file, text in MALFORMED.items():
            (folder / file).write_text(text)
        os.environ.update(PLAIN)
        os.environ.pop("AMPTUNE_LABELS", None)
        os.chdir(folder)
        try:
            yield folder
        finally:
            os.chdir(before)
            os.environ.clear()
            os.environ.update(environment)
