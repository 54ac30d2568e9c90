"""Steps of one's own with several optimizers, passes and scaled gradients, judged beside FP32: all are right."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benches import CPU
from torch import nn
from torch.nn import functional as F  # noqa: N812

from amptune import Workload
from amptune.measure.bench.bench import Bench
from amptune.measure.numerics.parity import judge
from amptune.measure.numerics.reference import make_reference
from amptune.measure.numerics.short_training import Training
from amptune.policy.settings import STOCK, amp_recipe
from amptune.runtime.tuned import Tuned
from amptune.search.gate.judgement import judged

Step = Callable[[Tuned, nn.Module, Any, torch.Tensor], torch.Tensor]


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.generator = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
        self.critic = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))


def adversarial(*, unscales: bool, clears: bool) -> Step:
    """The critic's step, then the generator's, whose backward leaves scaled gradients in the critic."""

    def step(tuned: Tuned, model: Any, optimizers: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros(())
        for own, faked in zip(optimizers, (1.0, 0.0), strict=True):
            (model if clears else own).zero_grad()
            with tuned.autocast():
                fake = model.critic(model.generator(torch.randn_like(batch)))
                loss = F.binary_cross_entropy_with_logits(fake, torch.full_like(fake, faked))
                if faked == 0.0:
                    real = model.critic(tuned.batch(batch))
                    loss = loss + F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
            tuned.scaler.scale(loss).backward()
            if unscales:
                tuned.scaler.unscale_(own)
                nn.utils.clip_grad_norm_([p for group in own.param_groups for p in group["params"]], 1.0)
            tuned.scaler.step(own)
        tuned.scaler.update()
        return loss

    return step


def at_once(*, accumulated: int = 1) -> Step:
    """One loss for both optimizers, of one pass or several."""

    def step(tuned: Tuned, model: Any, optimizers: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros(())
        for own in optimizers:
            own.zero_grad()
        for part in batch.chunk(accumulated):
            with tuned.autocast():
                loss = model.critic(model.generator(tuned.batch(part))).square().mean() / accumulated
            tuned.scaler.scale(loss).backward()
        for own in optimizers:
            tuned.scaler.step(own)
        tuned.scaler.update()
        return loss

    return step


def inner_loop(tuned: Tuned, model: Any, optimizers: Any, batch: torch.Tensor) -> torch.Tensor:
    """Two steps of one optimizer for one of the other, each with an update of the scaler."""
    generator, critic = optimizers
    loss = torch.zeros(())
    for own in (critic, critic, generator):
        with tuned.autocast():
            loss = model.critic(model.generator(tuned.batch(batch))).square().mean()
        own.zero_grad()
        tuned.scaler.scale(loss).backward()
        tuned.scaler.step(own)
        tuned.scaler.update()
    return loss


def every_second_call(*, in_model: bool) -> Step:
    """The critic steps at every call and the generator at every second one, by a counter in the model or outside."""
    outside: Any = SimpleNamespace(calls=0)

    def step(tuned: Tuned, model: Any, optimizers: Any, batch: torch.Tensor) -> torch.Tensor:
        counter = model if in_model else outside
        counter.calls += 1
        generator, critic = optimizers
        with tuned.autocast():
            loss: torch.Tensor = model.critic(model.generator(tuned.batch(batch))).square().mean()
        tuned.scaler.scale(loss).backward()
        for own in (critic, generator)[: 1 + (counter.calls % 2 == 0)]:
            tuned.scaler.step(own)
            own.zero_grad()
        tuned.scaler.update()
        return loss

    return step


def micro_batches_by_a_counter(tuned: Tuned, model: Any, optimizers: Any, batch: torch.Tensor) -> torch.Tensor:
    """Both step at every second call: what is counted is put back with the model."""
    model.calls += 1
    with tuned.autocast():
        loss: torch.Tensor = model.critic(model.generator(tuned.batch(batch))).square().mean() / 2
    tuned.scaler.scale(loss).backward()
    if model.calls % 2 == 0:
        for own in optimizers:
            tuned.scaler.step(own)
            own.zero_grad()
        tuned.scaler.update()
    return loss


STEPS = {
    "every second call": every_second_call(in_model=True),
    "every second call, counted outside": every_second_call(in_model=False),
    "micro-batches": micro_batches_by_a_counter,
    "gan": adversarial(unscales=False, clears=True),
    "gan, clipped": adversarial(unscales=True, clears=True),
    "gan, gradients kept": adversarial(unscales=False, clears=False),
    "two optimizers": at_once(),
    "two optimizers, two passes": at_once(accumulated=2),
    "inner loop": inner_loop,
}


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", STEPS)
def test_a_gradient_is_judged_when_its_own_optimizer_steps(
    name: str, *, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Training, "step_s", lambda _: 1.0)
    workload = Workload(
        model=Gan,
        batch=lambda n: torch.randn(n, 16) * 0.5 + 1,
        step=STEPS[name],
        optimizer=lambda model: tuple(
            torch.optim.Adam(model.get_submodule(part).parameters(), 1e-3, fused=fused)
            for part in ("generator", "critic")
        ),
        batch_size=32,
    )
    bench, policy = Bench(workload, CPU), amp_recipe("fp16")
    parity = judge(bench, policy, make_reference(bench, STOCK, 17.0))
    judgement = judged(policy, parity, None)
    assert judgement.passes, str(judgement)


def test_an_optimizer_that_never_steps_is_known_by_its_place_though_another_comes_to_lie_where_it_lay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each time that gradients are asked for has optimizers of its own; in memory they change places."""
    met: list[object] = []

    def place_in_memory(one: object) -> int:
        if not any(one is other for other in met):
            met.append(one)
        number = next(number for number, other in enumerate(met) if other is one)
        return (number + number // 2) % 2

    monkeypatch.setattr("amptune.measure.numerics.short_training.id", place_in_memory, raising=False)
    workload = Workload(
        model=Gan,
        batch=lambda n: torch.randn(n, 16),
        step=STEPS["every second call"],
        optimizer=lambda model: tuple(
            torch.optim.SGD(model.get_submodule(part).parameters(), 0.1) for part in ("generator", "critic")
        ),
        batch_size=8,
    )
    with Training.on(Bench(workload, CPU), STOCK) as training:
        first, second = (training.gradients(1) for _ in range(2))
    assert (first.sketches == second.sketches).all()


def test_the_gradients_of_sparse_and_dense_parameters_are_judged_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Training, "step_s", lambda _: 1.0)

    def build() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(300, 24, sparse=True), nn.Linear(24, 8))

    def step(tuned: Tuned, model: Any, optimizers: Any, batch: torch.Tensor) -> torch.Tensor:
        with tuned.autocast():
            loss = F.cross_entropy(model(batch), batch[:, 0] % 8)
        tuned.scaler.scale(loss).backward()
        for own in optimizers:
            tuned.scaler.step(own)
            own.zero_grad()
        tuned.scaler.update()
        return loss

    workload = Workload(
        model=build,
        batch=lambda n: torch.randint(300, (n, 6)),
        step=step,
        optimizer=lambda model: (
            torch.optim.SparseAdam(list(model.get_submodule("0").parameters())),
            torch.optim.SGD(model.get_submodule("1").parameters(), 0.1),
        ),
        batch_size=32,
    )
    bench, policy = Bench(workload, CPU), amp_recipe("fp16")
    assert judged(policy, judge(bench, policy, make_reference(bench, STOCK, 17.0)), None).passes
