"""Text of a stranger's file, on any terminal: it is shown, and nothing in it acts."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import commands
import pytest
from studies import OOM, record

from amptune.errors import visible
from amptune.measure.results.outcome import Failure
from amptune.policy.file_io import dumps, parse_policy, save
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import Fp32Rule, Policy
from amptune.policy.yaml_text import parse
from amptune.report.page import page_of
from amptune.search.decide.study_report import findings_of, study_report_of

ACTING = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\u2066\u200f\u0085\r\b\x7f\ue000\U000e0001"
HOSTILE = PolicyFile(
    policy=Policy(autocast="bf16", fp32_modules=(Fp32Rule(path=f"head{ACTING}"), Fp32Rule(type=f"Norm{ACTING}"))),
    name=f"name{ACTING}",
    valid_for={"site": f"here{ACTING}"},
    evidence={"step_ms": 1.0, "findings": [{"code": "x", "message": f"see{ACTING}", "module": f"m{ACTING}"}]},
)


def acts(text: str) -> set[str]:
    return {one for one in text if not one.isprintable() and one not in "\n\N{NO-BREAK SPACE}"}


def test_explain_check_and_resolve_show_what_no_screen_shows(tmp_path: Path) -> None:
    save(HOSTILE, tmp_path / "p.yaml")
    (tmp_path / "profile.yaml").write_text(
        "schema: amptune.profile/1\nentries: []\ndefault:\n"
        + "".join(f"  {line}\n" for line in dumps(HOSTILE).splitlines()[1:])
    )
    for line in (("explain", "p.yaml"), ("check", "p.yaml"), ("profile", "resolve", "profile.yaml")):
        done = commands.run(*line, folder=tmp_path)
        assert not acts(done.stdout + done.stderr)
    explained = commands.run("explain", "p.yaml", folder=tmp_path).stdout
    assert r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\u2066\u200f" in explained


def test_a_policy_with_such_text_survives_save_and_load() -> None:
    text = dumps(HOSTILE)
    assert not acts(text)
    assert parse_policy(parse(text, "p.yaml")) == HOSTILE


def test_a_page_shows_it_too() -> None:
    failure = Failure(kind="oom", message=f"no {ACTING}<b>", where=f"x{ACTING}.py:1")
    whole = record()
    trials = tuple(replace(one, outcome=failure) if one.outcome == OOM else one for one in whole.trials)
    tuning = replace(whole.last, workload=f"net{ACTING}", target=f"t{ACTING}.py")
    study = replace(whole, trials=trials, tunings=(tuning,), name=f"s{ACTING}")
    study_report = study_report_of(study, tuning.objective)
    page = page_of(study_report, findings_of(study_report))
    assert not acts(page)
    assert r"no \x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp" in page


def test_plain_text_is_left_as_it_is() -> None:
    assert visible("größer, 2.5×\tas fast…\n模型") == "größer, 2.5×\tas fast…\n模型"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437", "utf-8"])
def test_a_terminal_of_any_encoding_gets_a_policy_explained(encoding: str, tmp_path: Path) -> None:
    save(PolicyFile(policy=Policy(autocast="bf16", fp32_modules=(Fp32Rule(path="größe.模型…×"),))), tmp_path / "p.yaml")
    line = [sys.executable, "-m", "amptune", "explain", str(tmp_path / "p.yaml")]
    done = subprocess.run(line, env={**os.environ, "PYTHONIOENCODING": encoding}, capture_output=True, check=True)
    shown = {"ascii": rb"gr\xf6\xdfe.\u6a21\u578b...x", "utf-8": "größe.模型…×".encode()}.get(encoding)
    assert (shown or "größe.".encode(encoding)) in done.stdout
