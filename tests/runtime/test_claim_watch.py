"""Training tells: `apply` compares the first 200 steps with the file's evidence. Time stands still in most tests."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from amptune.hardware.detect import probe
from amptune.policy.file_io import save
from amptune.policy.policy_file import PolicyFile
from amptune.policy.settings import Policy
from amptune.runtime import claim_watch
from amptune.runtime.apply_policy import PolicyDriftWarning, apply
from amptune.runtime.claim_watch import STEPS, ClaimWatch

HERE = PolicyFile(policy=Policy(batch_size=4), valid_for=dict(probe("cpu").labels), evidence={"step_ms": 10.0})
AT_ONCE = replace(HERE, evidence={"step_ms": 1e-6})


def go(file: Any, *, rows: int = 4, passes: int = 1, validate: int = STEPS, step_ms: Any = 12.0) -> Any:
    """Trains a little longer than is watched, on time that stands still but in steps and validations."""
    now = 0.0
    tuned = apply(file, nn.Linear(2, 2))
    optimizer = tuned.optimizer(torch.optim.SGD(tuned.model.parameters(), lr=1e-3))

    def forward() -> Any:
        with tuned.autocast():
            return tuned.model(tuned.batch(torch.ones(rows, 2))).float().square().mean()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(claim_watch, "time", SimpleNamespace(perf_counter=lambda: now))
        for step in range(STEPS + 2):
            for _ in range(passes):
                tuned.scaler.scale(forward()).backward()
                now += (step_ms(step) if callable(step_ms) else step_ms) / 1000
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            optimizer.zero_grad()
            now += 3.0  # waiting for data, or saving
            if step % validate == 0:
                forward()
                now += 9.0
    assert not optimizer._optimizer_step_post_hooks
    return tuned


@pytest.mark.filterwarnings("ignore::amptune.PolicyDriftWarning")
@pytest.mark.parametrize(
    ("loop", "is_told"),
    [
        ({}, False),
        ({"step_ms": 12.6}, True),
        ({"step_ms": lambda step: 10.0 if step >= 50 else 900.0}, False),  # compiles
        ({"step_ms": lambda step: 10.0 if step % 12 else 900.0}, False),  # now and then a batch of another size
        ({"step_ms": lambda step: 10.0 if step % 8 else 500.0}, True),  # compiles anew all the time
        ({"validate": 1, "step_ms": 99.0}, False),
        ({"rows": 64, "step_ms": 99.0}, False),
        ({"passes": 2, "step_ms": 99.0}, False),
    ],
)
def test_a_training_is_told_of_steps_that_are_clearly_slower_than_promised(loop: Any, is_told: bool) -> None:
    tuned = go(HERE, **loop)
    assert [finding.code for finding in tuned.findings] == ["slower-than-promised"] * is_told


def test_a_step_has_all_its_micro_batches_and_none_that_the_scaler_skips() -> None:
    twice = replace(HERE, policy=Policy(batch_size=4, accumulate=2, autocast="fp16"))
    with apply(AT_ONCE, nn.Linear(2, 2)) as tuned:  # undone, it watches no more
        optimizer = tuned.optimizer(torch.optim.SGD(tuned.model.parameters(), lr=1e-3))
    assert not optimizer._optimizer_step_post_hooks
    with pytest.warns(
        PolicyDriftWarning, match=r"your steps take 14 ms from .*, this policy promised 10: `amptune ver"
    ):
        assert go(twice, passes=2, step_ms=7.0).findings[0].figures == {"step_ms": 14.0, "tuned_step_ms": 10.0}


def test_it_is_told_once_at_the_loops_own_line_by_the_clock_of_the_host(tmp_path: Path) -> None:
    save(AT_ONCE, tmp_path / "policy.yaml")
    tuned = apply(tmp_path / "policy.yaml", nn.Linear(2, 2))
    optimizer = tuned.optimizer(torch.optim.SGD(tuned.model.parameters(), lr=1e-3))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2 * STEPS):
            with tuned.autocast():
                loss = tuned.model(torch.ones(tuned.batch_size, 2)).sum()
            loss.backward()
            optimizer.step()
    assert [(one.category, one.filename) for one in said] == [(PolicyDriftWarning, __file__)]


@pytest.mark.filterwarnings("ignore::amptune.PolicyDriftWarning")
def test_only_evidence_of_this_machine_and_model_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_watched(file: Any, **how: Any) -> bool:
        with apply(file, nn.Linear(2, 2), any_hardware=True, **how) as tuned:
            return tuned.claim_watch is not None

    def labelled(**labels: str) -> PolicyFile:
        return replace(HERE, valid_for={**HERE.valid_for, **labels})

    assert is_watched(HERE, guard=True)
    assert is_watched(labelled(torch="1.0"))
    others = [labelled(**{"nvidia.com/gpu.product": "NVIDIA-H200"}), labelled(model="sha256:other")]
    figures: list[Any] = [{}, {"step_ms": 10.0, "devices": 2}]
    figures += [{"step_ms": wrong} for wrong in ("10", 0.0, float("inf"), True)]
    unclear = [replace(HERE, valid_for={}), replace(HERE, policy=Policy()), HERE.policy, "apex:O0"]
    assert not any(map(is_watched, [*others, *unclear, *(replace(HERE, evidence=one) for one in figures)]))
    assert not is_watched(HERE, guard=False)
    monkeypatch.setenv("AMPTUNE_GUARD", "0")
    assert not is_watched(HERE)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("read_every", [1, 10, 1000])
def test_on_a_gpu_a_step_takes_the_gpus_time_wherever_the_loop_waits_for_it(read_every: int) -> None:
    """A kernel that spins for some ms a step, launched without waiting; the loss is read now and then."""
    watch = ClaimWatch(AT_ONCE, lambda _: None)
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([weight])
    watch.follow(optimizer)
    watch.has_measured_size = True
    cycles = 5_000_000
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(100):  # until the GPU's clock is at its highest
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    began.record()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    ended.record()
    ended.synchronize()
    for n in range(STEPS + 1):
        watch.pass_begins("cuda")
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
        if n % read_every == 0:
            weight.sum().item()
    torch.cuda.synchronize()
    watch.pass_begins("cuda")
    assert watch.finding is not None
    assert watch.finding.figures["step_ms"] == pytest.approx(began.elapsed_time(ended), rel=0.3)
