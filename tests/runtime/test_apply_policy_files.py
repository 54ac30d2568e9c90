from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amptune.errors import HardwareMismatchError, PolicyApplyError
from amptune.hardware.detect import probe
from amptune.policy.file_io import save
from amptune.policy.policy_file import Evidence, PolicyFile
from amptune.policy.profile import Profile
from amptune.policy.settings import Fp32Rule, Policy
from amptune.runtime.apply_policy import PolicyDriftWarning, apply
from amptune.runtime.digest import model_digest

HERE = dict(probe().labels)
POLICY = Policy(autocast="bf16", fp32_math="ieee", fp32_modules=(Fp32Rule(path="0"),))
ELSEWHERE = {"nvidia.com/gpu.product": "NVIDIA-GeForce-GTX-1070"}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU())


def untouched(model: nn.Sequential) -> bool:
    backends: Any = torch.backends  # whose stubs know half of it
    return type(model[0]) is nn.Linear and backends.cudnn.conv.fp32_precision == "tf32"


def test_a_policy_file_valid_here_is_applied_without_a_word(tmp_path: Path) -> None:
    model = net()
    save(PolicyFile(policy=POLICY, valid_for={**HERE, "model": model_digest(model)}), tmp_path / "policy.yaml")
    with warnings.catch_warnings(action="error"), apply(str(tmp_path / "policy.yaml"), model) as tuned:
        assert tuned.policy == POLICY
        assert tuned.findings == ()
        assert not untouched(model)
    assert untouched(model)


def test_a_policy_of_another_machine_is_refused_and_nothing_was_changed() -> None:
    model = net()
    with pytest.raises(HardwareMismatchError, match=r"nvidia\.com/gpu\.product: NVIDIA-GeForce-GTX-1070"):
        apply(PolicyFile(policy=POLICY, valid_for=ELSEWHERE), model)
    assert untouched(model)
    apply(PolicyFile(policy=POLICY, valid_for=ELSEWHERE), model, any_hardware=True).undo()


def test_other_versions_and_another_model_are_warned_of_and_are_findings() -> None:
    file = PolicyFile(policy=POLICY, valid_for={**HERE, "torch": "2.0", "model": "sha256:0"})
    with pytest.warns(PolicyDriftWarning) as caught, apply(file, net()) as tuned:
        assert [finding.figures["label"] for finding in tuned.findings] == ["torch", "model"]
    assert {warning.filename for warning in caught} == {__file__}
    assert "torch was 2.0 when this policy was tuned" in str(caught[0].message)


def test_a_policy_that_was_not_judged_is_warned_of() -> None:
    not_judged = {"code": "not-judged", "module": None, "message": "the numerics of bf16 were not judged"}
    evidence = Evidence(findings=[not_judged], provisional=True)
    with pytest.warns(PolicyDriftWarning, match="provisional: the numerics of bf16 were not judged"):
        tuned = apply(PolicyFile(policy=POLICY, evidence=evidence), net())
    assert [finding.code for finding in tuned.findings] == ["not-judged"]
    tuned.undo()
    # In the file of a baseline that stays, the finding is about other policies.
    apply(PolicyFile(policy=POLICY, evidence=Evidence(findings=[not_judged])), net()).undo()


def test_a_job_of_another_number_of_ranks_than_was_measured_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    over_two = PolicyFile(policy=Policy(), evidence=Evidence(devices=2))
    with pytest.warns(PolicyDriftWarning, match="measured on 2 devices that train together, and this job has 1"):
        apply(over_two, net()).undo()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings(action="error"):
        apply(over_two, net()).undo()


def test_a_lazy_model_that_is_not_built_yet_is_not_taken_for_another_and_a_profile_for_no_policy() -> None:
    file = PolicyFile(policy=POLICY, valid_for={**HERE, "model": "sha256:0"})
    with warnings.catch_warnings(action="error"):
        apply(file, nn.Sequential(nn.LazyLinear(4), nn.ReLU())).undo()
    wrong: Any = Profile(entries=())
    with pytest.raises(PolicyApplyError, match=r"not a Profile"):
        apply(wrong, net())
