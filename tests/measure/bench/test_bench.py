"""The bench inside a worker, here in this process: what it restores, and what it accepts."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass

import pytest
import torch
from alike import trained_alike
from benches import CPU, QUICK, measured, workload_of
from torch import nn

from amptune import Policy
from amptune.errors import TargetError
from amptune.measure.bench.bench import FEW_BATCHES, Bench
from amptune.measure.bench.peak_memory import memory_for
from amptune.measure.modules.inspection import inspect_model
from amptune.measure.results.outcome import Effort, Failure, Measurement
from amptune.policy.settings import STOCK, amp_recipe
from amptune.runtime.digest import model_digest
from amptune.runtime.scaler import PolicyScaler


@dataclass(frozen=True)
class Pair:
    features: torch.Tensor
    labels: torch.Tensor
    name: str = "not a tensor"


def test_weights_buffers_and_random_state_are_restored() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
    bench = Bench(workload_of(model), CPU)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first, second = measured(bench), measured(bench)
    assert trained_alike(first, second)
    bench._restore()
    assert all(torch.equal(tensor, initial[name]) for name, tensor in bench.model.state_dict().items())


@pytest.mark.parametrize("masters", [False, True])
def test_half_weights_are_restored_to_what_they_were_in_fp32(masters: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    bench = Bench(workload_of(model), CPU)
    initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    policy = Policy(weights="half", master_weights=masters, keep_batchnorm_fp32=True)
    first, stock, second = measured(bench, policy), measured(bench), measured(bench, policy)
    assert trained_alike(first, second)
    assert not trained_alike(first, stock)
    bench._restore()
    assert all(torch.equal(tensor, initial[name]) for name, tensor in bench.model.state_dict().items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_training_begun_anew_under_half_weights_begins_with_the_same_masters() -> None:
    bench = Bench(workload_of(nn.Linear(8, 8)), CPU)
    policy = Policy(weights="half", master_weights=True)
    initial = {name: tensor.clone() for name, tensor in bench.model.state_dict().items()}
    with bench.on_device(policy) as (_, stepper):
        losses = []
        for _ in range(2):
            bench.restart()
            assert all(torch.equal(tensor, initial[name]) for name, tensor in bench.model.state_dict().items())
            losses.append([float(stepper()) for _ in range(FEW_BATCHES)])
            assert not torch.equal(bench.model.state_dict()["weight"], initial["weight"])
    assert losses[0] == losses[1]


def test_the_guard_is_never_in_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPTUNE_GUARD", "1")
    with Bench(workload_of(nn.Linear(8, 8)), CPU).on_device(STOCK) as (tuned, _):
        assert type(tuned.scaler) is PolicyScaler
        assert not tuned.model._forward_pre_hooks


def test_a_policy_leaves_no_trace_on_the_model() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())
    bench = Bench(workload_of(model, (3, 8, 8)), CPU)
    convolution = bench.model.get_submodule("0")
    assert isinstance(convolution, nn.Conv2d)
    strides = convolution.weight.stride()
    measured(bench, amp_recipe("bf16", memory_format="channels_last"))
    assert convolution.weight.stride() == strides
    assert all(parameter.grad is None for parameter in model.parameters())


class Remembering(nn.Linear):
    """Keeps state in plain attributes, as target networks that are copied at times and replay buffers do."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.calls = 0
        self.hidden: torch.Tensor | None = None
        self.replay: deque[torch.Tensor | None] = deque([None], maxlen=4)
        self.best, self.mean = {"loss": 9.0}, torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.calls += 1
        self.hidden = hidden = y.detach()
        self.replay.append(hidden)
        self.best["loss"] = self.best[str(self.calls)] = 1.0
        self.mean += hidden.mean(0)
        return y

    def state(self) -> object:
        return self.calls, self.hidden, list(self.replay), self.best, self.mean.tolist()


