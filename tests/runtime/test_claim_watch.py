"""Training tells: `apply` compares the first hundreds of steps with the file's evidence. Time stands still in most."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amptune.hardware.detect import probe
from amptune.policy.file_io import save
from amptune.policy.policy_file import Evidence, PolicyFile
from amptune.policy.settings import Policy
from amptune.runtime import claim_watch
from amptune.runtime.apply_policy import PolicyDriftWarning, apply
from amptune.runtime.claim_watch import ClaimWatch
from amptune.runtime.step_claim import STEPS_COMPARED, STEPS_TO_SETTLE, StepClaim
from amptune.runtime.tuned import Tuned

ENOUGH = STEPS_TO_SETTLE + STEPS_COMPARED + 1
POLICY = Policy(batch_size=4)
EVIDENCE = Evidence(step_ms=10.0, baseline={"step_ms": 20.0})


class StoppedClock:
    """Stands in for the module `time`; the tests' loops say how long things take."""

    def __init__(self) -> None:
        self.now_ms = 0.0

    def perf_counter(self) -> float:
        return self.now_ms / 1000


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> StoppedClock:
    stopped = StoppedClock()
    monkeypatch.setattr(claim_watch, "time", stopped)
    return stopped


def here(evidence: Evidence = EVIDENCE, policy: Policy = POLICY) -> PolicyFile:
    return PolicyFile(policy=policy, valid_for=dict(probe("cpu").labels), evidence=evidence)


def labelled(name: str, value: str) -> PolicyFile:
    return replace(here(), valid_for={**here().valid_for, name: value})


def sgd(tuned: Tuned) -> torch.optim.Optimizer:
    return tuned.optimizer(torch.optim.SGD(tuned.model.parameters(), lr=1e-3))


def hooks(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_post_hooks)


def train(tuned: Tuned, step: Callable[[Tuned, torch.optim.Optimizer, int], None], steps: int = ENOUGH) -> list[str]:
    """Returns the codes of the findings, each of which is one warning, and there is no other warning."""
    optimizer = sgd(tuned)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for n in range(steps):
            step(tuned, optimizer, n)
    found = [finding.code for finding in tuned.findings]
    assert [(one.category, str(one.message)) for one in said] == [(PolicyDriftWarning, str(f)) for f in tuned.findings]
    return found


def forward(tuned: Tuned, rows: int = 4) -> Any:
    with tuned.autocast():
        return tuned.model(tuned.batch(torch.ones(rows, 2))).float().square().mean()


def recipe(clock: StoppedClock, step_ms: float, between_ms: Callable[[int], float] = lambda _: 0.0) -> Any:
    """The README's step, which takes `step_ms`, and after it what the loop does between two steps."""

    def step(tuned: Tuned, optimizer: torch.optim.Optimizer, n: int) -> None:
        loss = forward(tuned)
        clock.now_ms += step_ms
        tuned.scaler.scale(loss).backward()
        tuned.scaler.step(optimizer)
        tuned.scaler.update()
        optimizer.zero_grad()
        clock.now_ms += between_ms(n)

    return step


def test_a_file_that_promised_far_too_little_is_told_once_at_the_loops_own_line(tmp_path: Path) -> None:
    """With the real clock, a path and the plain recipe."""
    save(here(Evidence(step_ms=1e-6)), tmp_path / "policy.yaml")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tuned = apply(tmp_path / "policy.yaml", nn.Linear(2, 2))
        optimizer = sgd(tuned)
        for _ in range(2 * ENOUGH):
            tuned.scaler.scale(forward(tuned)).backward()
            tuned.scaler.step(optimizer)
            tuned.scaler.update()
            optimizer.zero_grad()
    (warning,) = said
    assert warning.category is PolicyDriftWarning
    assert warning.filename == __file__
    assert re.fullmatch(
        r"your steps take .* ms .*, this policy promised 1e-06: `amptune verify` .*", str(warning.message)
    )
    assert [finding.code for finding in tuned.findings] == ["slower-than-promised"]
    assert hooks(optimizer) == 0


def test_an_honest_file_is_trained_under_without_a_word() -> None:
    tuned = apply(here(Evidence(step_ms=1e9)), nn.Linear(2, 2))
    optimizer = sgd(tuned)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(ENOUGH):
            assert hooks(optimizer) == (n > 0)
            tuned.scaler.scale(forward(tuned)).backward()
            tuned.scaler.step(optimizer)
            optimizer.zero_grad()
    assert hooks(optimizer) == 0
    assert tuned.findings == ()


@pytest.mark.parametrize(
    ("step_ms", "expected"), [(12.0, []), (15.0, ["slower-than-promised"]), (25.0, ["slower-than-baseline"])]
)
def test_steps_are_held_to_the_claim_and_to_the_baseline(clock: StoppedClock, step_ms: float, expected: Any) -> None:
    assert train(apply(here(), nn.Linear(2, 2)), recipe(clock, step_ms)) == expected


