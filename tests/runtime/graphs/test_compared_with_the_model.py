"""Recordings are compared with the model now and then; what differs is recorded no more."""

from __future__ import annotations

import gc
import queue
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

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
    require_same_training,
    said,
    trained,
)
from taped import TapeRecorder
from torch import nn

from amptune.measure.bench.policy_timer import price_of_checks
from amptune.runtime.graphs.capture import UnusualError
from amptune.runtime.graphs.check import CHECK_EVERY, LAST_DOUBLED
from amptune.runtime.graphs.differences import Limits
from amptune.runtime.graphs.dispatch import DIFFER
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


class Changed(torch.autograd.Function):
    """Gives its input on; the gradient is what a function makes of that."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.change(gradient), None


class DeepBackward(Deep):
    def forward(self, x: torch.Tensor) -> Any:
        return Changed.apply(Net.forward(self, x), self.change)  # type: ignore[no-untyped-call]

    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * self.config["head"]["factor"]


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


class Turning(DeepBackward):
    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        changed = gradient.clone()
        changed[0] *= self.config["head"]["factor"]
        return changed


@pytest.mark.parametrize(("calls", "differs"), [(1, False), (2, True)])
def test_a_gradient_that_differs_a_little_has_to_do_so_twice(calls: int, differs: bool) -> None:
    """As it does where rounding turns a ReLU."""
    model = built(Turning)
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


class Full(DeepBackward):
    def change(self, gradient: torch.Tensor) -> torch.Tensor:
        if self.config["head"]["factor"] == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gradient


def test_more_memory_for_a_comparison_than_there_is_in_its_backward_pass_leaves_the_gradients_of_the_replay() -> None:
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

    assert len(require_same_training(Holding).recordings) == 1
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

    assert len(require_same_training(Expanded).recordings) == 1


def test_an_item_of_the_model_is_had_from_the_wrapper() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
    called: Any = graphed(model)
    assert called[1] is model[1]
    assert len(called) == 2
    assert list(called) == list(model)
    assert bool(graphed(Net())) is True
    with pytest.raises(TypeError):
        graphed(Net())[0]
