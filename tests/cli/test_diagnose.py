"""`amptune diagnose` of real workloads, measured in this process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import Done, Machine, run
from in_this_process import measuring_here

from amptune.measure.results.outcome import Effort, Measurement, Outcome
from amptune.policy.settings import Policy

WORKLOADS = """
import time
import torch
from torch import nn
from amptune import Workload

class Squares(nn.Module):
    '''The share of each square, which fp16 cannot hold.'''

    def forward(self, x):
        x = 1000 * x
        return x * x / (x * x).sum(-1, keepdim=True)

def net(middle):
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), middle, nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 4))

def of(middle=nn.Identity, **parts):
    given = dict(model=lambda: net(middle()), batch=lambda n: (torch.randn(n, 32), torch.randint(4, (n,))),
                 loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
                 optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05), batch_size=32, name="net")
    return Workload(**{**given, **parts})

def half_loss(model, batch):
    logits = model(batch[0])
    if torch.is_autocast_enabled("cpu"):
        logits = logits.to(torch.get_autocast_dtype("cpu"))
    return nn.functional.mse_loss((1e8 * logits * 1e-8).float(), nn.functional.one_hot(batch[1], 4).float())

def large_loss(model, batch):
    return nn.functional.mse_loss((1e8 * model(batch[0]) * 1e-8).float(), nn.functional.one_hot(batch[1], 4).float())

def slow_batch(n):
    time.sleep(0.02)
    return torch.randn(n, 32), torch.randint(4, (n,))

def slow_loader(n):
    while True:
        yield slow_batch(n)

sound = of()
squares = of(Squares)
outside = of(loss=half_loss)
behind = of(loss=large_loss)
not_a_number = of(loss=lambda model, batch: model(batch[0]).mean() * float("nan"))
starved = of(loader=slow_loader)

class Divides(nn.Module):
    def forward(self, x):
        return x / (x - x)

def clips_scaled(tuned, model, optimizer, batch):
    optimizer.zero_grad()
    with tuned.autocast():
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    tuned.scaler.scale(loss).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    tuned.scaler.step(optimizer)
    tuned.scaler.update()
    return loss

class Island(nn.Linear):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.float())

divides = of(Divides)
island = Workload(model=lambda: nn.Sequential(nn.Linear(8, 512), nn.GELU(), Island(512, 512), nn.Linear(512, 8)),
                  batch=lambda n: torch.randn(n, 8), loss=lambda model, batch: model(batch).square().mean(),
                  optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01), batch_size=256)
misused = of(loss=None, step=clips_scaled)
spoiled = of(batch=lambda n: (torch.full((n, 32), float("inf")), torch.randint(4, (n,))))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(WORKLOADS)
    return tmp_path


def diagnose(target: str, *options: str, folder: Path) -> Done:
    with measuring_here(f"{folder}/train.py:{target}") as here:
        return run("diagnose", f"train.py:{target}", *options, folder=folder, evaluator=here)


def answer_to(target: str, folder: Path, code: int = 0) -> dict[str, Any]:
    done = diagnose(target, "--json", folder=folder)
    assert done.returncode == code, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_module_that_overflows_is_named_first_and_its_exclusion_is_the_cure(folder: Path) -> None:
    answer = answer_to("squares", folder)
    assert answer["schema"] == "amptune.diagnose/1"
    first = answer["findings"][0]
    assert (first["code"], first["module"], first["autocast"]) == ("first-nonfinite", "2", "fp16")
    assert first["inputs_largest"] < 65504
    fp16 = next(one for one in answer["numerics"] if one["autocast"] == "fp16")
    assert fp16["sound"] is False
    assert fp16["cure"]["modules"] == ["2"]
    assert fp16["cure"]["fp32_modules"] in ([{"path": "2"}], [{"type": "Squares"}])
    assert next(one for one in answer["numerics"] if one["autocast"] == "bf16")["sound"] is True


def test_what_a_model_keeps_in_fp32_under_autocast_is_named_with_its_line(folder: Path) -> None:
    found = next(one for one in answer_to("island", folder)["findings"] if one["code"] == "fp32-islands")
    assert found["module"] == "2"
    line = 1 + WORKLOADS.splitlines().index("            return super().forward(x.float())")
    assert f"train.py:{line})" in found["message"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "code", "module", "words"),
    [
        ("outside", "unsound", None, "in the loss function"),
        ("misused", "scaler-breaks", None, "scaler.unscale_(optimizer)"),
        ("behind", "breaks-behind", "5", "outside of any module"),
    ],
)
def test_a_fault_outside_of_the_model_is_said_to_be_there(
    target: str, code: str, module: str | None, words: str, folder: Path
) -> None:
    findings = answer_to(target, folder)["findings"]
    found = next(one for one in findings if one["code"] == code)
    assert (found.get("module"), words in found["message"]) == (module, True)
    assert ("autocast-breaks" in {one["code"] for one in findings}) is (target == "outside")


def test_a_sound_model_is_said_to_be_sound_its_slowest_modules_are_named_and_waiting_is_told(folder: Path) -> None:
    said = diagnose("starved", folder=folder).stdout
    for words in (
        "net on ",
        "autocast bf16 is as good as FP32",
        "under bf16, the slowest modules",
        "under stock PyTorch",
    ):
        assert words in said
    assert "input-bound" in {finding["code"] for finding in answer_to("starved", folder)["findings"]}


@pytest.mark.parametrize(
    ("target", "module", "words"),
    [
        ("not_a_number", None, "is finite: look at the loss function"),
        ("spoiled", None, "what the model is given is not finite: look at the batches"),
        ("divides", "2", "what comes into Divides is finite (largest "),
    ],
)
def test_where_fp32_breaks_is_a_finding(folder: Path, target: str, module: str | None, words: str) -> None:
    [finding] = answer_to(target, folder, code=3)["findings"]
    assert (finding["code"], finding["module"]) == ("fp32-breaks", module)
    assert words in finding["message"]


class Throttled(Machine):
    def measure(self, policy: Policy, effort: Effort) -> Outcome:
        outcome = super().measure(policy, effort)
        assert isinstance(outcome, Measurement)
        return replace(outcome, contaminated_by=("hw-thermal",))


def test_what_is_slow_is_said_of_the_recipe_and_of_stock_pytorch_and_what_made_it_slow_from_outside(
    folder: Path,
) -> None:
    machine = Throttled()
    answer = json.loads(run("diagnose", "train.py:sound", "--json", folder=folder, evaluator=machine).stdout)
    assert [profile["policy"] for profile in answer["profiles"]] == ["bf16", "stock PyTorch"]
    assert answer["hardware"] == "NVIDIA H200"
    assert machine.closed
    [found] = (one for one in answer["findings"] if one["code"] == "throttled")
    assert found["message"] == "the GPU was thermally throttled (HW thermal) while steps were timed: 1 of 1 disturbed"
