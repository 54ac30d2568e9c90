"""What a case is: a model, a step of its training, and perhaps an event that changes something from outside.

A module of cases registers them with one of four decorators. The name of a case is that of what is decorated:

    @model_case("waits")                    a model class that is built without arguments
    @loss_case("outputs", model=Net)        (training, x, y) -> the loss, of which a step is made
    @step_case("loops", model=Net)          (training) -> what is compared: the loss, or more in one tensor
    @event_case("weights", model=Net)       (training) -> None, called before the steps `at`
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

STEPS, EVENT_AT = 40, 12
ROWS, WIDTH, HIDDEN, CLASSES = 8, 16, 32, 4
VOCABULARY, LENGTH = 32, 12

_UNSET = object()


class Training:
    """One training of a case, plain or graphed, as its functions see it."""

    def __init__(self, model: nn.Module, wrap: Callable[[nn.Module], nn.Module], device: torch.device) -> None:
        self.model: Any = model
        self.called: Any = wrap(model)
        self.wrap, self.device = wrap, device
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(trainable(model), lr=0.05, momentum=0.9)
        self.number = 0
        self.kept: dict[str, Any] = {}
        self.undo = ExitStack()
        self._batches: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._tokens: dict[tuple[int, ...], Tensor] = {}
        for number in range(STEPS + 1):
            self.batch(number)
            self.tokens(number)

    def batch(self, number: int | None = None, rows: int = ROWS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
        """Returns (inputs, classes) of this step or of another number, in new memory.

        Batches like those of the steps lie on the device before: a step does not have the host wait.
        """
        number = self.number if number is None else number
        if (number, rows, width) not in self._batches:
            generator = torch.Generator("cpu").manual_seed(1000 + number)
            x = torch.randn(rows, width, generator=generator, dtype=torch.float32, device="cpu")
            y = torch.randint(CLASSES, (rows,), generator=generator, device="cpu")
            self._batches[number, rows, width] = (x.to(self.device), y.to(self.device))
        x, y = self._batches[number, rows, width]
        return x.clone(), y.clone()

    def tokens(self, number: int | None = None, rows: int = ROWS, length: int = LENGTH) -> Tensor:
        """Returns tokens of shape (rows, length), like `batch`."""
        number = self.number if number is None else number
        if (number, rows, length) not in self._tokens:
            generator = torch.Generator("cpu").manual_seed(2000 + number)
            made = torch.randint(1, VOCABULARY, (rows, length), generator=generator, device="cpu")
            self._tokens[number, rows, length] = made.to(self.device)
        return self._tokens[number, rows, length].clone()

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute, or the item of a dictionary, until the training is over."""
        if isinstance(owner, dict):
            self.undo.callback(owner.__setitem__, name, owner[name])
            owner[name] = value
            return
        before = vars(owner).get(name, _UNSET)
        undo = (delattr, owner, name) if before is _UNSET else (setattr, owner, name, before)
        self.undo.callback(*undo)
        setattr(owner, name, value)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns what `make` gave when it was first asked for under this name."""
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def restart_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(trainable(self.model), lr=0.05, momentum=0.9)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


Loss = Callable[[Training, Tensor, Tensor], Tensor]
Step = Callable[[Training], Tensor]
Event = Callable[[Training], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`tolerance` is for differences relative to the change of the weights; `gpu` says that it needs CUDA."""

    name: str
    group: str
    model: Callable[[], nn.Module]
    step: Step
    event: Event | None = None
    at: tuple[int, ...] = (EVENT_AT,)
    tolerance: float = 1e-3
    gpu: bool = False
    package: str = ""
    moved: bool = True
    steps: int = STEPS


CASES: dict[str, Case] = {}


# --- what most cases use -------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Two linear layers, without any trouble."""

    def __init__(self, build: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.build() if build is None else build(self)

    def build(self) -> None:
        """Adds to the layers what a case is about."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def forward(self, x: Tensor) -> Any:
        return self.head(self.hidden(x))


class GainNet(Net):
    """Multiplies what it returns by a number that its host decides on."""

    def gain(self) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.gain()


class Passing(torch.autograd.Function):
    """Gives its input on, for a backward pass that does something."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.view_as(x)


def loss_of(outputs: Any, y: Tensor) -> Tensor:
    """Returns the cross-entropy of the first tensor with a gradient in `outputs`; the tensor itself if it is a loss."""
    first = next(one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad)
    return first.float() if first.dim() == 0 else functional.cross_entropy(first.float(), y)


def plain_loss(training: Training, x: Tensor, y: Tensor) -> Tensor:
    return loss_of(training.called(x), y)


def step_of(loss: Loss) -> Step:
    def step(training: Training) -> Tensor:
        return update(training, loss(training, *training.batch()))

    return step


def update(training: Training, loss: Tensor) -> Tensor:
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()
    return loss.detach()


plain_step = step_of(plain_loss)


# --- registering ---------------------------------------------------------------------------------------------------


class _Named(Protocol):
    __name__: str


N = TypeVar("N", bound=_Named)


def model_case(group: str, **options: Any) -> Callable[[N], N]:
    return _registering(group, "model", options)


def loss_case(group: str, **options: Any) -> Callable[[N], N]:
    return _registering(group, "loss", options)


def step_case(group: str, **options: Any) -> Callable[[N], N]:
    return _registering(group, "step", options)


def event_case(group: str, **options: Any) -> Callable[[N], N]:
    return _registering(group, "event", options)


def _registering(group: str, what: str, options: dict[str, Any]) -> Callable[[N], N]:
    def register(decorated: N) -> N:
        add(group, decorated.__name__, **{what: decorated, **options})
        return decorated

    return register


def add(group: str, name: str, *, loss: Loss = plain_loss, step: Step | None = None, **options: Any) -> None:
    """Registers a case under a name like `lost_weights`, also if it is given as `LostWeights`.

    `build` adds to a `Net` what the case is about, in one line.
    """
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    if name in CASES:
        raise ValueError(f"there are two cases of the name {name}")
    at = options.pop("at", EVENT_AT)
    at = (at,) if isinstance(at, int) else tuple(at)
    options.setdefault("model", partial(Net, options.pop("build", None)))
    CASES[name] = Case(name=name, group=group, step=step or step_of(loss), at=at, **options)


@dataclass
class Counter:
    """Counts its calls."""

    calls: int = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


def numbers(*values: float) -> Iterator[float]:
    """Yields the values again and again."""
    while True:
        yield from values


def fading(calls: int) -> float:
    """Returns a factor that goes down, as the weight of an auxiliary loss."""
    return 1 / (1 + 0.1 * calls)


@dataclass
class Settings:
    """Stands for a configuration object."""

    gain: float = 1.0
    inner: dict[str, float] = field(default_factory=lambda: {"gain": 1.0})
