"""Recordings are compared with the model now and then; what differs is recorded no more."""

from __future__ import annotations

import functools
import gc
import itertools
import queue
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from recorded_training import (
    Net,
    accumulated,
    batch,
    built,
    forget,
    forwards,
    graphed,
    in_bf16,
    plain_step,
    said,
    trained,
)
from taped import TapeRecorder
from torch import nn

from amptune.measure.bench.policy_timer import price_of_checks
from amptune.runtime.graphs.capture import UnusualError
from amptune.runtime.graphs.check import CHECK_EVERY, LAST_DOUBLED
from amptune.runtime.graphs.differences import Limits
from amptune.runtime.graphs.dispatch import DIFFER, NOT_RECORDED
from amptune.runtime.graphs.graphed_model import GraphedModel


@pytest.fixture(autouse=True)
def _afresh() -> None:
    forget()


class Deep(Net):
    """What it depends on lies deeper than is looked at before each replay."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"head": {"factor": 2.0}}

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.config["head"]["factor"]


class BackwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
        ctx.settings = settings
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.settings["head"]["factor"], None


class DeepBackward(Deep):
    def forward(self, x: torch.Tensor) -> Any:
        return BackwardOnly.apply(Net.forward(self, x), self.config)  # type: ignore[no-untyped-call]


class CountsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        ctx.count = count
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.count.add_(1)
        return gradient, None


class Checkpointed(Net):
    """Changes a buffer in its backward pass, as BatchNorm does where checkpointing computes it again."""

    def __init__(self) -> None:
        super().__init__()
        self.passes = nn.Buffer(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> Any:
        return CountsBackward.apply(super().forward(x), self.passes)  # type: ignore[no-untyped-call]


class DeepBuffer(Deep):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Buffer(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> Any:
        out = Net.forward(self, x)
        self.mean.lerp_(out.detach().mean(0), self.config["head"]["factor"] / 10)
        return out


class DeepNumber(Deep):
    def forward(self, x: torch.Tensor) -> Any:
        return Net.forward(self, x), self.config["head"]["factor"]


def _first(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
    out = model(x)
    loss = (out[0] if isinstance(out, tuple) else out).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Deep, "output 1"),
        (DeepBackward, "the gradient of body.0.weight"),
        (DeepBuffer, "the buffer mean"),
        (DeepNumber, "what it returns"),
    ],
)
def test_a_replay_that_differs_is_the_last_one(make: Callable[[], nn.Module], what: str) -> None:
    model: Any = built(make)
    called: Any = graphed(model)
    trained(model, called, _first, [4] * 4)
    model.config["head"]["factor"] = 3.0
    trained(model, called, _first, [4] * 4)
    (finding,) = said
    assert finding.code == DIFFER
    if make is not DeepBackward:
        assert what in finding.message
    assert "steps after its call 2 may have trained wrongly" in finding.message
    assert len(called.recordings) == 0
    plain: Any = built(make)
    plain.load_state_dict(model.state_dict())
    plain.config["head"]["factor"] = 3.0
    assert trained(model, called, _first, [4] * 3)[0] == trained(plain, plain, _first, [4] * 3)[0]
    assert len(said) == 1


def test_only_the_models_own_pass_trains() -> None:
    """At a comparison a wrong replay leaves no trace: neither in weights and buffers, nor in what it returns."""
    model, plain = built(Deep), built(Deep)
    called: Any = graphed(model)
    for one in (called, plain):
        trained(model if one is called else plain, one, _first, [4] * 4)
    for one in (model, plain):
        one.config["head"]["factor"] = 3.0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    assert _first(called, optimizer, batch(9)) == _first(plain, other, batch(9))
    assert all(
        torch.equal(*pair) for pair in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    )


def test_what_differs_once_may_do_so_again() -> None:
    model = built(Deep)
    called: Any = graphed(model)
    trained(model, called, _first, [4] * 4)
    model.config["head"]["factor"] = 3.0
    trained(model, called, _first, [4])
    model.config["head"]["factor"] = 2.0
    trained(model, called, _first, [4, 4])
    assert [finding.code for finding in said] == [DIFFER]


class Turning(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
        ctx.settings = settings
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        changed = gradient.clone()
        changed[0] *= ctx.settings["head"]["factor"]
        return changed, None


@pytest.mark.parametrize(("calls", "differs"), [(1, False), (2, True)])
def test_a_gradient_that_differs_a_little_has_to_do_so_twice(calls: int, differs: bool) -> None:
    """As it does where rounding turns a ReLU."""

    class Model(Deep):
        def forward(self, x: torch.Tensor) -> Any:
            return Turning.apply(Net.forward(self, x), self.config)  # type: ignore[no-untyped-call]

    model = built(Model)
    model.config["head"]["factor"] = 1.0
    called: Any = graphed(model)
    trained(model, called, plain_step, [4] * 4)
    model.config["head"]["factor"] = 1.02
    trained(model, called, plain_step, [4] * calls)
    model.config["head"]["factor"] = 1.0
    trained(model, called, plain_step, [4] * 3)
    assert bool(said) == differs
    assert len(called.recordings) == 1 - differs


def test_it_is_compared_at_doubling_distances_and_then_regularly() -> None:
    class Small(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            forwards.write("forward\n")
            return super().forward(x)

    model = Small(2, 2)
    called: Any = graphed(model)
    compared = []
    for call in range(-1, 2 * CHECK_EVERY + 2):  # the first is not recorded, the next one is call 1
        forwards.clear()
        called(torch.ones(1, 2)).sum().backward()
        if forwards.shapes() and call > 0:
            compared.append(call + 1)
    assert compared == [2, 4, 8, 16, 32, 64, 128, LAST_DOUBLED, CHECK_EVERY, 2 * CHECK_EVERY]
    assert not said


def test_more_memory_for_a_comparison_than_there_is_ends_the_recording_and_not_the_training() -> None:
    model, plain = built(), built()
    called: Any = graphed(model)
    trained(model, called, plain_step, [4, 4])
    trained(plain, plain, plain_step, [4, 4])
    recording = called.recordings._recorded[0]

    def full() -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    recording.outputs = full
    assert trained(model, called, plain_step, [4] * 3)[0] == trained(plain, plain, plain_step, [4] * 3)[0]
    assert "leaves no memory to compare it in" in said[0].message


class FullInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
        ctx.settings = settings
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.settings["head"]["factor"] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradient, None


def test_more_memory_for_a_comparison_than_there_is_in_its_backward_pass_leaves_the_gradients_of_the_replay() -> None:
    class Full(Deep):
        def forward(self, x: torch.Tensor) -> Any:
            return FullInBackward.apply(Net.forward(self, x), self.config)  # type: ignore[no-untyped-call]

    model: Any = built(Full)
    called: Any = graphed(model)
    plain = built()
    losses, others = trained(model, called, plain_step, [4] * 4)[0], trained(plain, plain, plain_step, [4] * 4)[0]
    model.config["head"]["factor"] = 3.0
    losses += trained(model, called, plain_step, [4])[0]
    model.config["head"]["factor"] = 2.0
    losses += trained(model, called, plain_step, [4] * 2)[0]
    others += [loss for count in (1, 2) for loss in trained(plain, plain, plain_step, [4] * count)[0]]
    assert losses == others
    assert "leaves no memory to compare it in" in said[0].message
    assert len(called.recordings) == 0


def test_the_memory_of_a_recording_is_free_when_the_model_runs_in_its_place() -> None:
    class Full(Deep):
        def forward(self, x: torch.Tensor) -> Any:
            if self.config["head"]["factor"] == 3 and kept() is not None:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return Net.forward(self, x)

    model: Any = built(Full)
    called: Any = graphed(model)
    kept: Any = lambda: None  # noqa: E731
    trained(model, called, plain_step, [4] * 4)
    kept = weakref.ref(called.recordings._recorded[0])
    model.config["head"]["factor"] = 3.0
    trained(model, called, plain_step, [4])
    assert "leaves no memory to compare it in" in said[0].message


class Growing(Deep):
    """From a moment on it does what no recording could."""

    def forward(self, x: torch.Tensor) -> Any:
        does: Any = self.config["head"].get("does", lambda _, out: out)
        return does(self.config, Net.forward(self, x) * 2)


def _with_an_attribute(_: Any, out: Any) -> Any:
    out.auxiliary = 1
    return out


def _counting(config: Any, out: torch.Tensor) -> Any:
    config["head"]["count"] = config["head"].get("count", 0) + 1
    return out / (1 + config["head"]["count"])


def _iterating(config: Any, out: torch.Tensor) -> torch.Tensor:
    config["head"]["of"] = iter([1])
    return out * 2


@pytest.mark.parametrize(
    "does",
    [
        _with_an_attribute,
        _counting,
        _iterating,
        lambda _, out: (out, slice(1)),
        lambda _, out: out.to_sparse(),
        lambda _, out: out.detach(),
        lambda *_: None,
    ],
)
def test_a_model_that_can_be_recorded_no_more_trains_on(does: Callable[[Any, Any], Any]) -> None:
    model, plain = built(Growing), built(Growing)
    called: Any = graphed(model)
    for one in (called, plain):
        trained(model if one is called else plain, one, plain_step, [4] * 4)
        (model if one is called else plain).config["head"]["does"] = does
    for seed in range(6):
        for one in (called, plain):
            out = one(batch(seed))
            out = out[0] if isinstance(out, tuple) else out
            if out is not None and out.requires_grad:
                out.to_dense().square().mean().backward()
        if seed == 0:
            assert model.config["head"].get("count") == plain.config["head"].get("count")
            grads = [[weight.grad for weight in one.parameters()] for one in (model, plain)]
            assert all(one is other is None or torch.equal(one, other) for one, other in zip(*grads, strict=True))
    assert [finding.code for finding in said] == [DIFFER]


def test_neither_batches_nor_gradients_are_kept() -> None:
    class WithLoss(Net):
        def forward(self, x: torch.Tensor) -> Any:
            logits = super().forward(x)
            return logits.square().mean(), logits

    called: Any = graphed(built(WithLoss))
    kept = []
    gc.disable()
    try:
        for seed in range(6):
            x = batch(seed)
            loss, logits = called(x)
            kept += [weakref.ref(one) for one in (x, loss, logits)]
            if seed == 0:
                logits.register_hook(lambda gradient, kept=kept: kept.append(weakref.ref(gradient)))
            loss.backward()
            del x, loss, logits
    finally:
        gc.enable()
    assert not any(one() is not None for one in kept)
    assert len(called.recordings) == 1


def test_recordings_are_freed_with_the_wrapper() -> None:
    model = built()
    called: Any = graphed(model)
    trained(model, called, plain_step, [4] * 4)
    recording = weakref.ref(called.recordings._recorded[0])
    gc.disable()
    try:
        del called
        assert recording() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(("every", "ends"), [(20, False), (2, True)])
def test_rare_batches_with_another_answer_do_not_end_recording(*, every: int, ends: bool) -> None:
    model, plain = built(), built()
    called: Any = graphed(model)
    losses = trained(model, called, plain_step, [4, 4])[0]
    recording = called.recordings._recorded[0]
    begin = recording.begin

    def asked(inputs: Any) -> Any:
        if recording.calls % every == 0:
            raise UnusualError("waits for the device, and the result is not always the same")
        return begin(inputs)

    recording.begin = asked
    losses += trained(model, called, plain_step, [4] * 200)[0]
    assert losses == trained(plain, plain, plain_step, [4, 4])[0] + trained(plain, plain, plain_step, [4] * 200)[0]
    assert bool(said) is ends


def test_parts_of_a_loss_that_the_model_does_not_compute_are_no_difference() -> None:
    """Such as a penalty on the weights, or a second pass in the same loss."""

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> Any:
        loss = model(x).square().mean() + sum(one.square().sum() for one in model.parameters()) * 0.1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    model, plain = built(), built()
    called = graphed(model)
    assert trained(model, called, step, [4] * 8)[0] == pytest.approx(trained(plain, plain, step, [4] * 8)[0], rel=1e-6)
    assert not said


class InTheTape(TapeRecorder):
    """Its replays are wrong in a way that only the fourth and later ones are."""

    def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        result, replay = super().record(work)
        calls = itertools.count(1)

        def wrong() -> None:
            replay()
            if next(calls) >= 4 and isinstance(result, torch.Tensor):
                result.detach().mul_(1.001)

        return result, wrong


class Masked(Deep):
    """Some of its outputs are -inf."""

    def forward(self, x: torch.Tensor) -> Any:
        out = Net.forward(self, x)
        return out, out.detach().masked_fill(out < out.mean(), -torch.inf) * self.config["head"]["factor"]


def test_finite_outputs_beside_others_are_compared() -> None:
    model: Any = built(Masked)
    called = graphed(model)
    trained(model, called, _first, [4] * 4)
    assert not said
    model.config["head"]["factor"] = 2.001
    trained(model, called, _first, [4] * 4)
    assert "output 2 is another" in said[0].message


def test_a_small_difference_is_found() -> None:
    model = built()
    called: Any = GraphedModel(model, said.append, recorder=InTheTape, device_type="cpu")
    trained(model, called, plain_step, [4] * 12)
    assert [finding.code for finding in said] == [DIFFER]
    assert "output 1 is another by 0.001 of its size" in said[0].message


class Counted:
    """A clock for which a step takes a ms for each time that the model runs in it."""

    def time_steps(self, step: Callable[[], Any], _: int) -> list[float]:
        before = len(forwards.shapes())
        step()
        return [float(len(forwards.shapes()) - before)]


def test_the_price_of_comparing_counts_each_micro_batch() -> None:
    model = built()
    called: Any = graphed(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, called, accumulated, [4] * 4)
    clock: Any = Counted()
    price_ms = price_of_checks(clock, called.recordings, lambda: accumulated(called, optimizer, batch(0)), 0.0)
    assert price_ms == 2 / CHECK_EVERY


def test_a_difference_that_rounding_explains_is_no_reason_to_reject_a_policy() -> None:
    wrong: list[int] = []

    class Once(TapeRecorder):
        def record(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
            result, replay = super().record(work)

            def by_an_ulp() -> None:
                replay()
                if isinstance(result, torch.Tensor) and wrong:
                    result.detach().mul_(1 + torch.finfo(result.dtype).eps)
                    wrong.pop()

            return result, by_an_ulp

    model = built()
    called: Any = GraphedModel(model, said.append, recorder=Once, device_type="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, called, in_bf16, [4] * 4)
    called.recordings._recorded[0].limits = Limits({})
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        wrong.extend([1] if steps == 2 else [])
        in_bf16(called, optimizer, batch(steps))

    clock: Any = Counted()
    price_of_checks(clock, called.recordings, step, 0.0)
    assert steps == 3
    assert not said


# What inspection finds on the host, at any depth, when a pass is recorded.

CALLS = {"n": 0}
GENERATOR = np.random.default_rng(0)


class InDictOfModules(Net):
    def __init__(self) -> None:
        super().__init__()
        self.losses = {"a": [Counter()]}

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.losses["a"][0].next()


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def next(self) -> float:
        self.count += 1
        return 1 / self.count


class OnClass(Net):
    seen = 0

    def forward(self, x: torch.Tensor) -> Any:
        OnClass.seen += 1
        return super().forward(x) / OnClass.seen


class InClosure(Net):
    def __init__(self) -> None:
        super().__init__()
        count = 0

        def scaled(x: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return x / count

        self.scaled = scaled

    def forward(self, x: torch.Tensor) -> Any:
        return self.scaled(super().forward(x))


class InGlobal(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) / _counted()


def _counted() -> int:
    CALLS["n"] += 1
    return CALLS["n"]


class FromNumpy(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * float(GENERATOR.random())


class Iterating(Net):
    def __init__(self) -> None:
        super().__init__()
        self.steps = {"of": {"head": iter([1.0] * 100)}}

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * next(self.steps["of"]["head"])


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class WithSlots(Net):
    def __init__(self) -> None:
        super().__init__()
        self.state = Slotted()

    def forward(self, x: torch.Tensor) -> Any:
        self.state.count += 1
        return super().forward(x) / self.state.count


class Unseen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.names = {"a": itertools.cycle("ab")}


def _halving() -> Iterator[float]:
    factor = 1.0
    while True:
        factor /= 2
        yield factor


class Generating(Net):
    def __init__(self) -> None:
        super().__init__()
        self.factors = [_halving()]

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * next(self.factors[0])


class InBytes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.count = (bytearray(1),)

    def forward(self, x: torch.Tensor) -> Any:
        self.count[0][0] += 1
        return super().forward(x) / self.count[0][0]


@functools.lru_cache
def _state() -> dict[str, int]:
    return {"n": 0}


class InCache(Net):
    def forward(self, x: torch.Tensor) -> Any:
        state = _state()
        state["n"] += 1
        return super().forward(x) / state["n"]


class Caching(Net):
    @functools.lru_cache(maxsize=1)  # noqa: B019
    def mask(self, whose: object) -> torch.Tensor:
        return torch.ones(4) * (whose is not None)

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x) * self.mask(object())


@pytest.fixture
def _globals() -> Iterator[None]:
    yield
    CALLS["n"] = OnClass.seen = 0


@pytest.mark.usefixtures("_globals")
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (InDictOfModules, "changes losses.a.0.count in each forward pass"),
        (OnClass, "meets a changed model again and again (seen"),
        (InClosure, "count.cell in each forward pass"),
        (InGlobal, "n in each forward pass"),
        (FromNumpy, "GENERATOR in each forward pass"),
        (Iterating, "holds steps.of.head, an iterator"),
        (WithSlots, "state.count in each forward pass"),
        (Unseen, "holds names.a, an iterator"),
        (Generating, "holds factors.0, an iterator"),
        (InBytes, "changes count.0 in each forward pass"),
        (InCache, "n in each forward pass"),
        (Caching, "mask"),
    ],
)
def test_what_the_forward_pass_does_on_the_host_is_found_at_any_depth(
    make: Callable[[], nn.Module], reason: str
) -> None:
    global GENERATOR
    results = []
    for wrap in (graphed, lambda model: model):
        CALLS["n"] = _state()["n"] = OnClass.seen = 0
        GENERATOR = np.random.default_rng(0)
        model = built(make)
        results.append(trained(model, wrap(model), plain_step, [4] * 6)[0])
    assert results[0] == results[1]
    assert [finding.code for finding in said] == [NOT_RECORDED]
    assert reason in said[0].message


class Refusing(dict[str, int]):
    def update(self, *_: Any, **__: Any) -> None:
        raise KeyError("it has no such method")


class Items(list[int]):
    taken = 0


class Private:
    __slots__ = ("__count",)

    def __init__(self) -> None:
        self.__count = 0

    def next(self) -> int:
        self.__count += 1
        return self.__count


@dataclass(frozen=True, slots=True)
class Frozen:
    count: int = 0


class Registry:
    count: int


NEXT: int


ELSEWHERE = ModuleType("elsewhere")
exec("count = 0\ndef next_count():\n    global count\n    count += 1\n    return count", vars(ELSEWHERE))  # noqa: S102


def _next_in_array(held: Any) -> float:
    held["array"][1:] += 1
    return float(held["array"][1, 0])


def _next_in_turn(held: Any) -> float:
    first = next(iter(held["turns"]))
    held["turns"][first] = held["turns"].pop(first)
    return float(first)


def _next_in_order(held: Any) -> float:
    first = next(iter(held["ordered"]))
    held["ordered"].move_to_end(first)
    return float(first)


def _next_of_function(_: Any) -> float:
    vars(_next_of_function)["count"] = vars(_next_of_function).get("count", 0) + 1
    return float(vars(_next_of_function)["count"])


def _next_of_subclass(held: Any) -> float:
    held["items"].taken += 1
    return float(held["items"].taken)


def _next_of_class(_: Any) -> float:
    Registry.count = getattr(Registry, "count", 0) + 1
    return float(Registry.count)


def _next_global(_: Any) -> float:
    global NEXT
    NEXT = 1 + (NEXT if "NEXT" in globals() else 0)
    return float(NEXT)


def _next_elsewhere(_: Any) -> float:
    return float(ELSEWHERE.next_count())


def _next_where_update_raises(held: Any) -> float:
    held["refusing"]["n"] += 1
    return float(held["refusing"]["n"])


def _next_in_private_slot(held: Any) -> float:
    return float(held["private"].next())


def _next_of_frozen(held: Any) -> float:
    object.__setattr__(held["frozen"], "count", held["frozen"].count + 1)
    return float(held["frozen"].count)


def _next_in_new_dictionary(held: Any) -> float:
    held["counter"].__dict__ = {"count": held["counter"].count + 1}
    return float(held["counter"].count)


@pytest.mark.parametrize(
    "counted",
    [
        _next_in_array,
        _next_in_turn,
        _next_in_order,
        _next_of_function,
        _next_of_subclass,
        _next_of_class,
        _next_global,
        _next_elsewhere,
        _next_where_update_raises,
        _next_in_private_slot,
        _next_of_frozen,
        _next_in_new_dictionary,
    ],
)
def test_what_the_passes_of_a_recording_did_on_the_host_is_put_back(counted: Callable[[Any], float]) -> None:
    class Counting(Net):
        def __init__(self) -> None:
            super().__init__()
            self.held = {
                "of": {
                    "array": np.zeros((2, 2)),
                    "turns": {1: 1, 2: 2, 3: 3},
                    "ordered": OrderedDict({1: 1, 2: 2, 3: 3}),
                    "items": Items(),
                    "refusing": Refusing(n=0),
                    "private": Private(),
                    "frozen": Frozen(),
                    "counter": Counter(),
                }
            }

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x) / counted(self.held["of"])

    results = []
    for wrap in (graphed, lambda model: model):
        vars(ELSEWHERE)["count"] = 0
        model = built(Counting)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        called = wrap(model)
        losses = []
        for seed in range(5):
            if seed < 2:  # there is nothing yet when the pass is recorded
                globals().pop("NEXT", None)
                vars(_next_of_function).clear()
                if hasattr(Registry, "count"):
                    del Registry.count
            losses.append(float(plain_step(called, optimizer, batch(seed))))
        results.append(losses)
    assert results[0] == results[1]
    assert [finding.code for finding in said] == [NOT_RECORDED]


def test_what_has_nothing_to_compare_is_no_obstacle() -> None:
    """Such as a lock, a file, or a weak reference; properties are not read, and tensors not printed."""

    class Holding(Net):
        def __init__(self) -> None:
            super().__init__()
            key = torch.ones(2)
            self.held = {"of": [threading.RLock(), weakref.proxy(self), sys.stdout, {key: key}]}

        @property
        def of_all(self) -> Any:
            raise AssertionError

    model = built(Holding)
    called: Any = graphed(model)
    trained(model, called, plain_step, [4] * 4)
    assert len(called.recordings) == 1
    assert not said


def test_what_other_threads_fill_is_left_to_them() -> None:
    held: queue.Queue[int] = queue.Queue()

    class Logging(Net):
        def __init__(self) -> None:
            super().__init__()
            self.log = {"of": held}

        def forward(self, x: torch.Tensor) -> Any:
            thread = threading.Thread(target=held.put, args=(1,))
            thread.start()
            thread.join()
            return super().forward(x)

    model = built(Logging)
    called: Any = graphed(model)
    trained(model, called, plain_step, [4] * 2)
    assert held.qsize() == len(forwards.shapes())
    assert not said


def test_another_thread_that_calls_the_model_waits_until_it_is_recorded() -> None:
    """While it is recorded, its weights are exchanged: gradients of the other pass would be lost."""
    model = nn.Linear(4, 1)
    called: list[Any] = []
    threads: list[threading.Thread] = []

    class Interrupted(TapeRecorder):
        def record(self, work: Callable[[], Any]) -> Any:
            if not threads:
                threads.append(threading.Thread(target=lambda: called[0](torch.ones(2, 4)).sum().backward()))
                threads[0].start()
                threads[0].join(0.5)  # it waits for this one
            return super().record(work)

    called.append(GraphedModel(model, said.append, recorder=Interrupted, device_type="cpu"))
    for _ in range(2):
        model.zero_grad()
        called[0](torch.ones(2, 4)).sum().backward()
    (thread,) = threads
    thread.join()
    assert len(called[0].recordings) == 1
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[4.0] * 4]


class OwnHook(Net):
    """Its own package sets a hook on it, as a library does that captures outputs if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.head.register_forward_hook(_captured)
        self.captured: list[torch.Tensor] | None = None


