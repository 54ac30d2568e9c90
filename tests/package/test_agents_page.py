"""SKILL.md, as an assistant follows it: its commands run in their order on a small script; the keys it names exist."""

import json
import re
import shlex
from pathlib import Path

import commands
import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "SKILL.md").read_text()
LINES = "".join(re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)).splitlines()
SCRIPT = """
import sys, torch
net = torch.nn.Linear(64, 8)
sgd = torch.optim.SGD(net.parameters(), float(sys.argv[2]))
for _ in range(20_000):
    sgd.zero_grad()
    net(torch.randn(16, 64)).square().mean().backward()
    sgd.step()
"""
NAMED = {
    "probe": {"gpu"},
    "dry-run": {"trains", "baseline"},
    "tune": {"confidence", "provisional", "speedup", "speedup_ci95", "policy", "output", "evidence", "valid_for"},
    "explain": {"sentences"},
    "verify": {"holds"},
}


def test_the_page_is_short_names_every_exit_code_and_llms_txt_leads_to_files() -> None:
    assert yaml.safe_load(PAGE.split("---")[1]).keys() == {"name", "description"}
    assert len(PAGE.splitlines()) <= 120
    documented = (REPOSITORY / "docs" / "commands.md").read_text().partition("## Output and exit codes")[2]
    assert len({tuple(re.findall(r"^\| (\d+) \|", text, re.MULTILINE)) for text in (PAGE, documented)}) == 1
    assert all((REPOSITORY / to).exists() for to in re.findall(r"\]\((.+?)\)", (REPOSITORY / "llms.txt").read_text()))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_its_commands_run_in_their_order_and_answer_with_the_keys_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    for line in filter(None, LINES):
        given = shlex.split(re.sub(r"\d+s\b", commands.budget_here(12), line))[1:]
        done = commands.process(*given, folder=tmp_path)
        assert done.returncode in ((0, 1) if given[0] == "verify" else (0,)), f"{line}\n{done.stderr}"
        answer = json.loads(done.stdout) if "--json" in given else {}
        assert not NAMED.get("dry-run" if "--dry-run" in given else given[0], set()) - answer.keys(), line
        if "--budget" in given and given[0] == "tune":
            assert {"step_ms", "trials", "seconds"} <= answer["evidence"].keys()


@pytest.mark.parametrize(("policy", "code"), [("autocast: bf15", 2), ("valid_for: {kubernetes.io/arch: none}", 4)])
def test_an_error_is_an_object_with_its_exit_code(policy: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "policy.yaml").write_text(f"schema: amptune.policy/1\n{policy}\n")
    done = commands.run("check", "policy.yaml", "--json", folder=tmp_path)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["schema"], answer["exit_code"]) == (code, "amptune.error/1", code)
