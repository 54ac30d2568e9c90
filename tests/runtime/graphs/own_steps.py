"""Steps of one's own: two optimizers, averages of weights, counters, schedules, buffers. Some cannot be recorded."""

# ruff: noqa: ARG001  # all steps are called alike
# mypy: disable-error-code="no-any-return,no-untyped-call,call-arg,unused-ignore"

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor, nn

__all__ = ["CASES", "NEVER", "Case", "Net", "batch"]

RATE = 2.0**-7
Step = Callable[[Any, Any, Any, Any], dict[str, Tensor]]
Between = Callable[[int], object]


class Net(nn.Module):
    """Two parts, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
        self.head = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
        self.level = 0.25

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.body(x)) * self.level
        return found


def batch(number: int, device: torch.device = torch.device("cpu")) -> tuple[Tensor, Tensor]:  # noqa: B008  # a value
    generator = torch.Generator().manual_seed(number)
    x, y = (torch.randn(8, size, generator=generator) for size in (6, 1))
    return x.to(device), y.to(device)


def adams(model: Net) -> tuple[torch.optim.Optimizer, ...]:
    return tuple(torch.optim.Adam(part.parameters(), lr=RATE, fused=True) for part in (model.body, model.head))


@dataclass(frozen=True)
class Case:
    """`make(run)` returns a step, and what the loop does between steps. `told` is why it is not recorded, or empty."""

    make: Callable[[Any], tuple[Step, Between]]
    told: str = ""
    optimizers: Callable[[Net], tuple[torch.optim.Optimizer, ...]] = adams


def nothing(_: int) -> None: ...


def trained(tuned: Any, model: Any, optimizers: Any, data: Any, weight: Any = 1.0) -> Tensor:
    """One loss, all optimizers."""
    with tuned.autocast():
        loss = F.mse_loss(model(data[0]).float(), data[1]) * weight
    tuned.scaler.scale(loss).backward()
    for one in optimizers:
        tuned.scaler.step(one)
    tuned.scaler.update()
    for one in optimizers:
        one.zero_grad()
    return loss.detach()


def plain(_: Any) -> tuple[Step, Between]:
    return lambda *given: {"loss": trained(*given)}, nothing


def two_optimizers(_: Any) -> tuple[Step, Between]:
    """As a GAN: two losses, two backward passes, gradients left over and cleared at the begin."""

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        body, head = optimizers
        with tuned.autocast():
            made = model.body(data[0])
            told = F.softplus(-model.head(data[1].expand(-1, 4))).mean() + F.softplus(model.head(made.detach())).mean()
        head.zero_grad()
        tuned.scaler.scale(told).backward()
        tuned.scaler.step(head)
        with tuned.autocast():
            fooled = F.softplus(-model.head(made)).mean()
        body.zero_grad()
        tuned.scaler.scale(fooled).backward()
        tuned.scaler.step(body)
        tuned.scaler.update()
        return {"told": told.detach(), "fooled": fooled}

    return step, nothing


def average_in_closure(run: Any) -> tuple[Step, Between]:
    """Written in place; a replay and the step itself must not both count."""
    average = [one.detach().clone() for one in run.model.parameters()]

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        loss = trained(tuned, model, optimizers, data)
        with torch.no_grad():
            torch._foreach_lerp_(average, [*model.parameters()], 0.25)
        return {"loss": loss, "average": torch.stack([one.norm() for one in average])}

    return step, nothing


def average_that_is_replaced(run: Any) -> tuple[Step, Between]:
    kept = {"average": run.model.head[0].weight.detach().clone()}

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        loss = trained(tuned, model, optimizers, data)
        kept["average"] = kept["average"] * 0.75 + model.head[0].weight.detach() * 0.25
        return {"loss": loss, "average": kept["average"]}

    return step, nothing


def slow_copy(run: Any) -> tuple[Step, Between]:
    """A target network, which another module is."""
    torch.manual_seed(1)
    target = Net().to(run.device).requires_grad_(requires_grad=False)

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        aim = data[1] + 0.5 * target(data[0])
        loss = trained(tuned, model, optimizers, (data[0], aim))
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.125)
        return {"loss": loss}

    return step, nothing


def every(period: int, run: Any) -> tuple[Step, Between]:
    """A branch by a counter on the host."""
    count = [0]

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        count[0] += 1
        return {"loss": trained(tuned, model, optimizers[: 1 if count[0] % period else 2], data)}

    return step, nothing


SEEN: list[int] = []


class Agent:
    """Whose methods a step calls, which holds it in a closure."""

    def __init__(self) -> None:
        self.inner = Strength()

    def loss(self, *given: Any) -> Tensor:
        return trained(*given, self.inner.strength())

    def counted(self, *given: Any) -> Tensor:
        SEEN.append(1)
        return trained(*given)


class Strength:
    def __init__(self) -> None:
        self.level = 1.0

    def strength(self) -> float:
        return self.level


def number_in_a_method(_: Any) -> tuple[Step, Between]:
    """The step's own code does not name it, but that of an object of an object."""
    agent = Agent()

    def between(number: int) -> None:
        agent.inner.level = 1.0 if number < STEP_OF_CHANGE else 0.5

    return lambda *given: {"loss": agent.loss(*given)}, between


