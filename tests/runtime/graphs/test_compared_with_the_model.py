"""Recordings are compared with the model now and then; what differs is recorded no more."""

from __future__ import annotations

import gc
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
    forwards,
    graphed,
    plain_step,
    said,
    trained,
)
from taped import TapeRecorder
from torch import nn

from amptune.measure.bench.policy_timer import price_of_checks
from amptune.runtime.graphs.capture import UnusualError
from amptune.runtime.graphs.check import CHECK_EVERY, LAST_DOUBLED
from amptune.runtime.graphs.dispatch import DIFFER
from amptune.runtime.graphs.graphed_model import GraphedModel


def deep(use: Callable[[Any, torch.Tensor, float], Any] = lambda _, out, factor: out * factor) -> Any:
    """A model that makes something of its output and a factor, which lies deeper than is looked at before a replay."""

    class Deep(Net):
        def __init__(self) -> None:
            super().__init__()
            self.config = {"head": {"factor": 2.0}}
            self.mean = nn.Buffer(torch.zeros(4))

        def forward(self, x: torch.Tensor) -> Any:
            return use(self, super().forward(x), self.config["head"]["factor"])

    return Deep


def set_factor(model: Any, factor: float) -> None:
    model.config["head"]["factor"] = factor


def in_backward(change: Callable[[torch.Tensor, float], torch.Tensor]) -> Any:
    """Such a model in whose backward pass the factor, as it then is, changes the gradient."""

    def hooked(own: Any, out: torch.Tensor, _: float) -> torch.Tensor:
        inner = out.clone()
        inner.register_hook(lambda gradient: change(gradient, own.config["head"]["factor"]))  # type: ignore[no-untyped-call]
        return inner.clone()

    return deep(hooked)


def with_mean(own: Any, out: torch.Tensor, factor: float) -> torch.Tensor:
    own.mean.lerp_(out.detach().mean(0), factor / 10)
    return out


def masked(_: Any, out: torch.Tensor, factor: float) -> Any:
    return out, out.detach().masked_fill(out < out.mean(), -torch.inf) * factor


@pytest.mark.parametrize(
    ("make", "factor", "what"),
    [
        (deep(), 3.0, "output 1"),
        (in_backward(torch.mul), 3.0, ""),
        (deep(with_mean), 3.0, "the buffer mean"),
        (deep(lambda _, out, factor: (out, slice(1) if factor == 3 else 1)), 3.0, "what it returns"),  # unknown to it
        (deep(masked), 2.001, "output 2 is another"),  # finite outputs beside others that are not
    ],
)
def test_a_replay_that_differs_is_the_last_one(make: Callable[[], nn.Module], factor: float, what: str) -> None:
    model = built(make)
    called: Any = graphed(model)
    trained(model, called, plain_step, [4] * 4)
    assert not said
    set_factor(model, factor)
    trained(model, called, plain_step, [4] * 4)
    (finding,) = said
    assert finding.code == DIFFER
    assert what in finding.message
    assert "steps after its call 2 may have trained wrongly" in finding.message
    assert len(called.recordings) == 0


def test_only_the_models_own_pass_trains() -> None:
    """At a comparison a wrong replay leaves no trace: neither in weights and buffers, nor in what it returns."""
    model, plain = built(deep(with_mean)), built(deep(with_mean))
    called: Any = graphed(model)
    for one, of in ((called, model), (plain, plain)):
        trained(of, one, plain_step, [4] * 4)
        set_factor(of, 3.0)
    (loss, state), (other, others) = (
        trained(of, one, plain_step, [4]) for one, of in ((called, model), (plain, plain))
    )
    assert loss == other
    assert all(map(torch.equal, state.values(), others.values()))


def first_row(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    changed = gradient.clone()
    changed[0] *= factor
    return changed


@pytest.mark.parametrize(("calls", "differs"), [(1, False), (2, True)])
def test_a_gradient_that_differs_a_little_has_to_do_so_twice(calls: int, differs: bool) -> None:
    """As it does where rounding turns a ReLU."""
    model = built(in_backward(first_row))
    called: Any = graphed(model)
    for factor, count in ((1.0, 4), (1.02, calls), (1.0, 3)):
        set_factor(model, factor)
        trained(model, called, plain_step, [4] * count)
    assert bool(said) == differs
    assert len(called.recordings) == 1 - differs


def test_it_is_compared_at_doubling_distances_and_then_regularly() -> None:
    class Small(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            forwards.write("forward\n")
            return super().forward(x)

    called: Any = graphed(built(lambda: Small(2, 2)))
    compared = []
    for call in range(-1, 2 * CHECK_EVERY + 2):  # the first is not recorded, the next one is call 1
        forwards.clear()
        called(torch.ones(1, 2)).sum().backward()
        if forwards.shapes() and call > 0:
            compared.append(call + 1)
    assert compared == [2, 4, 8, 16, 32, 64, 128, LAST_DOUBLED, CHECK_EVERY, 2 * CHECK_EVERY]
    assert not said


def full_in_backward(gradient: torch.Tensor, factor: float) -> torch.Tensor:
    if factor == 3:
        raise torch.OutOfMemoryError("CUDA out of memory")
    return gradient


def test_more_memory_for_a_comparison_than_there_is_ends_the_recording_and_not_the_training() -> None:
    """If it is the backward pass that has too little, gradients are those of the replay."""
    model, plain = built(in_backward(full_in_backward)), built()
    called: Any = graphed(model)
    for factor, count in ((2.0, 4), (3.0, 1), (2.0, 2)):
        set_factor(model, factor)
        expected = trained(plain, plain, plain_step, [4] * count)[0]
        assert trained(model, called, plain_step, [4] * count)[0] == expected
    assert "leaves no memory to compare it in" in said[0].message
    assert len(called.recordings) == 0


def test_neither_batches_nor_gradients_are_kept_and_recordings_are_freed_with_the_wrapper() -> None:
    called: Any = graphed(model := built(deep(lambda _, out, __: (out.square().mean(), out))))
    kept: list[Any] = []
    gc.disable()
    try:
        for seed in range(6):
            x = batch(seed)
            loss, logits = called(x)
            kept += [weakref.ref(one) for one in (x, loss, logits)]
            if seed == 0:
                loss.register_hook(lambda gradient, kept=kept: kept.append(weakref.ref(gradient)))
            loss.backward()
            del x, loss, logits
        assert not any(one() is not None for one in kept)
        recording = weakref.ref(called.recordings._recorded[0])
        del called
        assert recording() is None
        assert model.training
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
    threads[0].join()
    assert len(called[0].recordings) == 1
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[4.0] * 4]