def _captured(_: nn.Module, __: Any, out: torch.Tensor) -> torch.Tensor:
    return out * 2


def test_hooks_that_the_models_package_sets_are_a_part_of_its_forward() -> None:
    model, plain = built(OwnHook), built(OwnHook)
    called: Any = graphed(model)
    assert trained(model, called, plain_step, [4] * 6)[0] == trained(plain, plain, plain_step, [4] * 6)[0]
    assert len(called.recordings) == 1
    assert not said


def test_inputs_in_the_memory_of_a_buffer_run_by_themselves() -> None:
    class Queue(Net):
        def __init__(self) -> None:
            super().__init__()
            self.queue = nn.Buffer(torch.randn(4, 3, 8, 8))

        def forward(self, x: torch.Tensor) -> Any:
            self.queue.mul_(1.5)
            return super().forward(x)

    results = []
    for wrap in (graphed, lambda model: model):
        model: Any = built(Queue)
        called = wrap(model)
        trained(model, called, plain_step, [4] * 3)
        results.append([float(called(model.queue[:4]).detach().sum()) for _ in range(3)])
    assert results[0] == results[1]


def test_a_buffer_that_is_expanded_is_put_back() -> None:
    class Expanded(Net):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Buffer(torch.ones(1).expand(4))
            self.count = nn.Buffer(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> Any:
            self.count.add_(1)
            self.scale[:1].mul_(0.5)
            return super().forward(x) * self.scale / self.count

    model, plain = built(Expanded), built(Expanded)
    called: Any = graphed(model)
    assert trained(model, called, plain_step, [4] * 6)[0] == trained(plain, plain, plain_step, [4] * 6)[0]
    assert len(called.recordings) == 1


def test_hooks_on_gradients_of_weights_are_called_once() -> None:
    model, plain = built(), built()
    called: Any = graphed(model)
    counts = []
    for one in (called, plain):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        gradients: list[torch.Tensor] = []
        for seed in range(10):
            loss = one(batch(seed)).square().mean()
            if seed in (3, 4):  # a replay, and a comparison
                one.head.weight.register_hook(lambda gradient, seen=gradients: seen.append(gradient) or gradient * 2)
            loss.backward()
            optimizer.step()
        counts.append(len(gradients))
    assert counts[0] == counts[1]
    assert torch.equal(model.head.weight, plain.head.weight)
    assert len(called.recordings) == 1


def test_hooks_on_an_output_that_another_is_made_from_are_called() -> None:
    class WithLoss(Net):
        def forward(self, x: torch.Tensor) -> Any:
            logits = super().forward(x)
            return logits.square().mean(), logits

    model, plain = built(WithLoss), built(WithLoss)
    called = graphed(model)
    for seed in range(8):
        gradients: list[torch.Tensor] = []
        for one in (called, plain):
            loss, logits = one(batch(seed))
            if seed >= 6:
                logits.register_hook(gradients.append)
                logits.retain_grad()
                logits.register_hook(lambda gradient: gradient / 4)
            kept = logits if seed == 6 else None
            del logits
            loss.backward()
            if kept is not None:
                gradients.append(kept.grad * 4)
        assert len(gradients) == {6: 4, 7: 2}.get(seed, 0)
        assert all(torch.equal(one, gradients[0]) for one in gradients)
        assert all(
            torch.equal(one.grad, other.grad)
            for one, other in zip(model.head.parameters(), plain.head.parameters(), strict=True)
        )
    assert "with a hook on it" in said[0].message


def test_what_lies_on_an_input_or_output_is_not_lost() -> None:
    class Noting(Net):
        def forward(self, x: Any) -> Any:
            out: Any = super().forward(x)
            out.auxiliary = 1
            return out

    called = graphed(built(Noting))
    for seed in range(4):
        out = called(batch(seed))
        assert out.auxiliary == 1
        out.sum().backward()
    assert "returns a tensor with attributes of its own" in said[0].message


def test_an_item_of_the_model_is_had_from_the_wrapper() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    called: Any = graphed(model)
    assert called[1] is model[1]
    assert len(called) == 2
    assert list(called) == list(model)
    assert bool(graphed(Net())) is True
    with pytest.raises(TypeError):
        graphed(Net())[0]


def test_a_compared_backward_pass_changes_buffers_once() -> None:
    model = built(Checkpointed)
    called = graphed(model)
    trained(model, called, plain_step, sizes=[4] * 20)
    assert called.recordings.calls == 19
    assert model.passes == 20
    assert not said
