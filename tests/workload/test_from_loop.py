"""Workloads from the objects of a loop: what is copied, what is built again, what is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from amptune import Workload
from amptune.errors import TargetError
from amptune.measure.bench.bench import Bench
from amptune.measure.results.outcome import Effort, Measurement
from amptune.policy.settings import STOCK
from amptune.search.request import source_of
from amptune.workload import loader_batches
from amptune.workload.by_value import from_bytes, to_bytes
from amptune.workload.loader_batches import LoaderBatches
from amptune.workload.rebuilt_optimizer import RebuiltOptimizer, without_schedule

DATA = TensorDataset(torch.randn(40, 6), torch.randint(3, (40,)))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def workload_of(model: nn.Module | None = None, **parts: Any) -> Workload:
    model = net() if model is None else model
    given = {"loader": DataLoader(DATA, 8, shuffle=True), "loss": nn.CrossEntropyLoss()}
    return Workload.from_loop(model, **{**given, "optimizer": parts.get("optimizer") or adam(model), **parts})


def sent(workload: Workload) -> Workload:
    """The workload as a measuring process gets it."""
    there = from_bytes(to_bytes(workload, "workload"))
    assert isinstance(there, Workload)
    return there


def losses_of(workload: Workload) -> tuple[float, ...]:
    outcome = Bench(workload, torch.device("cpu")).measure(STOCK, Effort(warmup_s=0.01, measure_s=0.01, min_steps=2))
    assert isinstance(outcome, Measurement), outcome
    return outcome.losses


def test_it_trains_there_and_the_users_own_objects_stay_as_they_were() -> None:
    model = net()
    optimizer = adam(model)
    before = [tensor.clone() for tensor in model.state_dict().values()]
    assert len(set(losses_of(sent(workload_of(model, optimizer=optimizer))))) > 1
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert optimizer.state == {}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_every_process_draws_the_same_batches_in_whatever_order_it_asks() -> None:
    """Of a loader that chooses its samples by itself too, whose first batches are drawn once."""
    own_choice = DataLoader(DATA, batch_sampler=[[0, 1, 2], [3, 4, 5], [6, 7, 8]])
    for workload in (workload_of(), workload_of(loader=own_choice, batch_size=3)):
        size = workload.batch_size
        one, other = (Bench(sent(workload), torch.device("cpu")) for _ in range(2))
        other.drawn.batches(size, 1)
        expected, found = one.drawn.sequence(size, 4), other.drawn.sequence(size, 4)
        assert all(torch.equal(a[0], b[0]) for a, b in zip(expected, found, strict=True))
        assert len({float(batch[0].sum()) for batch in found}) > 1


def test_the_model_and_its_optimizer_are_copied_as_they_are() -> None:
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)).eval()
    model[1].weight = model[0].weight
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": [model[2].weight], "weight_decay": 0.1}]
    workload = sent(workload_of(model, optimizer=torch.optim.SGD(groups, momentum=0.9, lr=1.0)))
    copy: Any = workload.model()
    assert all(map(torch.equal, model.state_dict().values(), copy.state_dict().values()))
    assert copy[1].weight is copy[0].weight
    assert (copy.training, model.training) == (True, False)
    wrapped: Any = torch.compile(copy)
    for given in (copy, wrapped):
        built = workload.optimizer(given)
        assert type(built) is torch.optim.SGD
        first, second = built.param_groups
        assert [id(parameter) for parameter in first["params"]] == [id(copy[0].weight), id(copy[0].bias)]
        assert second["params"] == [copy[2].weight]
        assert (first["lr"], first["momentum"], first["weight_decay"]) == (0.5, 0.9, 0.0)
        assert (second["lr"], second["weight_decay"]) == (1.0, 0.1)


def test_a_module_in_place_of_the_function_that_builds_it_is_copied() -> None:
    model: Any = nn.Linear(6, 3)
    before = model.weight.clone()
    losses_of(
        Workload(model=model, batch=lambda n: torch.randn(n, 6), loss=lambda m, x: m(x).square().mean(), optimizer=adam)
    )
    assert torch.equal(model.weight, before)


class OfParts(nn.Module):
    def forward(self, output: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(output, target["label"])


def test_the_loader_tells_the_batch_size_and_other_sizes_are_collated() -> None:
    def in_parts(samples: list[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        x, y = zip(*samples, strict=True)
        return torch.stack(x), {"label": torch.tensor(y)}

    loader = DataLoader(DATA, 8, shuffle=True, collate_fn=in_parts)
    workload = sent(workload_of(loader=loader, loss=OfParts()))
    assert workload.batch_size == 8
    assert workload.batch(5)[0].shape == (5, 6)
    assert workload.loader is not None
    assert [len(x) for x, _ in workload.loader(8)] == [8] * 5
    assert [len(x) for x, _ in workload.loader(16)] == [16, 16, 8]
    losses_of(workload)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.randn(6), i % 3) for i in range(10)])


def test_a_stream_and_a_list_of_batches_are_loaders_too_and_running_workers_are_left_behind() -> None:
    stream = sent(workload_of(loader=DataLoader(Stream(), 4)))
    assert [len(stream.batch(size)[0]) for size in (4, 25)] == [4, 25]
    fixed = sent(workload_of(loader=[(torch.randn(4, 6), torch.randint(3, (4,))) for _ in range(5)]))
    assert fixed.batch_size == 4
    losses_of(fixed)
    with pytest.raises(TargetError, match="no batches of 8 can be made of this list"):
        fixed.batch(8)
    loader = DataLoader(DATA, 8, num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    running = iter(loader)
    assert sent(workload_of(loader=loader)).batch(2)[0].shape == (2, 6)
    assert len(list(running)) == 5


def test_what_cannot_be_pickled_is_named_and_a_function_works_instead() -> None:
    lock = threading.Lock()

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        with lock:
            return model(batch[0]).mean()  # type: ignore[no-any-return]

    locked = TensorDataset(*DATA.tensors)
    vars(locked)["file"] = [{"lock": lock}]
    words = r"loader\.dataset\.file\.0\.lock: TypeError: cannot pickle.*def workload\(\)"
    with pytest.raises(TargetError, match=words):
        source_of(workload_of(loader=DataLoader(locked, 2)))
    with pytest.raises(TargetError, match=r"workload\.loss\.function\.lock: TypeError: cannot pickle"):
        source_of(workload_of(loss=loss))
    assert from_bytes(source_of(workload_of).pickled or b"")().batch_size == 8


def with_attribute(**attributes: Any) -> nn.Module:
    """A model marked as transformers marks its own."""
    model = net()
    vars(model).update(attributes)
    return model


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"model": with_attribute(is_quantized=True)}, "its weights are quantised"),
        ({"model": with_attribute(hf_device_map={"0": 0, "3": 1})}, "device_map spreads it"),
        ({"model": nn.DataParallel(net())}, "wrapped for several devices"),
        ({"model": torch.compile(net())}, "compiled already"),
        ({"model": nn.Linear(6, 3, device="meta")}, "on the meta device"),
        ({"model": 3, "optimizer": len}, "model is int, not a torch.nn.Module"),
        ({"optimizer": adam(net())}, "6 of the optimizer's 6 parameters are not the model's"),
        ({"optimizer": 0.1}, "optimizer is float"),
        ({"optimizer": torch.optim.LBFGS([nn.Parameter(torch.zeros(2))])}, "LBFGS takes a closure"),
        ({"loader": iter([1])}, "cannot be iterated over again"),
        ({"loader": []}, "does not tell its batch size: pass batch_size="),
    ],
)
def test_what_cannot_be_copied_or_tried_is_refused_with_the_reason(parts: dict[str, Any], words: str) -> None:
    with pytest.raises(TargetError, match=words):
        workload_of(**parts)


def test_a_loss_of_pytorchs_own_kind_takes_pairs() -> None:
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    model, batch = net().eval(), DATA[:4]
    for loss in (weighted, nn.functional.cross_entropy, partial(nn.functional.cross_entropy, label_smoothing=0.1)):
        own = workload_of(model, loss=loss).loss
        assert own is not None
        assert torch.equal(own(model, batch), loss(model(batch[0]), batch[1]))
        words = r"takes \(output, target\), but .* are dict of x, not pairs"
        with pytest.raises(TargetError, match=words):
            own(model, {"x": batch[0]})
    wrong = workload_of(loss=lambda output, target: nn.functional.cross_entropy(output, target)).loss
    assert wrong is not None
    with pytest.raises(TargetError, match=r"called as loss\(model, batch\)"):
        wrong(model, batch)


def test_an_optimizer_of_ones_own_gets_the_arguments_that_it_keeps_or_asks_for_a_function() -> None:
    class Scaled(torch.optim.SGD):
        def __init__(self, params: Any, rate: float = 1e-3, scale: float = 1.0) -> None:
            super().__init__(params, lr=rate)
            self.scale = scale

    class Needy(torch.optim.SGD):
        def __init__(self, params: Any, secret: int) -> None:
            super().__init__(params, lr=secret / 10)

    class Wrapped(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

    model = net()
    made: Any = RebuiltOptimizer(Scaled(model.parameters(), rate=0.5, scale=3.0), model)(model)
    assert (made.scale, made.param_groups[0]["lr"]) == (3.0, 0.5)
    with pytest.raises(TargetError, match=r"Needy cannot be built again .*secret.*optimizer=lambda model"):
        RebuiltOptimizer(Needy(model.parameters(), 1), model)(model)
    accelerated = RebuiltOptimizer(Wrapped(adam(model)), model)
    assert type(accelerated(model)) is torch.optim.AdamW


def test_a_warm_up_that_begins_at_0_does_not_stop_the_training() -> None:
    """A schedule sets the rate to 0 when it is made: every policy would train like FP32, since nothing is trained."""
    model = net()
    optimizer = adam(model)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    assert optimizer.param_groups[0]["lr"] == 0.0
    workload = sent(workload_of(model, optimizer=optimizer))
    built = workload.optimizer(workload.model())
    assert (built.param_groups[0]["lr"], "initial_lr" in built.param_groups[0]) == (0.1, False)
    torch.optim.lr_scheduler.LambdaLR(built, lambda _: 0.0)
    (group,) = without_schedule(built).param_groups
    assert (group["lr"], "initial_lr" in group) == (0.1, False)


def test_a_model_that_cannot_be_pickled_is_copied_where_it_is() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3)))
    assert len(set(losses_of(workload_of(model)))) > 1
    with pytest.raises(TargetError, match="only supported through state_dict"):
        to_bytes(workload_of(model), "workload")


def test_a_dataset_of_the_script_itself_is_read_by_forked_processes() -> None:
    """By value its class has no module that a spawned process could import."""
    dataset = type("Own", (TensorDataset,), {"__module__": "__main__"})(*DATA.tensors)
    loader = DataLoader(dataset, 8, num_workers=1, multiprocessing_context="spawn")
    state = workload_of(loader=loader).loader.__self__.__getstate__()  # type: ignore[union-attr]
    assert state["loader"].multiprocessing_context.get_start_method() == "fork"
    assert loader.multiprocessing_context.get_start_method() == "spawn", "the user's own stays"


def test_large_batches_of_a_loader_that_chooses_itself_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_batches, "LARGE_BYTES", 500)
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 40, 40)
    batches = LoaderBatches(DataLoader(DATA, 8, sampler=sampler))
    batches.batch(8)
    assert len(batches._kept) == 1