def count_in_a_method(_: Any) -> tuple[Step, Between]:
    agent = Agent()
    return lambda *given: {"loss": agent.counted(*given)}, nothing


class Trainer:
    """Whose step is a method, and whose loop counts."""

    def __init__(self) -> None:
        self.scale, self.steps, self.history = 1.0, 0, list[float]()

    def step(self, tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        return {"loss": trained(tuned, model, optimizers, data, self.scale)}

    def between(self, _: int) -> None:
        self.steps += 1
        self.history.append(0.0)

    def rescale(self, number: int) -> None:
        self.scale = 1.0 if number < STEP_OF_CHANGE else 0.5


STEP_OF_CHANGE = 12


def method(_: Any) -> tuple[Step, Between]:
    trainer = Trainer()
    return trainer.step, trainer.between


def number_that_the_loop_changes_once(_: Any) -> tuple[Step, Between]:
    trainer = Trainer()
    return trainer.step, trainer.rescale


def number_that_the_loop_changes_each_time(_: Any) -> tuple[Step, Between]:
    held = {"weight": 1.0}

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        return {"loss": trained(tuned, model, optimizers, data, held["weight"])}

    return step, lambda number: held.update(weight=1.0 / (number + 1))


def tensor_that_the_loop_writes(run: Any) -> tuple[Step, Between]:
    weight = torch.ones((), device=run.device)

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        return {"loss": trained(tuned, model, optimizers, data, weight)}

    return step, lambda number: weight.fill_(1.0 / (number + 1))


def attribute_of_the_model(run: Any) -> tuple[Step, Between]:
    def between(number: int) -> None:
        run.model.level = 0.25 if number < STEP_OF_CHANGE else 0.5

    return lambda *given: {"loss": trained(*given)}, between


def schedule_outside(run: Any) -> tuple[Step, Between]:
    schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in run.optimizers]

    def between(number: int) -> None:
        if number % 3 == 0:
            for one in schedules:
                one.step()

    return lambda *given: {"loss": trained(*given)}, between


def schedule_inside(run: Any) -> tuple[Step, Between]:
    schedule = torch.optim.lr_scheduler.ExponentialLR(run.optimizers[0], 0.75)

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        loss = trained(tuned, model, optimizers, data)
        schedule.step()
        return {"loss": loss}

    return step, nothing


def losses_in_a_list(_: Any) -> tuple[Step, Between]:
    losses: list[Tensor] = []

    def step(*given: Any) -> dict[str, Tensor]:
        losses.append(trained(*given))
        return {"loss": losses[-1]}

    return step, nothing


