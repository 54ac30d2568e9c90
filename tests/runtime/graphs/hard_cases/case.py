"""A hard case: a small model around one hazard, a step of its training, and the outcome that recordings should have.

`Cases` is the table of one kind of hazard. `build` adds to a `Net` what the hazard needs, `forward` is its forward
pass. A loss is (training, x, y) -> the loss of a usual step, a step is (training) -> the tensor that is compared: the
loss, or more. An event is called before the steps `at`. A hazard that begins `LATER` is preceded by plain steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import setitem
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

# A change from outside comes between the comparisons at calls 4 and 8 of a recording.
STEPS, EVENT_AT = 16, 7
ROWS, WIDTH, HIDDEN, CLASSES = 8, 16, 32, 4
VOCABULARY, LENGTH = 32, 12
ALWAYS, LATER, SOMETIMES = "", "later", "at some steps"

_UNSET = object()


class Why:
    """A part of the finding on a case; DIFFERS is an end by comparison."""

    DIFFERS = "differ from the model"
    SILENT = "nothing was recorded, and no finding says why"
    AGAIN = "meets a changed model again and again"
    EFFECT = "in each forward pass"
    DRAWS = "draws random numbers on the host"
    ITERATOR = "an iterator, which cannot be put back"
    ELSEWHERE = "uses a tensor that is none of its inputs, weights and buffers"
    UNKNOWN = "whose contents are not known"
    WRITES = "writes to its weights or inputs"
    GIVEN = "changes the lists or dictionaries that it is given"
    SHARES = "shares memory with another output, an input, a weight or a buffer"
    UNUSED = "gives outputs that the loss does not always use"
    SEVERAL = "has several backward passes"
    ANEW = "goes through a backward pass again"
    HOOK = "has a hook on"
    UPSTREAM = "returns what another output is made from, with a hook on it"
    WAITS = "waits for the device"
    ON_HOST = "that is on the CPU"
    FROM_HOST, TO_HOST = "brings tensors from the host to the device", "brings tensors from the device to the host"
    RAISES = "raises"


class Training:
    """One training of a case, plain or graphed, as its functions see it."""

    def __init__(self, model: nn.Module, wrap: Callable[[nn.Module], nn.Module], device: torch.device) -> None:
        self.model: Any = model
        self.called: Any = wrap(model)
        self.wrap, self.device = wrap, device
        self.is_cuda = device.type == "cuda"
        self.optimizer: torch.optim.Optimizer
        self.restart_optimizer()
        self.number = 0
        self.kept: dict[str, Any] = {}
        self.undo = ExitStack()
        self._batches: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        for number in range(STEPS + 1):
            self.batch(number)

    def batch(self, number: int | None = None, rows: int = ROWS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
        """Returns (inputs, classes) of this step or of another number, in new memory.

        Batches like those of the steps lie on the device before: a step does not have the host wait.
        """
        number = self.number if number is None else number

        key = (number, rows, width)
        if key not in self._batches:
            generator = torch.Generator("cpu").manual_seed(1000 + number)
            x = torch.randn(rows, width, generator=generator, dtype=torch.float32, device="cpu")
            y = torch.randint(CLASSES, (rows,), generator=generator, device="cpu")
            self._batches[key] = x.to(self.device), y.to(self.device)
        x, y = self._batches[key]
        return x.clone(), y.clone()

    def tokens(self, number: int | None = None, length: int = LENGTH) -> Tensor:
        """Returns tokens of shape (rows, length), like the inputs of `batch`."""
        x, _ = self.batch(number, width=max(length, WIDTH))
        return ((x.abs() * 1000).long() % (VOCABULARY - 1) + 1)[:, :length]

    def loss(self) -> Tensor:
        x, y = self.batch()
        return loss_of(self.called(x), y)

    def plain(self) -> Tensor:
        return self.update(self.loss())

    def update(self, loss: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def evaluated(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the model gives in evaluation, and has it train on."""
        self.called.eval()
        with torch.no_grad():
            outputs = self.called(*args, **kwargs)
        self.called.train()
        return outputs

    def patch(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute, or the item of a dictionary, until the training is over."""
        is_item = isinstance(owner, dict)
        self.undo.callback(
            *((setitem, owner, name, owner[name]) if is_item else (setattr, owner, name, getattr(owner, name)))
        )
        (setitem if is_item else setattr)(owner, name, value)

    def once(self, name: str, make: Callable[[], Any]) -> Any:
        """Returns what `make` gave when it was first asked for under this name."""
        return self.kept[name] if name in self.kept else self.kept.setdefault(name, make())

    def restart_optimizer(self) -> None:
        self.optimizer = torch.optim.SGD(trainable(self.model), lr=0.05, momentum=0.9)

    @property
    def is_late(self) -> bool:
        return self.number >= EVENT_AT


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [one for one in model.parameters() if one.requires_grad]


def loss_of(outputs: Any, y: Tensor) -> Tensor:
    """Returns the cross-entropy of the first tensor with a gradient in `outputs`; the tensor itself if it is a loss."""
    first = next(one for one in tree_leaves(outputs) if isinstance(one, Tensor) and one.requires_grad)
    return first.float() if first.dim() == 0 else functional.cross_entropy(first.float(), y)


def fading(calls: float) -> float:
    """Returns a factor that goes down."""
    return 1 / (1 + 0.1 * calls)


Step = Callable[[Training], Tensor]
Loss = Callable[[Training, Tensor, Tensor], Tensor]
Event = Callable[[Training], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """`why` is a part of what is said in the end, "" if all is recorded; on the tests' recorder it may be `on_cpu`.

    `ends` says that it differs until that is said. `gpu` says that the case needs CUDA, `on_cpu` is None if the tests'
    recorder cannot show the hazard. `tolerance` is for differences relative to the change of the weights.
    """

    name: str
    kind: str
    model: Callable[[], nn.Module]
    step: Step = Training.plain
    event: Event | None = None
    at: tuple[int, ...] = (EVENT_AT,)
    tolerance: float = 1e-3
    gpu: bool = False
    package: str = ""
    steps: int = STEPS
    why: str = ""
    ends: bool = False
    on_cpu: str | None = ""


CASES: dict[str, Case] = {}


class Net(nn.Module):
    """Two linear layers, without any trouble."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.build()

    def build(self) -> None:
        """Adds to the layers what a case is about."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(self.body(x))

    def logits(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))

    def forward(self, x: Tensor) -> Any:
        return self.logits(x)


class Cases:
    """The table of one kind of hazard; a row is added by a call, or by one of two decorators.

    `options` are those of all rows, whose names begin with `prefix`.
    """

    def __init__(self, kind: str, prefix: str = "", **options: Any) -> None:
        self._kind, self._prefix, self._options = kind, prefix, options

    def __call__(self, name: str, **options: Any) -> None:
        """Adds a case, or one for each of the times in `when`, with a `why` for each."""
        options = {**self._options, **options}
        methods = {key: options.pop(key, None) for key in ("build", "forward")}
        own = {key: method for key, method in methods.items() if method is not None}
        base = options.setdefault("model", Net)
        if own:
            options["model"] = type("".join(part.capitalize() for part in name.split("_")), (base,), own)
        loss = options.pop("loss", None)
        step = options.pop("step", Training.plain if loss is None else _step_of(loss))
        times = _tuple(options.pop("when", ALWAYS))
        whys = [*_tuple(options.pop("why", ""))]
        on_cpu = options.pop("on_cpu", _UNSET)
        plain = options.pop("plain", Training.plain)
        options["at"] = _tuple(options.pop("at", EVENT_AT))
        for time, why in zip(times, whys if len(whys) > 1 else whys * len(times), strict=True):
            options["on_cpu"] = why if on_cpu is _UNSET else on_cpu
            full = "_".join([self._prefix + name, *time.split()])
            if full in CASES:
                raise ValueError(f"there are two cases of the name {full}")
            own = {"ends": why == Why.DIFFERS, **options}
            CASES[full] = Case(name=full, kind=self._kind, step=_at(step, time, plain), why=why, **own)

    def holding(
        self, name: str, hold: Any, read: Callable[[Any, Tensor], Any], change: Any = None, **more: Any
    ) -> None:
        """Adds a model that multiplies its hidden state by what `read` makes of that and of what the model holds.

        `hold` makes that when the model is made, and `change` changes it from outside.
        """

        def forward(own: Any, x: Tensor) -> Any:
            hidden = own.hidden(x)
            return own.head(hidden * read(own.held, hidden))

        event = change and (lambda t: change(t.model.held))
        self(name, **{"build": lambda own: setattr(own, "held", hold()), "forward": forward, "event": event, **more})

    def step(self, **options: Any) -> Callable[[Step], Step]:
        return self._registering("step", options)

    def loss(self, **options: Any) -> Callable[[Loss], Loss]:
        return self._registering("loss", options)

    def _registering(self, what: str, options: dict[str, Any]) -> Callable[[Any], Any]:
        def register(decorated: Any) -> Any:
            self(decorated.__name__, **{what: decorated, **options})
            return decorated

        return register


def _tuple(value: Any) -> Sequence[Any]:
    return (value,) if isinstance(value, (str, int)) else tuple(value)


def _step_of(loss: Loss) -> Step:
    return lambda t: t.update(loss(t, *t.batch()))


def _at(step: Step, time: str, plain: Step) -> Step:
    """Returns the step at its time, and plain ones else."""
    if time == ALWAYS:
        return step
    return lambda t: (step if (t.is_late if time == LATER else t.number % 3 == 2) else plain)(t)
