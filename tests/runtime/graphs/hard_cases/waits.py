"""The host waits for the device, several streams, several threads: all need a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from .case import ALWAYS, LATER, Cases, Net, Training, Why, loss_of

T = TypeVar("T")

case = Cases("waits", "waits_for_", gpu=True)
LATE = {"waits": False}


class WaitingBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        return gradient / max(1.0, 10 * gradient.norm().item())


def synchronized(*_: Any) -> float:
    torch.cuda.synchronize()
    return 1.0


# The host reads the hidden state, by which the model multiplies it.
reads = partial(case.holding, hold=list, why=Why.WAITS)
reads("item", read=lambda _, hidden: 1 / (hidden.abs().mean().item() + 0.5))
reads("list", read=lambda _, hidden: hidden.mean(0).tolist()[0], why=Why.TO_HOST)
reads("boolean_index", read=lambda _, hidden: 1 + hidden[hidden > 0.1].mean())
reads("synchronizes", read=synchronized, why=Why.RAISES)
reads("waits_in_backward", read=lambda _, hidden: WaitingBackward.apply(hidden), why=Why.RAISES)
reads(
    "later",
    read=lambda _, hidden: hidden.mean().item() if LATE["waits"] else 1.0,
    why=Why.DIFFERS,
    event=lambda t: t.patch(LATE, "waits", value=True),
)


def asks(name: str, ask: Callable[[Tensor], bool], why: str) -> None:
    """Adds a model that masks only if there is something to mask, which is so from a step on."""

    def forward(own: Any, x: Tensor, mask: Tensor) -> Tensor:
        return own.logits(x if ask(mask) else x * mask.float().unsqueeze(1) * 2)

    def loss(t: Training, x: Tensor, y: Tensor) -> Tensor:
        return loss_of(t.called(x, torch.arange(len(x), device=x.device) < (5 if t.is_late else len(x))), y)

    case(name, forward=forward, loss=loss, why=why)


def unless_error(mask: Tensor) -> bool:
    try:
        return bool(mask.all().item())
    except RuntimeError:
        return True


def in_capture(mask: Tensor) -> bool:
    """Leaves the question out while work is recorded, as transformers does."""
    return torch.cuda.is_current_stream_capturing() or bool(mask.all())


asks("mask_check_changes", lambda mask: bool(mask.all()), Why.WAITS)
asks("error_of_wait_is_caught", unless_error, Why.WAITS)
asks("mask_check_skipped_in_capture", in_capture, Why.DIFFERS)


streams = Cases("streams", "stream_", gpu=True)


def side(t: Training, name: str = "side") -> torch.cuda.Stream:
    stream: torch.cuda.Stream = t.once(name, torch.cuda.Stream)
    return stream


def busy() -> None:
    """Keeps the stream busy for about a millisecond."""
    torch.cuda._sleep(2_000_000)


def on(stream: torch.cuda.Stream, work: Callable[[], T]) -> T:
    """Runs after what is under way, and has what follows wait; the stream is busy afterwards."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = work()
        busy()
    current.wait_stream(stream)
    return result


def inside(own: Any, x: Tensor) -> Tensor:
    return own.head(own.hidden(x) + on(torch.cuda.Stream(), lambda: torch.sin(own.body(x))))


def after_work(t: Training) -> Tensor:
    busy()
    return t.plain()


def prefetched(t: Training) -> Tensor:
    """The next batch is copied on another stream, late: whoever does not wait reads what was there before."""

    def fetch(number: int) -> tuple[Tensor, Tensor]:
        with torch.cuda.stream(side(t)):
            x, y = t.batch(number)
            busy()
            return x.mul(1.0), y.clone()

    x, y = t.kept.get("next") or fetch(t.number)
    torch.cuda.current_stream().wait_stream(side(t))
    x.record_stream(torch.cuda.current_stream())
    y.record_stream(torch.cuda.current_stream())
    loss = loss_of(t.called(x), y)
    t.kept["next"] = fetch(t.number + 1)
    return t.update(loss)


streams("inside", forward=inside, why="works on more than one stream")
streams("around", step=lambda t: on(side(t), t.plain), when=(ALWAYS, LATER))
streams("in_turn", step=lambda t: on(side(t, f"side {t.number % 3}"), t.plain))
streams("weights_written_late", step=after_work)
streams("prefetching", step=prefetched)


threads = Cases("threads", "thread_", gpu=True)


def in_threads(*works: Callable[[], Any]) -> list[Any]:
    """Returns what each gave, run in threads of their own at once; raises what one of them raised."""
    found: list[Any] = [None] * len(works)
    raised: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(place: int) -> None:
        barrier.wait()
        try:
            found[place] = works[place]()
        except BaseException as error:  # noqa: BLE001  # raised again below
            raised.append(error)

    started = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(works))]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    torch.cuda.synchronize()
    if raised:
        raise raised[0]
    return found


def beside(name: str, work: Callable[[Training], Any], why: str = "") -> None:
    """Adds a loop beside a thread that works again and again; a step raises what that raised."""

    def step(t: Training) -> Tensor:
        over = t.once("over", threading.Event)
        errors: list[Exception] = t.once("errors", list)

        def run() -> None:
            try:
                while not over.wait(0.001):
                    work(t)
            except Exception as error:  # noqa: BLE001  # raised by the next step
                errors.append(error)

        if "thread" not in t.kept:
            t.kept["thread"] = thread = threading.Thread(target=run, daemon=True)
            thread.start()
            t.undo.callback(thread.join)
            t.undo.callback(over.set)
        loss = t.plain()
        if errors:
            raise errors[0]
        return loss

    threads(name, step=step, why=why)


def pin_and_free(t: Training) -> None:
    torch.ones(1000).pin_memory().to(t.device, non_blocking=True)
    torch.cuda.empty_cache()


def two_models(t: Training) -> Tensor:
    """A second model is trained at the same time, also recorded."""
    other = t.once("other", lambda: Net().to(t.device))
    called = t.once("called", lambda: t.wrap(other))
    other.zero_grad()
    thread = threading.Thread(target=lambda: functional.cross_entropy(called(t.batch(0)[0]), t.batch(0)[1]).backward())
    thread.start()
    loss = t.plain()
    thread.join()
    torch.cuda.synchronize()
    return torch.cat([loss.reshape(1), other.head.weight.grad.flatten()])


beside("waits_beside", lambda t: torch.ones(64, device=t.device).sum().item(), Why.WAITS)
beside("synchronizes_beside", lambda _: torch.cuda.synchronize())
beside("pins_and_frees_beside", pin_and_free)
threads("steps", step=lambda t: in_threads(t.plain)[0], when=(ALWAYS, LATER))
threads("forward", step=lambda t: t.update(in_threads(t.loss)[0]))
threads("two_models", step=two_models, why=Why.RAISES)
