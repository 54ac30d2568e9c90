"""The training of a script, as its first iterations show it: modules, optimizers, loaders, passes."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from amptune.changes.tensor_tree import map_tensors, tensors_in
from amptune.errors import TargetError
from amptune.runtime.script.hooks import inner_of
from amptune.runtime.script.in_place import CalledModules

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "AGREEING",
    "WRITE_WORKLOAD",
    "Iteration",
    "ScriptTraining",
    "copy_of_batch",
    "require_comparable",
    "samples_in",
    "several_models",
    "take_turns",
]

# So many iterations in a row, each of the same passes and updates, show what a script trains.
AGREEING = 2
WRITE_WORKLOAD = "write its step as an amptune.Workload (`amptune init` writes a starter) and tune that"


def several_models(models: Sequence[nn.Module]) -> TargetError:
    """Returns the error for a script that trains several models in turn."""
    names = ", ".join(dict.fromkeys(type(one).__name__ for one in models))
    return TargetError(f"it trains several models in turn ({names}), with an optimizer each: {WRITE_WORKLOAD}")


def copy_of_batch(batch: Any, *, tensors: bool = False) -> Any:
    """Returns a batch in containers of its own, as a script may `pop` from them, or with `tensors` of its own too."""
    plain = torch.Tensor, str, bytes, int, float
    found = tree_map(lambda leaf: leaf if leaf is None or isinstance(leaf, plain) else copy.copy(leaf), batch)
    return map_tensors(torch.clone, found) if tensors else found


def samples_in(batch: Any) -> int:
    """Returns the first axis of a batch's first tensor; how many samples there are if they lie side by side in lists.

    0 for a batch without either.
    """
    if isinstance(batch, list | tuple) and batch and all(isinstance(one, list | tuple) for one in batch):
        lengths = {len(one) for one in batch}
        if len(lengths) == 1:
            return lengths.pop()
    return next((len(one) for one in tensors_in(batch) if one.dim()), 0)


class Iteration:
    """One iteration of a script's loop: `batches` by the number of their loader, and what it did with them.

    `rows` is the first axis of what modules were called with, in all. It is no container to those who move batches to
    a device, which the script does by itself.
    """

    def __init__(self, batches: Sequence[tuple[int, Any]] = ()) -> None:
        self.batches = [*batches]
        self.modules: Counter[nn.Module] = Counter()
        self.optimizers: list[torch.optim.Optimizer] = []
        self.backwards = self.rows = 0
        self._versions: list[tuple[torch.Tensor, int]] = []

    def keep(self, loader: int, batch: Any) -> None:
        """Keeps a batch that the script has drawn, and may take apart."""
        self.batches.append((loader, copy_of_batch(batch)))
        self._versions += [(one, one._version) for one in tensors_in(batch)]

    @property
    def was_written_to(self) -> bool:
        """True if the script has changed tensors of its batches in place."""
        return any(one._version != version for one, version in self._versions)

    def is_like(self, other: Iteration) -> bool:
        """Returns True if both did the same, whatever the number of passes."""
        mine, theirs = ([{*one.modules}, {*one.optimizers}, one.backwards] for one in (self, other))
        return mine == theirs

    @property
    def passes(self) -> int:
        """The calls of all modules."""
        return self.modules.total()

    @property
    def samples(self) -> int:
        """The number of samples: those of each batch, or the first axis of what modules were called with."""
        return sum(samples_in(batch) for _, batch in self.batches) or self.rows


def take_turns(past: Sequence[Iteration]) -> bool:
    """Returns True if steps of two optimizers take turns."""
    if len(past) < 2 * AGREEING or past[0].optimizers == past[1].optimizers:
        return False
    return all(one.is_like(next_but_one) for one, next_but_one in zip(past, past[2:], strict=False))


def require_comparable(past: Sequence[Iteration]) -> None:
    """Raises `TargetError` if steps have numbers of passes so different, as episodes, that their times say nothing."""
    counts = [one.passes for one in past]
    if max(counts, default=0) > 2 * min(counts, default=0):
        few, many = min(counts), max(counts)
        raise TargetError(f"its steps have {few} to {many} passes, and cannot be compared: {WRITE_WORKLOAD}")


@dataclass(frozen=True, eq=False)
class ScriptTraining:
    """A script's training: the modules that it calls, its optimizers, and how an iteration goes."""

    called: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    iteration: Iteration
    loaders: Sequence[Any]

    @classmethod
    def of(cls, iteration: Iteration, loaders: Sequence[Any]) -> ScriptTraining:
        """Returns what an iteration trained. Raises `TargetError` for what has no single model."""
        optimizers = [*dict.fromkeys(iteration.optimizers)]
        trained = [{id(one) for group in each.param_groups for one in group["params"]} for each in optimizers]
        everything = set().union(*trained)
        called = [one for one in iteration.modules if any(id(weight) in everything for weight in one.parameters())]
        called = [inner_of(one) for one in called]
        if not called:
            raise TargetError(
                "its optimizer updates weights that no module holds which is called in training: " + WRITE_WORKLOAD
            )
        apart = [{id(weight) for module in called for weight in module.parameters()} & own for own in trained]
        of_one = [[one for one in called if any(id(w) in own for w in one.parameters())] for own in trained]
        if len(optimizers) > 1 and not any(set(one) & set(other) for one in of_one[:1] for other in of_one[1:]):
            raise several_models(called)
        if not all(apart):
            raise TargetError(f"an optimizer updates nothing of what is called in training: {WRITE_WORKLOAD}")
        return cls(called=called, optimizers=optimizers, iteration=iteration, loaders=loaders)

    @property
    def model(self) -> nn.Module:
        """The module that is called, or its parts as one."""
        return self.called[0] if len(self.called) == 1 else CalledModules(self.called)

    def __str__(self) -> str:
        """Says it in one line, for people."""
        weights = sum(one.numel() for one in dict.fromkeys(w for module in self.called for w in module.parameters()))
        names = " and ".join(dict.fromkeys(type(one).__name__ for one in self.called))
        by = " and ".join(dict.fromkeys(type(one).__name__ for one in self.optimizers))
        passes = max(self.iteration.modules.values())
        words = [f"{names}, {weights / 1e6:.3g} M parameters, {by}, {passes} pass{'es' if passes > 1 else ''} a step"]
        if len(self.iteration.batches) > 1:
            words.append(f"{len(self.iteration.batches)} batches a step")
        samples, what = self.iteration.samples, "sample" if self.loaders else "row"
        return ", ".join([*words, *([f"{samples} {what}{'s' if samples > 1 else ''}"] if samples else [])])