def last_loss_as_attribute(run: Any) -> tuple[Step, Between]:
    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        model.last = trained(tuned, model, optimizers, data)
        return {"loss": model.last}

    return step, nothing


def random_on_the_host(_: Any) -> tuple[Step, Between]:
    random.seed(0)
    return lambda *given: {"loss": trained(*given, random.uniform(0.5, 1.5))}, lambda n: random.seed(n)


def drawn_batches(run: Any) -> tuple[Step, Between]:
    more = (batch(100 + number, run.device) for number in range(1000))

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        trained(tuned, model, optimizers, next(more))
        return {"loss": trained(tuned, model, optimizers, data)}

    return step, nothing


def ring(run: Any) -> tuple[Step, Between]:
    """A replay buffer, with its place on the device."""
    kept, place = torch.zeros(32, 7, device=run.device), torch.zeros((), dtype=torch.long, device=run.device)

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            kept.index_copy_(0, (place + torch.arange(8, device=run.device)) % 32, torch.cat(data, 1))
            place.add_(8).remainder_(32)
        x, y = kept.split([6, 1], 1)
        return {"loss": trained(tuned, model, optimizers, (x, y)), "place": place}

    return step, nothing


def ring_by_a_number(run: Any) -> tuple[Step, Between]:
    kept, place = torch.zeros(32, 7, device=run.device), {"at": 0}

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        kept[place["at"] : place["at"] + 8] = torch.cat(data, 1)
        place["at"] = (place["at"] + 8) % 32
        x, y = kept.split([6, 1], 1)
        return {"loss": trained(tuned, model, optimizers, (x, y))}

    return step, nothing


def penalty(_: Any) -> tuple[Step, Between]:
    """Second derivatives, and gradients of an input."""

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        x = data[0].clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        loss = F.mse_loss(model(data[0]), data[1]) + (slope.norm(dim=1) - 1).square().mean()
        loss.backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        return {"loss": loss.detach()}

    return step, nothing


def accumulated(_: Any) -> tuple[Step, Between]:
    """Two micro-batches a step, gradients unscaled and clipped."""

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        for x, y in zip(data[0].chunk(2), data[1].chunk(2), strict=True):
            with tuned.autocast():
                loss = F.mse_loss(model(x).float(), y) / 2
            tuned.scaler.scale(loss).backward()
        for one in optimizers:
            tuned.scaler.unscale_(one)
        size = nn.utils.clip_grad_norm_(model.parameters(), 0.125)
        for one in optimizers:
            tuned.scaler.step(one)
        tuned.scaler.update()
        model.zero_grad()
        return {"loss": loss.detach(), "size": size}

    return step, nothing


def gradients_kept(_: Any) -> tuple[Step, Between]:
    """Cleared in place, at the begin, and left at the end."""

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        for one in optimizers:
            one.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(data[0]), data[1])
        loss.backward()
        for one in optimizers:
            one.step()
        return {"loss": loss.detach(), "gradient": model.head[0].weight.grad}

    return step, nothing