def test_state_in_plain_attributes_is_restored() -> None:
    bench = Bench(workload_of(Remembering), CPU)
    model = bench.model
    assert isinstance(model, Remembering)
    replay = model.replay
    measured(bench)
    assert model.calls > 0
    with bench.on_device(STOCK) as (_, stepper):
        assert model.state() == (0, None, [None], {"loss": 9.0}, [0.0] * 3)
        stepper()
        bench.restart()
        assert model.state() == (0, None, [None], {"loss": 9.0}, [0.0] * 3)
        assert model.replay is replay


class Moving(nn.Linear):
    """Moves a tensor by itself, which is no buffer, with what holds it and says where it is."""

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.table, self.where, self.tables = torch.ones(3), "cpu", [torch.ones(3)]

    def move(self) -> None:
        self.table, self.where, self.tables = self.table.to("meta"), "meta", [self.table.to("meta")]


def test_what_a_model_moved_by_itself_stays_where_it_is() -> None:
    bench = Bench(workload_of(Moving), CPU)
    model = bench.model
    assert isinstance(model, Moving)
    with bench.on_device(STOCK):
        model.move()
        bench.restart()
        assert {model.table.device.type, model.tables[0].device.type, model.where} == {"meta"}


def test_a_buffer_made_while_training_is_gone_in_the_next_trial() -> None:
    class Growing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "seen"):
                self.register_buffer("seen", torch.zeros(1))
            result: torch.Tensor = self.linear(x)
            return result

    bench = Bench(workload_of(Growing), CPU)
    assert trained_alike(measured(bench), measured(bench))


def test_lazy_modules_get_their_shapes() -> None:
    bench = Bench(workload_of(lambda: nn.Sequential(nn.LazyLinear(3))), CPU)
    assert trained_alike(measured(bench), measured(bench))


def test_lazy_modules_with_a_step_of_their_own_are_a_clear_error() -> None:
    with pytest.raises(TargetError, match=r"run one forward pass in model\(\)"):
        Bench(workload_of(nn.LazyLinear(3), loss=None, step=lambda *_: None), CPU)


def test_a_trial_in_which_nothing_is_recorded_says_nothing_of_cuda_graphs() -> None:
    bench = Bench(workload_of(nn.Linear(8, 8)), CPU)
    outcome = bench.measure(Policy(cuda_graphs=True), QUICK)
    assert isinstance(outcome, Failure)
    assert outcome.kind == "unsupported"
    assert "nothing is recorded as a CUDA graph" in outcome.message


def test_batches_may_be_dataclasses_and_constant() -> None:
    constant = Pair(torch.randn(4, 8), torch.randint(3, (4,)))
    workload = workload_of(
        nn.Linear(8, 3),
        batch=lambda _: constant,
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch.features), batch.labels),
    )
    assert measured(Bench(workload, CPU)).losses[0] > 0


def test_a_batch_that_does_not_grow_with_what_is_asked_for_is_the_users_mistake() -> None:
    bench = Bench(workload_of(nn.Linear(8, 3), batch=lambda _: torch.randn(4, 8)), CPU)
    measured(bench)
    outcome = bench.measure(Policy(batch_size=64), QUICK)
    assert isinstance(outcome, Failure)
    assert "batch(64) gives tensors of the same shapes as batch(4)" in outcome.message


def test_a_step_of_the_users_own_takes_one_batch_whatever_is_accumulated() -> None:
    def step(_tuned: object, model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has not typed it
        optimizer.step()
        return loss

    policy = Policy(accumulate=3)
    assert measured(Bench(workload_of(nn.Linear(8, 2), loss=None, step=step), CPU), policy).samples_per_step == 4
    assert measured(Bench(workload_of(nn.Linear(8, 2)), CPU), policy).samples_per_step == 12


def test_the_gradient_norm_is_that_of_the_first_step_unscaled() -> None:
    # Small enough that no gradient overflows at the first loss scale, 65,536.
    small = workload_of(nn.Linear(8, 3), loss=lambda model, batch: model(batch).float().square().mean() / 16)
    bench = Bench(small, CPU)
    plain, scaled = measured(bench), measured(bench, amp_recipe("fp16"))
    assert plain.gradient_norm is not None
    assert scaled.gradient_norm == pytest.approx(plain.gradient_norm, rel=0.01)


@pytest.mark.parametrize("policy", [STOCK, amp_recipe("fp16")], ids=str)
def test_gradients_are_clipped_when_they_are_unscaled(policy: Policy) -> None:
    norms: list[float] = []

    def note(optimizer: torch.optim.Optimizer, *_: object) -> None:
        gradients = [parameter.grad for parameter in optimizer.param_groups[0]["params"]]
        norms.append(float(nn.utils.get_total_norm(gradients)))

    def optimizer(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=0.1)
        made.register_step_pre_hook(note)
        return made

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).float().square().mean() / 16  # type: ignore[no-any-return]  # small: none overflows

    outcome = measured(Bench(workload_of(nn.Linear(8, 3), optimizer=optimizer, loss=loss, clip=1e-3), CPU), policy)
    assert norms == pytest.approx([1e-3] * len(norms), rel=0.01)
    assert outcome.gradient_norm is not None
    assert outcome.gradient_norm > 1e-2  # as the model has it