def test_the_first_steps_may_take_their_time(clock: StoppedClock) -> None:
    def compiling(tuned: Tuned, optimizer: torch.optim.Optimizer, n: int) -> None:
        recipe(clock, 10_000.0 if n < STEPS_TO_SETTLE else 10.0)(tuned, optimizer, n)

    assert train(apply(here(), nn.Linear(2, 2)), compiling) == []


def test_a_policy_that_compiles_anew_every_few_steps_is_told(clock: StoppedClock) -> None:
    def compiling(tuned: Tuned, optimizer: torch.optim.Optimizer, n: int) -> None:
        recipe(clock, 500.0 if n % 8 == 0 else 10.0)(tuned, optimizer, n)

    assert train(apply(here(), nn.Linear(2, 2)), compiling) == ["slower-than-baseline"]


@pytest.mark.parametrize("every", [1, 7, 50])
def test_waiting_for_data_validating_and_saving_between_steps_do_not_count(clock: StoppedClock, every: int) -> None:
    def pause_ms(n: int) -> float:
        return 3_000.0 if n % every == 0 else 0.0

    assert train(apply(here(), nn.Linear(2, 2)), recipe(clock, 10.0, pause_ms)) == []


def test_a_validation_under_the_policys_autocast_does_not_count(clock: StoppedClock) -> None:
    def validating(tuned: Tuned, optimizer: torch.optim.Optimizer, n: int) -> None:
        recipe(clock, 10.0)(tuned, optimizer, n)
        if n % 10 == 0:
            for _ in range(3):
                forward(tuned)
                clock.now_ms += 1_000.0

    assert train(apply(here(), nn.Linear(2, 2)), validating, ENOUGH + ENOUGH // 9) == []


def accumulating(clock: StoppedClock, micro_batches: int) -> Any:
    def step(tuned: Tuned, optimizer: torch.optim.Optimizer, _: int) -> None:
        for _ in range(micro_batches):
            forward(tuned).backward()
            clock.now_ms += 15.0
        optimizer.step()

    return step


def test_a_step_has_all_its_micro_batches(clock: StoppedClock) -> None:
    twice = replace(POLICY, accumulate=2)
    assert train(apply(here(Evidence(step_ms=30.0), twice), nn.Linear(2, 2)), accumulating(clock, 2)) == []
    assert train(apply(here(Evidence(step_ms=20.0), twice), nn.Linear(2, 2)), accumulating(clock, 2)) == [
        "slower-than-promised"
    ]


def test_a_loop_with_other_micro_batches_is_not_compared_and_given_up(clock: StoppedClock) -> None:
    tuned = apply(here(), nn.Linear(2, 2))
    optimizer = sgd(tuned)
    for n in range(2 * ENOUGH):
        accumulating(clock, 2)(tuned, optimizer, n)
    assert tuned.findings == ()
    assert hooks(optimizer) == 0


def test_a_loop_with_another_batch_size_is_not_compared(clock: StoppedClock) -> None:
    def wide(tuned: Tuned, optimizer: torch.optim.Optimizer, _: int) -> None:
        forward(tuned, rows=64).backward()
        clock.now_ms += 100.0
        optimizer.step()

    def asking(tuned: Tuned, optimizer: torch.optim.Optimizer, n: int) -> None:
        assert tuned.batch_size == 4
        wide(tuned, optimizer, n)

    assert train(apply(here(), nn.Linear(2, 2)), wide) == []
    # a sequence may lie in the first dimension
    assert train(apply(here(), nn.Linear(2, 2)), asking) == ["slower-than-baseline"]


def test_steps_that_the_loss_scaler_skips_are_left_out(clock: StoppedClock) -> None:
    def overflowing(tuned: Tuned, optimizer: torch.optim.Optimizer, n: int) -> None:
        loss = forward(tuned) * (float("inf") if n % 3 == 0 else 1.0)
        clock.now_ms += 10.0
        tuned.scaler.scale(loss).backward()
        tuned.scaler.step(optimizer)
        tuned.scaler.update(1.0)
        optimizer.zero_grad()

    tuned = apply(here(policy=replace(POLICY, autocast="fp16")), nn.Linear(2, 2))
    assert train(tuned, overflowing, 4 * ENOUGH) == []
    assert tuned.claim_watch is not None
    assert not tuned.claim_watch._is_on


def test_only_the_first_of_several_optimizers_is_followed(clock: StoppedClock) -> None:
    tuned = apply(here(), nn.Linear(2, 2))
    other = sgd(tuned)

    def both(tuned: Tuned, optimizer: torch.optim.Optimizer, n: int) -> None:
        recipe(clock, 10.0)(tuned, other, n)
        optimizer.step()

    assert train(tuned, both) == []
    assert hooks(other) == 0


def is_watched(policy: Any, model: nn.Module | None = None, **how: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with apply(policy, model or nn.Linear(2, 2), **how) as tuned:
            return tuned.claim_watch is not None


@pytest.mark.parametrize(
    "policy",
    [
        POLICY,
        "apex:O0",
        here(Evidence()),
        PolicyFile(policy=POLICY, evidence=EVIDENCE),
        labelled("nvidia.com/gpu.product", "NVIDIA-H200"),
        labelled("model", "sha256:other"),
    ],
    ids=["a bare policy", "a preset", "no evidence", "no labels", "other hardware", "another model"],
)
def test_without_evidence_for_this_machine_and_model_nothing_is_watched(policy: Any) -> None:
    assert is_watched(here())
    assert not is_watched(policy, any_hardware=True)


def test_other_software_is_watched() -> None:
    assert is_watched(labelled("torch", "1.0"))


def test_the_guards_switch_turns_the_watch_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_watched(here(), guard=True)
    assert not is_watched(here(), guard=False)
    for value, expected in (("", True), ("1", True), ("0", False)):
        monkeypatch.setenv("AMPTUNE_GUARD", value)
        assert is_watched(here()) is expected


def test_undo_ends_the_watch(clock: StoppedClock) -> None:
    with apply(here(), nn.Linear(2, 2)) as tuned:
        optimizer = sgd(tuned)
        recipe(clock, 100.0)(tuned, optimizer, 0)
        assert hooks(optimizer) == 1
    assert hooks(optimizer) == 0
    for n in range(ENOUGH):
        recipe(clock, 100.0)(tuned, optimizer, n)
    assert hooks(optimizer) == 0
    assert tuned.findings == ()


def test_a_loop_without_the_policys_autocast_is_not_watched() -> None:
    tuned = apply(here(), nn.Linear(2, 2))
    assert hooks(sgd(tuned)) == 0


def test_a_watched_optimizer_is_copied_without_its_watch(clock: StoppedClock) -> None:
    tuned = apply(here(), nn.Linear(2, 2))
    optimizer = sgd(tuned)
    recipe(clock, 1.0)(tuned, optimizer, 0)
    assert not hooks(copy.deepcopy(optimizer))


class SlowGpu:
    """A GPU's clock, of which moments pass when `done` says so; with `broken` they cannot be read."""

    def __init__(self, *, broken: bool = False) -> None:
        self.done = False
        self.broken = broken
        self.capturing = False
        self.now_ms = 0.0

    def is_running(self) -> bool:
        return not self.capturing

    def moment(self) -> float:
        self.now_ms += 50.0
        return self.now_ms

    def has_passed(self, _: float) -> bool:
        return self.done

    def ms_between(self, began: float, ended: float) -> float:
        if self.broken:
            raise RuntimeError("device handle")
        return ended - began


def watched_on(gpu: SlowGpu, monkeypatch: pytest.MonkeyPatch, steps: int = ENOUGH) -> tuple[ClaimWatch, list[str], Any]:
    monkeypatch.setattr(claim_watch, "_clock_of", lambda _: gpu)
    said: list[str] = []
    watch = ClaimWatch(StepClaim(step_ms=10.0, batch_size=4, accumulate=1), lambda finding: said.append(finding.code))
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    watch.follow(optimizer)
    watch.size_is_as_measured()
    for _ in range(steps):
        watch.pass_begins("cuda")
        optimizer.step()
    return watch, said, optimizer


def test_the_watch_waits_for_steps_not_for_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SlowGpu()
    watch, said, optimizer = watched_on(gpu, monkeypatch)
    assert not said
    gpu.done = True
    watch.pass_begins("cuda")
    assert said == ["slower-than-promised"]
    assert hooks(optimizer) == 0


def test_a_capture_of_the_whole_step_ends_the_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SlowGpu()
    watch, said, optimizer = watched_on(gpu, monkeypatch, steps=3)
    gpu.capturing = True
    watch.pass_begins("cuda")
    assert hooks(optimizer) == 0
    assert not said


def test_moments_that_cannot_be_read_end_the_watch_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SlowGpu(broken=True)
    gpu.done = True
    _, said, optimizer = watched_on(gpu, monkeypatch)
    assert not said
    assert hooks(optimizer) == 0


def test_distributed_training_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SlowGpu()
    gpu.done = True
    monkeypatch.setattr(claim_watch, "world_size", lambda: 2)
    _, said, optimizer = watched_on(gpu, monkeypatch)
    assert not said
    assert hooks(optimizer) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("read_every", [1, 10, 1000])
def test_on_a_gpu_a_step_takes_the_gpus_time_wherever_the_loop_waits_for_it(read_every: int) -> None:
    """A kernel that spins for some ms a step, launched without waiting; the loss is read now and then."""
    watch = ClaimWatch(StepClaim(step_ms=1.0, batch_size=4, accumulate=1), lambda _: None)
    weight = nn.Parameter(torch.ones(4, device="cuda"))
    optimizer = torch.optim.SGD([weight])
    watch.follow(optimizer)
    watch.size_is_as_measured()
    cycles = 5_000_000
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(100):  # until the GPU's clock is at its highest
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    began.record()
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
    ended.record()
    ended.synchronize()
    for n in range(ENOUGH):
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
