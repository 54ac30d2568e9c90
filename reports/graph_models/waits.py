"""Cases in which the host waits for the device, branches, streams are more than one, or threads are."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from graph_models.case import (
    CLASSES,
    EVENT_AT,
    HIDDEN,
    STEPS,
    WIDTH,
    Net,
    Passing,
    Training,
    add,
    loss_case,
    loss_of,
    model_case,
    plain_step,
    step_case,
    update,
)

WAITS, STREAMS, THREADS, BRANCHES = "waits", "streams", "threads", "branches"
T = TypeVar("T")


# --- waits ---------------------------------------------------------------------------------------------------------


@model_case(WAITS)
class ReadsItem(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) / (x.abs().mean().item() + 0.5)


class Masked(Net):
    """Masks only if there is something to mask."""

    def all(self, mask: Tensor) -> bool:
        return bool(mask.all())

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        hidden = self.hidden(x)
        if not self.all(mask):
            hidden = hidden * mask.float().unsqueeze(1) * 2
        return self.head(hidden)


def _mask(training: Training, x: Tensor) -> Tensor:
    """From a step on some rows are masked."""
    rows = torch.arange(len(x), device=x.device)
    return rows < (len(x) if training.number < EVENT_AT else 5)


def _masked_loss(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(training.called(x, _mask(training, x)), y)


add(WAITS, "mask_check_changes", model=Masked, loss=_masked_loss)


class MaskedUnlessCapturing(Masked):
    """Skips the check if work is recorded, as transformers does, and masks nothing then."""

    def all(self, mask: Tensor) -> bool:
        capturing = mask.is_cuda and torch.cuda.is_current_stream_capturing()
        return capturing or bool(mask.all())


add(WAITS, "mask_check_skipped_in_capture", model=MaskedUnlessCapturing, loss=_masked_loss, gpu=True)


class MaskedByError(Masked):
    """Takes an error of the check for an answer."""

    def all(self, mask: Tensor) -> bool:
        try:
            return bool(mask.all().item())
        except RuntimeError:
            return True


add(WAITS, "error_of_wait_is_caught", model=MaskedByError, loss=_masked_loss, gpu=True)


class MaskedByHost(Masked):
    """Remembers the answer of its check in a closure."""

    def build(self) -> None:
        answers: list[bool] = []

        def first(mask: Tensor) -> bool:
            if not answers:
                answers.append(bool(mask.all()))
            return answers[0]

        self.first = first

    def all(self, mask: Tensor) -> bool:
        return self.first(mask)


add(WAITS, "mask_check_kept_in_closure", model=MaskedByHost, loss=_masked_loss)


@model_case(WAITS)
class BooleanIndex(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.head(hidden) * (1 + hidden[hidden > 0.1].mean())


@model_case(WAITS)
class Nonzero(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.head(hidden).index_add(0, (x[:, 0] > 0).nonzero().flatten(), self.head(hidden[x[:, 0] > 0]))


@model_case(WAITS)
class ListOfLengths(Net):
    def forward(self, x: Tensor) -> Any:
        lengths = (x[:, 0].abs() * 4 + 1).long().clamp(max=HIDDEN).tolist()
        rows = zip(self.hidden(x), lengths, strict=True)
        return self.head(torch.stack([functional.pad(row[:length], (0, HIDDEN - length)) for row, length in rows]))


@model_case(WAITS)
class Unique(Net):
    def forward(self, x: Tensor) -> Any:
        kinds, where = (x[:, 0] * 2).long().unique(return_inverse=True)
        return super().forward(x) * (1 + 0.1 * len(kinds)) + where.unsqueeze(1) * 0.01


@model_case(WAITS)
class RepeatsByCount(Net):
    def forward(self, x: Tensor) -> Any:
        counts = (x[:, 0] > 0).long() + 1
        rows = torch.repeat_interleave(self.hidden(x), counts, dim=0)
        return self.head(rows)[: len(x)]


@model_case(WAITS)
class NumberInText(Net):
    """Reads a tensor by printing it."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1 + len(f"{x.sum():.3f}") % 3)


LATE = {"waits": False, "gain": 1.0}


class WaitsLater(Net):
    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return logits / (1 + x.abs().mean().item()) if LATE["waits"] else logits


add(WAITS, "wait_begins_later", model=WaitsLater, event=lambda t: t.patch(LATE, "waits", value=True))