def test_fp16_whose_every_step_overflows_is_not_finite() -> None:
    workload = workload_of(nn.Linear(8, 3), loss=lambda model, batch: model(batch).float().square().sum() * 1e30)
    outcome = Bench(workload, CPU).measure(amp_recipe("fp16"), QUICK)
    assert not isinstance(outcome, Measurement)
    assert outcome.kind == "nonfinite"


def test_inspection_counts_what_the_leaves_compute() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, groups=1), nn.Flatten(), nn.Linear(8 * 16, 5))
    subject = inspect_model(Bench(workload_of(model, (3, 4, 4)), CPU), "digest")
    conv, _, linear = subject.leaves
    assert conv.flops == 2 * (4 * 8 * 16) * (3 * 9)
    assert linear.flops == 2 * (4 * 5) * (8 * 16)
    assert linear.cast_numel == 4 * 8 * 16 + 8 * 16 * 5 + 5
    assert [leaf.called for leaf in subject.leaves] == [0, 1, 2]
    assert subject.convolution_dims == {2}


class Resizing(nn.Linear):
    largest: torch.Tensor

    def __init__(self) -> None:
        super().__init__(8, 3)
        self.register_buffer("largest", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.largest.resize_(3).fill_(1.0)
        return super().forward(x)


def test_the_digest_is_that_of_the_model_before_it_trains() -> None:
    subject = inspect_model(Bench(workload_of(Resizing), CPU), "digest")
    assert subject.model_digest == model_digest(Resizing())


@pytest.mark.parametrize("error", [RuntimeError("not in this step"), SystemExit("not in this step")])
def test_a_step_that_fails_leaves_the_inspection_to_the_baselines_trial(error: BaseException) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise error

    subject = inspect_model(Bench(workload_of(nn.Linear(8, 3), loss=fail), CPU), "digest")
    assert subject.leaves[0].called is None
    assert subject.parameters == 27


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="the kernel's high-water mark stays")
def test_on_a_cpu_what_a_trial_has_freed_is_no_memory_of_the_next() -> None:
    meter = memory_for(CPU)
    torch.ones(28 * 2**18)  # after which glibc has 28 MiB and less from its heap, and keeps them there
    meter.reset()
    before, _ = meter.peak_mib()
    held = [torch.ones(2**18) for _ in range(200)]
    most, _ = meter.peak_mib()
    last = held.pop()  # which holds the heap's end
    held.clear()
    meter.reset()
    after, _ = meter.peak_mib()
    assert most > before + 190
    assert after < before + 60
    assert last.numel() == 2**18


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_memory_is_given_back_after_a_trial() -> None:
    device = torch.device("cuda", 0)
    bench = Bench(workload_of(nn.Linear(4096, 4096), (4096,), batch_size=1024), device)
    outcome = measured(bench, amp_recipe("bf16"))
    assert outcome.peak_allocated_mib > 64
    assert torch.cuda.memory_reserved() < 2**20 * 16
    assert next(bench.model.parameters()).device.type == "cpu"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_running_out_of_device_memory_is_typed_and_survived() -> None:
    workload = workload_of(
        nn.Linear(64, 64), (64,), loss=lambda model, batch: (model(batch) * torch.empty(2**40, device="cuda")).mean()
    )
    bench = Bench(workload, torch.device("cuda", 0))
    outcome = bench.measure(STOCK, QUICK)
    assert not isinstance(outcome, Measurement)
    assert outcome.kind == "oom"


