"""What a notebook shows of a decision, a policy file and an applied policy, and what a console shows of the last."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from terminals import decision_of

import amptune
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import Fp32Rule, Policy


class Shown(HTMLParser):
    """The text of what a notebook shows; every tag is closed."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.words: list[str] = []
        self.feed(value._repr_html_())
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_a_decision_shows_its_policy_its_gain_how_sure_it_is_and_its_findings(tmp_path: Path) -> None:
    decision = decision_of(tmp_path)
    words = Shown(decision).words
    assert words[0] == "resnet50 on NVIDIA H200"
    assert words[words.index("memory_format") + 1] == "channels_last"
    assert words[words.index("gain") + 1].startswith("2.55× [")
    assert words[words.index("confidence") + 1] == "confirmed"
    assert {str(finding) for finding in decision.findings} <= set(words)


def test_a_policy_file_shows_settings_and_claim_and_takes_nothing_for_html() -> None:
    policy = Policy(autocast="bf16", cudnn_benchmark=True, fp32_modules=(Fp32Rule(path="a.*"), Fp32Rule(type="<b>")))
    evidence: Any = {"speedup": 2.5, "speedup_ci95": [2.4, 2.6], "confidence": "<script>"}
    found = Shown(PolicyFile(policy=policy, name="mine", valid_for={"torch": "2.11"}, evidence=evidence))
    assert found.words[0] == "policy mine"
    assert found.words[found.words.index("fp32_modules") + 1 :][:2] == ["a.*", "type <b>"]
    assert found.words[found.words.index("cudnn_benchmark") + 1] == "true"
    assert found.words[found.words.index("speedup") + 1] == "2.5"
    assert "torch: 2.11" in found.words
    assert not found.tags & {"script", "b"}
    assert "stock PyTorch" in Shown(PolicyFile(policy=Policy())).words


def test_an_applied_policy_says_what_it_is() -> None:
    tuned = amptune.apply(Policy(autocast="bf16"), torch.nn.Linear(2, 2))
    assert repr(tuned) == "<Tuned: bf16 on Linear>"
    assert Shown(tuned).words == ["policy on Linear", "autocast", "bf16"]
    tuned.undo()
    assert repr(tuned) == "<Tuned: bf16 on Linear, undone>"
    assert Shown(tuned).words[0] == "policy on Linear, undone"


def test_a_finding_of_an_applied_policy_is_counted_and_shown() -> None:
    tuned = amptune.apply(Policy(fused_optimizer=True), torch.nn.Linear(2, 2))
    tuned.optimizer(torch.optim.Rprop(tuned.model.parameters()))
    assert repr(tuned) == "<Tuned: fused optimizer on Linear, 1 finding>"
    assert str(tuned.findings[0]) in Shown(tuned).words


def test_showing_an_applied_policy_needs_nothing_but_what_training_needs() -> None:
    code = (
        "import sys, torch, amptune\n"
        "tuned = amptune.apply(amptune.Policy(autocast='bf16'), torch.nn.Linear(2, 2))\n"
        "tuned._repr_html_(); repr(tuned); amptune.PolicyFile(policy=tuned.policy)._repr_html_()\n"
        "print(*{'rich', 'click', 'optuna', 'pydantic', 'IPython'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "\n"