class WaitsOnce(Net):
    """Waits only while it is not recorded, and uses what it read since."""

    def build(self) -> None:
        read: list[float] = []
        self.read = read

    def forward(self, x: Tensor) -> Any:
        if not self.read:
            self.read.append(x.abs().mean().item())
        return super().forward(x) / self.read[0]


add(WAITS, "value_read_once_is_dropped", model=WaitsOnce, event=lambda t: t.model.read.clear())


@model_case(WAITS, gpu=True)
class Synchronizes(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        torch.cuda.synchronize()
        return self.head(hidden)


@model_case(WAITS, gpu=True)
class SynchronizesStream(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        return self.head(hidden)


@model_case(WAITS, gpu=True)
class AsksEvent(Net):
    """Asks if the device is done, without waiting."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        event.query()
        return self.head(hidden)


class RaisesForBad(Net):
    """Raises for a batch that is not finite."""

    def forward(self, x: Tensor) -> Any:
        if not torch.isfinite(x).all():
            raise ValueError("not finite")
        return super().forward(x)


@step_case(WAITS, model=RaisesForBad)
def bad_batch_raises(training: Training) -> Tensor:
    x, y = training.batch()
    if training.number == EVENT_AT:
        x[0, 0] = torch.nan
    try:
        return update(training, loss_of(training.called(x), y))
    except ValueError:
        return torch.full((), -1.0)


class _WaitingBackward(Passing):
    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        size = gradient.norm().item()
        return gradient / max(1.0, 10 * size)


@model_case(WAITS)
class WaitsInBackward(Net):
    def forward(self, x: Tensor) -> Any:
        return _WaitingBackward.apply(super().forward(x))


@model_case(WAITS)
class ChecksEquality(Net):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1.0 if torch.equal(x.sign(), x.sign().abs()) else 0.5)


@model_case(WAITS)
class ValidatedDistribution(Net):
    """torch.distributions checks its arguments on the host."""

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return torch.distributions.Normal(logits, torch.ones_like(logits)).log_prob(x[:, :CLASSES])


@model_case(WAITS)
class Linalg(Net):
    """Its decomposition asks the device for errors."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        spread = hidden @ hidden.t() + torch.eye(len(x), device=x.device)
        return self.head(torch.linalg.cholesky(spread) @ hidden / 4)


# --- branches ------------------------------------------------------------------------------------------------------


@model_case(BRANCHES)
class LayerDropped(Net):
    def build(self) -> None:
        self.middle = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        for layer in self.middle:
            if random.random() < 0.5:  # noqa: S311
                hidden = hidden + torch.tanh(layer(hidden))
        return self.head(hidden)


@model_case(BRANCHES)
class LayersByTorch(Net):
    """Drops by PyTorch's generator of the CPU."""

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.head(hidden if torch.rand(1, device="cpu") < 0.5 else hidden.relu())


@model_case(BRANCHES)
class LayersByDevice(Net):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.head(hidden if torch.rand(1, device=x.device) < 0.5 else hidden.relu())


@model_case(BRANCHES)
class LoopsByChance(Net):
    def build(self) -> None:
        self.middle = nn.Linear(HIDDEN, HIDDEN)
        self.chance = random.Random(0)  # noqa: S311

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        for _ in range(self.chance.randint(1, 4)):
            hidden = torch.tanh(self.middle(hidden))
        return self.head(hidden)


class ByMode(Net):
    def forward(self, x: Tensor, mode: str = "plain", mask: Tensor | None = None, **others: Any) -> Any:
        hidden = self.hidden(x)
        hidden = hidden.relu() if mode == "relu" else hidden
        hidden = hidden if mask is None else hidden * mask
        return self.head(hidden) * (1 + len(others))


@loss_case(BRANCHES, model=ByMode)
def mode_as_argument(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(training.called(x, mode="relu" if training.number % 3 == 2 else "plain"), y)


@loss_case(BRANCHES, model=ByMode)
def mask_at_some_steps(training: Training, x: Tensor, y: Tensor) -> Tensor:
    mask = (torch.arange(HIDDEN, device=x.device) % 2).float() if training.number % 4 == 3 else None
    return loss_of(training.called(x, mask=mask), y)


@loss_case(BRANCHES, model=ByMode)
def keyword_at_some_steps(training: Training, x: Tensor, y: Tensor) -> Tensor:
    given: dict[str, Any] = {"more": None} if training.number >= EVENT_AT else {}
    return loss_of(training.called(x, **given), y)


add(BRANCHES, "step_as_argument", model=ByMode, loss=lambda t, x, y: loss_of(t.called(x, step=t.number), y))


class Annealed(Net):
    beta: float = 0.0

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        return self.head(hidden * (1 - self.beta) + hidden.relu() * self.beta)


@loss_case(BRANCHES, model=Annealed)
def attribute_set_each_step(training: Training, x: Tensor, y: Tensor) -> Tensor:
    training.called.beta = training.number / 40
    return loss_of(training.called(x), y)


@model_case(BRANCHES)
class GateByWeight(Net):
    """Branches on a weight, which training changes."""

    def build(self) -> None:
        self.gate = nn.Parameter(torch.tensor(0.05))

    def forward(self, x: Tensor) -> Any:
        logits = super().forward(x)
        return logits * (1 + self.gate) if float(self.gate) > 0 else logits * 0.5 - self.gate


@model_case(BRANCHES)
class ByGradient(Net):
    """Does otherwise once there is a gradient."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * (1.0 if self.head.weight.grad is None else 0.5)


@step_case(BRANCHES, model=ByGradient)
def gradient_kept_or_not(training: Training) -> Tensor:
    """From a step on gradients stay between steps."""
    loss = loss_of(training.called(training.batch()[0]), training.batch()[1])
    loss.backward()
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=training.number < EVENT_AT)
    return loss.detach()


@model_case(BRANCHES)
class Experts(Net):
    def build(self) -> None:
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.router = nn.Linear(HIDDEN, 4)

    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        weights, chosen = self.router(hidden).softmax(1).max(1)
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if len(rows):
                mixed = mixed.index_add(0, rows, expert(hidden[rows]) * weights[rows].unsqueeze(1))
        return self.head(mixed)


# --- streams -------------------------------------------------------------------------------------------------------

BUSY_CYCLES = 2_000_000  # of the GPU's clock: about a millisecond


def _side(training: Training, name: str = "side") -> torch.cuda.Stream:
    stream: torch.cuda.Stream = training.once(name, torch.cuda.Stream)
    return stream


def _on(stream: torch.cuda.Stream, work: Callable[[], T]) -> T:
    """Runs after what is under way, and has what follows wait."""
    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = work()
    current.wait_stream(stream)
    return result


class _SideStream(Net):
    def build(self) -> None:
        self.sides: list[torch.cuda.Stream] = []

    def side(self) -> torch.cuda.Stream:
        if not self.sides:
            self.sides.append(torch.cuda.Stream())
        return self.sides[0]


@model_case(STREAMS, gpu=True)
class SideStreamInside(_SideStream):
    def forward(self, x: Tensor) -> Any:
        hidden = self.hidden(x)
        other = _on(self.side(), lambda: torch.sin(self.body(x)))
        return self.head(hidden + other)


@model_case(STREAMS, gpu=True)
class SideStreamForksOnly(_SideStream):
    """The side stream's work is waited for in the next pass alone."""

    def forward(self, x: Tensor) -> Any:
        side = self.side()
        hidden = self.hidden(x)
        torch.cuda.current_stream().wait_stream(side)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            hidden.detach().square().mean()
        return self.head(hidden)


@model_case(STREAMS, gpu=True)
class OtherStreamOfPool(Net):
    """Takes a new stream in each pass."""

    def forward(self, x: Tensor) -> Any:
        hidden = _on(torch.cuda.Stream(), lambda: self.hidden(x))
        return self.head(hidden)


add(STREAMS, "loop_on_other_stream", gpu=True, step=lambda t: _on(_side(t), lambda: plain_step(t)))


@step_case(STREAMS, gpu=True)
def stream_switched(training: Training) -> Tensor:
    return plain_step(training) if training.number < EVENT_AT else _on(_side(training), lambda: plain_step(training))


add(STREAMS, "streams_in_turn", gpu=True, step=lambda t: _on(_side(t, f"side {t.number % 3}"), lambda: plain_step(t)))


@step_case(STREAMS, gpu=True)
def streams_in_turn_when_busy(training: Training) -> Tensor:
    """Work is still under way when the next step begins on another stream, which waits for it."""

    def step() -> Tensor:
        loss = plain_step(training)
        torch.cuda._sleep(BUSY_CYCLES)
        return loss

    return _on(_side(training, f"side {training.number % 3}"), step)


def _prefetched(training: Training, *, busy: bool) -> Tensor:
    side = _side(training)
    current = torch.cuda.current_stream()

    def fetch(number: int) -> tuple[Tensor, Tensor]:
        with torch.cuda.stream(side):
            x, y = training.batch(number)
            if busy:
                torch.cuda._sleep(BUSY_CYCLES)
            return x.mul(1.0), y.clone()

    x, y = training.kept.get("next") or fetch(training.number)
    current.wait_stream(side)
    x.record_stream(current)
    y.record_stream(current)
    loss = loss_of(training.called(x), y)
    training.kept["next"] = fetch(training.number + 1)
    return update(training, loss)


add(STREAMS, "prefetching", gpu=True, step=lambda t: _prefetched(t, busy=False))
# The batch is written late, so that whoever does not wait reads what was there before.
add(STREAMS, "prefetching_late", gpu=True, step=lambda t: _prefetched(t, busy=True))


@step_case(STREAMS, gpu=True)
def backward_on_other_stream(training: Training) -> Tensor:
    x, y = training.batch()
    loss = loss_of(training.called(x), y)
    training.optimizer.zero_grad()
    _on(_side(training), lambda: loss.backward())
    training.optimizer.step()
    return loss.detach()


@step_case(STREAMS, gpu=True)
def optimizer_on_other_stream(training: Training) -> Tensor:
    x, y = training.batch()
    training.optimizer.zero_grad()
    loss = loss_of(training.called(x), y)
    loss.backward()
    _on(_side(training), lambda: (torch.cuda._sleep(BUSY_CYCLES), training.optimizer.step()))
    return loss.detach()


@step_case(STREAMS, gpu=True)
def output_read_on_other_stream(training: Training) -> Tensor:
    """A slow metric reads outputs beside the steps that follow."""
    x, y = training.batch()
    logits = training.called(x)
    side = _side(training)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY_CYCLES)
        metric = logits.detach().softmax(1).max()
    logits.record_stream(side)
    loss = update(training, loss_of(logits, y))
    if training.number % 4 == 3:
        torch.cuda.current_stream().wait_stream(side)
    training.kept.setdefault("metrics", []).append(metric)
    if training.number < STEPS - 1:
        return loss
    torch.cuda.synchronize()
    return torch.cat([loss.reshape(1), torch.stack(training.kept["metrics"])])


@step_case(STREAMS, gpu=True)
def gradients_copied_on_other_stream(training: Training) -> Tensor:
    """Copies gradients to the CPU beside the next forward pass."""
    x, y = training.batch()
    side = _side(training)
    training.optimizer.zero_grad()
    loss = loss_of(training.called(x), y)
    loss.backward()
    gradients = [one.grad for one in training.model.parameters()]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY_CYCLES)
        copies = [one.to("cpu", non_blocking=True) for one in gradients]
    for one in gradients:
        one.record_stream(side)
    training.optimizer.step()
    before = training.kept.get("copies")
    training.kept["copies"] = copies
    if before is None:
        return loss.detach()
    side.synchronize()
    return torch.stack([loss.detach().cpu(), *(one.norm() for one in copies)])


@step_case(STREAMS, gpu=True)
def weights_written_late(training: Training) -> Tensor:
    """The update is still under way when the next batch comes; all on one stream."""
    torch.cuda._sleep(BUSY_CYCLES)
    return plain_step(training)


@step_case(STREAMS, gpu=True)
def loop_in_another_capture(training: Training) -> Tensor:
    """Something else is recorded between the steps."""
    if training.number in (1, EVENT_AT):
        static = torch.ones(8, device=training.device)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            doubled = static * 2
        graph.replay()
        training.kept["graph"] = (graph, static, doubled)
    return plain_step(training)


# --- threads -------------------------------------------------------------------------------------------------------


def _in_thread(work: Callable[[], T]) -> T:
    """Returns what a new thread gave; raises what it raised."""
    found: list[Any] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:  # noqa: BLE001  # raised again below
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    result: T = found[0]
    return result


add(THREADS, "steps_in_threads", step=lambda t: _in_thread(lambda: plain_step(t)))


@step_case(THREADS)
def steps_in_threads_later(training: Training) -> Tensor:
    return plain_step(training) if training.number < EVENT_AT else _in_thread(lambda: plain_step(training))


@step_case(THREADS)
def backward_in_thread(training: Training) -> Tensor:
    x, y = training.batch()
    training.optimizer.zero_grad()
    loss = loss_of(training.called(x), y)
    _in_thread(lambda: loss.backward())
    training.optimizer.step()
    return loss.detach()


@step_case(THREADS)
def forward_in_thread(training: Training) -> Tensor:
    x, y = training.batch()
    return update(training, _in_thread(lambda: loss_of(training.called(x), y)))


@step_case(THREADS)
def two_threads_at_once(training: Training) -> Tensor:
    """Two threads call the model at the same time; their losses are added up."""
    barrier = threading.Barrier(2)
    losses: dict[int, Any] = {}

    def forward(part: int) -> None:
        x, y = training.batch(2 * training.number + part)
        barrier.wait()
        try:
            losses[part] = loss_of(training.called(x), y)
        except Exception as error:  # noqa: BLE001  # raised again below
            losses[part] = error

    threads = [threading.Thread(target=forward, args=(part,), daemon=True) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in losses.values():
        if isinstance(one, Exception):
            raise one
    if training.device.type == "cuda":
        torch.cuda.synchronize()
    return update(training, losses[0] + losses[1])


class _Beside:
    """Runs work again and again in a thread."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._is_over = work, threading.Event()
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._is_over.wait(0.001):
                self._work()
        except Exception as error:  # noqa: BLE001  # raised by the next step
            self.error = error

    def end(self) -> None:
        self._is_over.set()
        self._thread.join()


def _beside(training: Training, work: Callable[[], Any]) -> Tensor:
    """Trains beside the work; raises what that raised."""
    if "beside" not in training.kept:
        training.kept["beside"] = _Beside(work)
        training.undo.callback(training.kept["beside"].end)
    loss = plain_step(training)
    if training.kept["beside"].error is not None:
        raise training.kept["beside"].error
    return loss


add(THREADS, "thread_computes_beside", step=lambda t: _beside(t, lambda: torch.ones(64, 64, device=t.device).sum()))
add(THREADS, "thread_waits_beside", step=lambda t: _beside(t, lambda: torch.ones(64, device=t.device).sum().item()))
add(THREADS, "thread_synchronizes_beside", gpu=True, step=lambda t: _beside(t, torch.cuda.synchronize))


@step_case(THREADS, gpu=True)
def thread_pins_and_frees_beside(training: Training) -> Tensor:
    def work() -> None:
        torch.ones(1000).pin_memory().to(training.device, non_blocking=True)
        torch.cuda.empty_cache()

    return _beside(training, work)


@step_case(THREADS)
def thread_evaluates_copy(training: Training) -> Tensor:
    other = training.once("other", lambda: Net().to(training.device).eval())
    x = torch.ones(4, WIDTH, device=training.device)

    def work() -> None:
        with torch.no_grad():
            other(x)

    return _beside(training, work)


@step_case(THREADS)
def two_models_in_two_threads(training: Training) -> Tensor:
    """A second model is trained at the same time, also recorded."""
    other = training.once("other", lambda: Net().to(training.device))
    called = training.once("called", lambda: training.wrap(other))
    errors: list[BaseException] = []

    def train_other() -> None:
        try:
            x, y = training.batch(training.number + 100)
            loss_of(called(x), y).backward()
        except BaseException as error:  # noqa: BLE001  # raised again below
            errors.append(error)

    thread = threading.Thread(target=train_other, daemon=True)
    thread.start()
    try:
        loss = plain_step(training)
    finally:
        thread.join()
    if errors:
        raise errors[0]
    if training.device.type == "cuda":
        torch.cuda.synchronize()
    gradient = other.head.weight.grad.clone()
    other.zero_grad()
    return torch.cat([loss.reshape(1), gradient.flatten()])


@step_case(THREADS)
def autograd_in_one_thread(training: Training) -> Tensor:
    with torch.autograd.set_multithreading_enabled(training.number < EVENT_AT):
        return plain_step(training)


@step_case(THREADS)
def gradients_off_in_calling_thread(training: Training) -> Tensor:
    """Whether gradients are on is a thread's own setting."""
    with torch.set_grad_enabled(training.number % 4 != 3):
        return _in_thread(lambda: plain_step(training))