def without_clearing(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
    loss = F.mse_loss(model(data[0]), data[1])
    loss.backward()
    for one in optimizers:
        one.step()
    return {"loss": loss.detach()}


def cleared_by_the_loop(run: Any) -> tuple[Step, Between]:
    def between(_: int) -> None:
        for one in run.optimizers:
            one.zero_grad()

    return without_clearing, between


def added_up_over_steps(run: Any) -> tuple[Step, Between]:
    """Gradients that are added to for four steps, and then cleared."""

    def between(number: int) -> None:
        if number % 4 == 3:
            run.model.zero_grad()

    return without_clearing, between


def frozen_within(_: Any) -> tuple[Step, Between]:
    """Weights that have no gradient for a part of the step."""

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        model.head.requires_grad_(requires_grad=False)
        F.mse_loss(model(data[0]), data[1]).backward()
        model.head.requires_grad_(requires_grad=True)
        loss = F.mse_loss(model(data[0]), data[1])
        loss.backward()
        for one in optimizers:
            one.step()
            one.zero_grad()
        return {"loss": loss.detach()}

    return step, nothing


def evaluates(run: Any) -> tuple[Step, Between]:
    def between(number: int) -> None:
        run.model.eval()
        with torch.no_grad():
            run.model(batch(number, run.device)[0])
        run.model.train()

    return lambda *given: {"loss": trained(*given)}, between


def mode_that_stays(run: Any) -> tuple[Step, Between]:
    def between(number: int) -> None:
        if number == STEP_OF_CHANGE:
            run.model.eval()

    return lambda *given: {"loss": trained(*given)}, between


def loaded(run: Any) -> tuple[Step, Between]:
    def between(number: int) -> None:
        if number == STEP_OF_CHANGE:
            for one in run.optimizers:
                one.load_state_dict(one.state_dict())
            run.model.load_state_dict({name: one / 2 for name, one in run.model.state_dict().items()})

    return lambda *given: {"loss": trained(*given)}, between


def weight_replaced(run: Any) -> tuple[Step, Between]:
    """The optimizer goes on with the old one."""

    def between(number: int) -> None:
        if number == STEP_OF_CHANGE:
            run.model.head[2].weight = nn.Parameter(run.model.head[2].weight.detach() / 2)

    return lambda *given: {"loss": trained(*given)}, between


def batch_written(_: Any) -> tuple[Step, Between]:
    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        data[0].sub_(data[0].mean())
        return {"loss": trained(tuned, model, optimizers, data)}

    return step, nothing


def unfrozen_later(run: Any) -> tuple[Step, Between]:
    run.model.body[0].weight.requires_grad_(requires_grad=False)

    def between(number: int) -> None:
        if number == STEP_OF_CHANGE:
            run.model.body[0].weight.requires_grad_(requires_grad=True)

    return lambda *given: {"loss": trained(*given)}, between


def group_added(run: Any) -> tuple[Step, Between]:
    """A weight that no optimizer had."""
    more = nn.Parameter(torch.ones(1, device=run.device))

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        return {"loss": trained(tuned, model, optimizers, data, more.squeeze()), "more": more.detach()}

    def between(number: int) -> None:
        if number == STEP_OF_CHANGE:
            more.grad = None
            run.optimizers[0].add_param_group({"params": [more]})

    return step, between


def without_a_batch(run: Any) -> tuple[Step, Between]:
    """It draws from what is on the device."""
    x, y = (torch.cat(both) for both in zip(*(batch(number, run.device) for number in range(4)), strict=True))
    place = torch.zeros((), dtype=torch.long, device=run.device)

    def step(tuned: Any, model: Any, optimizers: Any, _: Any) -> dict[str, Tensor]:
        rows = (place + torch.arange(8, device=run.device)) % 32
        place.add_(3)
        return {"loss": trained(tuned, model, optimizers, (x[rows], y[rows]))}

    run.given = lambda _: None
    return step, nothing


def numbers_in_the_batch(run: Any) -> tuple[Step, Between]:
    """Another one each time: no two batches are of one kind."""

    def step(tuned: Any, model: Any, optimizers: Any, data: Any) -> dict[str, Tensor]:
        return {"loss": trained(tuned, model, optimizers, data[:2], data[2])}

    run.given = lambda number: (*batch(number, run.device), 1.0 / (number + 1))
    return step, nothing


def other_step_between(run: Any) -> tuple[Step, Between]:
    """Two calls in turn, on the same weights and optimizers."""
    other = run.tuned.training_step(step=two_optimizers(run)[0], optimizer=run.optimizers)
    if other.recordings is not None and run.device.type == "cpu":
        other.recordings.recorder, other.recordings.device_type = run.recorder, "cpu"
    return lambda *given: {"loss": trained(*given)}, lambda number: other(batch(1000 + number, run.device))


# It is told of nothing, since another batch may come.
NEVER = "never"
SETTINGS = {"weight": 1.0}


def change_global(number: int) -> None:
    SETTINGS["weight"] = 1.0 if number < STEP_OF_CHANGE or number == 39 else 0.5


def global_number(_: Any) -> tuple[Step, Between]:
    SETTINGS["weight"] = 1.0
    return lambda *given: {"loss": trained(*given, SETTINGS["weight"])}, change_global


def sgds(model: Net, **more: Any) -> tuple[torch.optim.Optimizer, ...]:
    return tuple(torch.optim.SGD(part.parameters(), lr=RATE, **more) for part in (model.body, model.head))


def plain_adams(model: Net) -> tuple[torch.optim.Optimizer, ...]:
    return tuple(torch.optim.Adam(part.parameters(), lr=RATE) for part in (model.body, model.head))


CASES = {
    "plain": Case(plain),
    "sgd": Case(plain, optimizers=sgds),
    "momentum": Case(plain, optimizers=partial(sgds, momentum=0.5, fused=True)),
    "adam_on_the_host": Case(plain, told="neither fused", optimizers=plain_adams),
    "two_optimizers": Case(two_optimizers),
    "average_in_closure": Case(average_in_closure),
    "average_that_is_replaced": Case(average_that_is_replaced, told="changes step.closure.kept.cell.average in each"),
    "slow_copy": Case(slow_copy),
    "every_2": Case(partial(every, 2), told="changes step.closure.count"),
    "every_3": Case(partial(every, 3), told="changes step.closure.count"),
    "every_5": Case(partial(every, 5), told="changes step.closure.count"),
    "every_100": Case(partial(every, 100), told="changes step.closure.count"),
    "method": Case(method),
    "number_that_the_loop_changes_once": Case(number_that_the_loop_changes_once),
    "number_that_the_loop_changes_each_time": Case(number_that_the_loop_changes_each_time, told="again and again"),
    "tensor_that_the_loop_writes": Case(tensor_that_the_loop_writes),
    "global_number": Case(global_number),
    "attribute_of_the_model": Case(attribute_of_the_model),
    "schedule_outside": Case(schedule_outside),
    "schedule_inside": Case(schedule_inside, told="in each step"),
    "losses_in_a_list": Case(losses_in_a_list, told="changes step.closure.losses"),
    "last_loss_as_attribute": Case(last_loss_as_attribute, told="changes last in each step"),
    "random_on_the_host": Case(random_on_the_host, told="draws random numbers on the host"),
    "drawn_batches": Case(drawn_batches, told="an iterator"),
    "ring": Case(ring),
    "ring_by_a_number": Case(ring_by_a_number, told="changes step.closure.place.cell.at"),
    "penalty": Case(penalty),
    "accumulated": Case(accumulated),
    "gradients_kept": Case(gradients_kept),
    "cleared_by_the_loop": Case(cleared_by_the_loop),
    "added_up_over_steps": Case(added_up_over_steps),
    "frozen_within": Case(frozen_within),
    "evaluates": Case(evaluates),
    "mode_that_stays": Case(mode_that_stays),
    "loaded": Case(loaded),
    "weight_replaced": Case(weight_replaced),
    "number_in_a_method": Case(number_in_a_method),
    "count_in_a_method": Case(count_in_a_method, told="SEEN"),
    "unfrozen_later": Case(unfrozen_later),
    "group_added": Case(group_added),
    "without_a_batch": Case(without_a_batch),
    "numbers_in_the_batch": Case(numbers_in_the_batch, told=NEVER),
    "other_step_between": Case(other_step_between),
    "batch_written": Case(batch_written, told="writes to its batch"),
}
