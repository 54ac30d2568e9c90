"""Training steps recorded as CUDA graphs, as a whole or the model's passes, held against the loop on the same GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from amptune.measure.bench.bench import Bench
from amptune.measure.results.outcome import Effort, Measurement
from amptune.policy.settings import LossScale, Policy
from amptune.runtime.apply_policy import apply
from amptune.workload.workload import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Make = Callable[[Any], torch.optim.Optimizer]

# Powers of two: the learning rate of a recording is rounded to FP32, that of the loop is not.
ADAM: Make = partial(torch.optim.AdamW, lr=2.0**-8)
SGD: Make = partial(torch.optim.SGD, lr=2.0**-5, momentum=0.5)
POLICIES = [
    Policy(fused_optimizer=True),
    Policy(autocast="bf16", memory_format="channels_last", fused_optimizer=True),
    Policy(autocast="bf16", fused_optimizer=True, accumulate=3),
    Policy(autocast="fp16", fused_optimizer=True, loss_scale=LossScale(init=2.0**24, growth_interval=4)),
    Policy(autocast="fp16", fused_optimizer=True, accumulate=2),
]
HALF = Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True)
CASES: list[Any] = [("step", policy, make, clip) for policy in POLICIES for make in (ADAM, SGD) for clip in (None, 0.1)]
CASES += [(True, policy, SGD, None) for policy in (*POLICIES, HALF)]


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def net() -> nn.Sequential:
    torch.manual_seed(0)
    body = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()) for _ in range(4)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)]
    return nn.Sequential(nn.Conv2d(3, 16, 3), *body, *head).cuda()


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])


class Training:
    def __init__(self, policy: Policy, make: Make, clip: float | None = None) -> None:
        self.model = net()
        self.tuned = apply(policy, self.model, guard=False)
        self.optimizer = self.tuned.optimizer(make(self.model.parameters()))
        self.train: Any = self.tuned.training_step(loss_of, self.optimizer, clip)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 2.0 ** -(step // 4))

    def go(self, sizes: list[int]) -> list[float]:
        torch.manual_seed(1)
        losses = []
        for size in sizes:
            x, y = torch.randn(size, 3, 16, 16, device="cuda"), torch.randint(4, (size,), device="cuda")
            losses.append(self.train((x, y)).item())
            if self.train.has_updated:
                self.average.update_parameters(self.model)
                self.schedule.step()
        return losses


def both(policy: Policy, make: Make, graphs: Any = "step", **more: Any) -> tuple[Training, Training]:
    return Training(replace(policy, cuda_graphs=graphs), make, **more), Training(policy, make, **more)


def require_same(recorded: Training, plain: Training) -> None:
    for model, other in ((recorded.model, plain.model), (recorded.average, plain.average)):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, other.state_dict()[name]), name
    states = [(one.optimizer.state_dict(), one.tuned.scaler.state_dict()) for one in (recorded, plain)]
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize(("graphs", "policy", "make", "clip"), CASES)
def test_training_is_that_of_the_loop(graphs: Any, policy: Policy, make: Make, clip: float | None) -> None:
    recorded, plain = both(policy, make, graphs, clip=clip)
    sizes = [8, 8, 8, 8, 8, 8, 5, 8, 5, 5, 5, 5, 8, 8, 8, 5, 5, 8]
    expected = plain.go(sizes)
    assert recorded.go(sizes) == expected
    assert not recorded.tuned.findings
    assert graphs is True or policy.accumulate > 1 or recorded.train.recordings.calls >= 9
    require_same(recorded, plain)


def test_a_loaded_checkpoint_is_trained_on() -> None:
    recorded, plain = both(Policy(autocast="fp16", fused_optimizer=True), ADAM)
    for training in (recorded, plain):
        training.go([8] * 6)
        training.optimizer.load_state_dict(training.optimizer.state_dict())
        training.tuned.scaler.load_state_dict(training.tuned.scaler.state_dict())
    assert recorded.go([8] * 8) == plain.go([8] * 8)
    require_same(recorded, plain)
    assert type(recorded.optimizer.state_dict()["param_groups"][0]["lr"]) is float
    assert not recorded.tuned.findings


@pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True")
def test_a_capturable_optimizer_without_a_fused_kernel_is_recorded() -> None:
    recorded, plain = both(Policy(), partial(torch.optim.NAdam, lr=2.0**-8, capturable=True))
    expected = plain.go([8] * 4)
    assert recorded.go([8] * 4) == pytest.approx(expected, rel=1e-4)
    assert recorded.train.recordings.calls > 0
    assert not recorded.tuned.findings


def test_a_replayed_step_never_waits_for_the_device() -> None:
    recorded, _ = both(Policy(autocast="fp16", fused_optimizer=True), ADAM, clip=1.0)
    recorded.go([8] * 6)
    x, y = torch.randn(8, 3, 16, 16, device="cuda"), torch.randint(4, (8,), device="cuda")
    recorded.train((x, y))
    before = recorded.train.recordings.calls
    torch.cuda.set_sync_debug_mode("error")
    try:
        recorded.train.recordings.checks = False
        for _ in range(3):
            recorded.train((x, y))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert recorded.train.recordings.calls == before + 3


@pytest.mark.parametrize("graphs", [True, "step"])
def test_memory_is_given_back(graphs: Any) -> None:
    def reserved() -> int:
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    Training(Policy(fused_optimizer=True), ADAM).go([8] * 3)
    before = reserved()
    training = Training(Policy(cuda_graphs=graphs, fused_optimizer=True), ADAM)
    training.go([8] * 8)
    called: Any = training.tuned.model
    assert training.train.recordings.calls if graphs == "step" else len(called.recordings)
    training.tuned.undo()
    del training, called
    assert reserved() <= before


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return out


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::amptune.runtime.apply_policy.PolicyDriftWarning")
def test_compiled_blocks_are_a_part_of_the_step() -> None:
    losses = []
    for policy in (Policy(autocast="bf16"), Policy(autocast="bf16", compile="blocks", cuda_graphs="step")):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 4)).cuda()
        with apply(policy, model, guard=False) as tuned:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            train: Any = tuned.training_step(loss_of, optimizer)
            torch.manual_seed(1)
            data = [(torch.randn(8, 64, device="cuda"), torch.randint(4, (8,), device="cuda")) for _ in range(10)]
            losses.append([train(batch).item() for batch in data])
            assert policy.compile == "off" or train.recordings.calls >= 4
    torch.compiler.reset()
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)


def test_a_trial_times_it() -> None:
    workload = Workload(
        model=lambda: net().cpu(),
        batch=lambda n: (torch.randn(n, 3, 16, 16), torch.randint(4, (n,))),
        loss=loss_of,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        batch_size=8,
        clip=1.0,
    )
    bench = Bench(workload, torch.device("cuda"))
    policies = [Policy(autocast="bf16", fused_optimizer=True, cuda_graphs=graphs) for graphs in (False, True, "step")]
    eager, passes, step = (bench.measure(policy, Effort(warmup_s=0.5, measure_s=0.5)) for policy in policies)
    assert isinstance(eager, Measurement)
    assert isinstance(passes, Measurement)
    assert isinstance(step, Measurement)
    assert step.losses == pytest.approx(eager.losses, rel=1e-3)