def test_batches_changed_in_place_do_not_leak_into_the_next_trial() -> None:
    def scale_in_place(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch.mul_(0.9)).square().mean()
        return loss

    bench = Bench(workload_of(nn.Linear(8, 2), loss=scale_in_place), CPU)
    first = bench.measure(STOCK, Effort(warmup_s=0.0, measure_s=0.0, min_steps=1))
    second = bench.measure(STOCK, Effort(warmup_s=0.0, measure_s=0.0, min_steps=1))
    assert isinstance(first, Measurement)
    assert isinstance(second, Measurement)
    assert trained_alike(first, second)


def test_a_block_begins_with_batches_and_random_numbers_that_its_warm_up_did_not_see() -> None:
    """What a policy pays for each new batch, as a graph of its own, it pays in the block too."""
    seen: set[tuple[float, float]] = set()
    costs: list[float] = []

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        key = float(batch.sum()), float(torch.rand(()))
        costs.append(0.0 if key in seen else 0.005)
        seen.add(key)
        time.sleep(costs[-1])
        found: torch.Tensor = model(batch).square().mean()
        return found

    bench = Bench(workload_of(nn.Linear(8, 2), loss=loss), CPU)
    once = Effort(warmup_s=0.1, measure_s=0.0, min_steps=8, max_steps=8, beside_compiling=True)  # busy machine or not
    outcome = bench.measure(STOCK, once)
    assert isinstance(outcome, Measurement)
    assert min(outcome.step_ms[:8]) >= 5.0
    again = bench.measure(STOCK, Effort(warmup_s=0.1, measure_s=0.0, min_steps=8, max_steps=8))
    assert isinstance(again, Measurement)
    assert costs[-8:] == [0.0] * 8, "all policies are timed on the same batches, with the same random numbers"


def test_a_module_the_user_put_in_eval_mode_stays_there() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8).eval())
    bench = Bench(workload_of(model), CPU)
    mean = model.state_dict()["1.running_mean"].clone()
    with bench.on_device(STOCK) as (_, stepper):
        stepper()
        assert torch.equal(model.state_dict()["1.running_mean"], mean)


def test_batches_without_a_visible_tensor_may_have_other_sizes() -> None:
    class Data:
        def __init__(self, n: int) -> None:
            self.x = torch.randn(n, 8)

    workload = workload_of(nn.Linear(8, 2), batch=Data, loss=lambda model, batch: model(batch.x).square().mean())
    bench = Bench(workload, CPU)
    assert measured(bench).losses
    assert measured(bench, Policy(batch_size=8)).losses


def test_an_expanded_buffer_is_no_obstacle() -> None:
    class Expanded(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 2)
            self.register_buffer("mask", torch.ones(1).expand(8))

    assert measured(Bench(workload_of(Expanded), CPU)).losses


def test_a_model_that_is_compiled_already_is_refused() -> None:
    with pytest.raises(TargetError, match=r"model\(\) returned a compiled model: give it before torch\.compile"):
        Bench(workload_of(lambda: torch.compile(nn.Linear(8, 2), backend="eager")), CPU)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize(
    ("part", "value", "words"),
    [
        ("optimizer", lambda _: None, "optimizer(model) returned NoneType"),
        ("loss", lambda *_: 3.0, "loss returned float, not a scalar tensor"),
        ("loss", lambda model, batch: model(batch), "loss returned a tensor of shape (4, 2)"),
    ],
)
def test_a_part_that_returns_the_wrong_thing_is_named(part: str, value: object, words: str) -> None:
    workload = workload_of(nn.Linear(8, 2), **{part: value})  # type: ignore[arg-type]  # the mistake under test
    outcome = Bench(workload, CPU).measure(STOCK, QUICK)
    assert not isinstance(outcome, Measurement)
    assert words in outcome.message
    assert outcome.exception == "TargetError"
