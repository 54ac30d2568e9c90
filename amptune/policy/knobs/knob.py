"""A knob: one setting of a policy, and all that files, training, the search and reports have to know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from amptune.policy.findings import Finding

__all__ = ["LARGEST", "TRUTH", "Knob", "Model", "Settings", "Undo", "in_file", "is_in"]

# A policy, whose class stands below the knobs that it is made of; and an nn.Module: files are read without torch.
Settings = Any
Model = Any
Undo = Callable[[], None]
TRUTH = (False, True)
# What int32 holds, and so whatever takes a count.
LARGEST = 2**31 - 1


def in_file(values: Iterable[str | bool]) -> str:
    """Returns the values as a file has them, in one line."""
    return ", ".join(str(value).lower() if isinstance(value, bool) else value for value in values)


def is_in(value: Any, values: Iterable[Any]) -> bool:
    """Returns True if `values` has the value; 0 and False are kept apart."""
    return any(type(value) is type(other) and value == other for other in values)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Knob:
    """One setting of a policy. Where a knob says nothing it is taken for one that changes everything.

    What it may be: stock PyTorch's value; its `values`, that one first, if they are few; else `is_count` for a whole
    number above 0. A `conflict` says why a policy cannot have its value, other than stock's, beside its other settings.
    `is_always_written` if people look for it in every file.

    What it changes besides speed. `numerics`: "rounding" if values are rounded otherwise, "order" if only sums are
    taken in another order, which is FP32 still. `memory` if it takes another amount of that. `in_numerics` and
    `in_memory` return the value as far as numerics or memory differ by it. `graph`: torch.compile makes another graph.
    `process`: what it does lasts for the life of a process; `is_global` if it is set for all models of a process.
    `precision`: "whole" if it decides the precision of all modules, "part" if it needs one below FP32.

    What a search does with it. It `matters` for a value and a workload (a `Subject`), or that value is not tried. It
    `is_own_choice` if a policy is the simpler without it, and what it buys is measured by itself. A space may leave
    out what `is_optional`, and a user may still pin it.

    What training does: it is applied to a model and returns how that is undone, bit for bit; None if the loop asks for
    it (`Tuned`). `idle` yields a finding if it changes nothing for a model.

    What is said of it: `words` for a value, and a sentence for each value or, if `told` is given, what that yields;
    `risks` are sentences on what may go wrong with a value, and what to watch.
    """

    name: str
    stock: Any
    values: tuple[str | bool, ...] = ()
    is_count: bool = False
    conflict: Callable[[Settings], str | Literal[False]] = lambda _: False
    is_always_written: bool = False

    numerics: Literal["none", "order", "rounding"] = "rounding"
    in_numerics: Callable[[Settings], Any] | None = None
    memory: bool = True
    in_memory: Callable[[Settings], Any] | None = None
    graph: bool = True
    process: bool = False
    is_global: bool = False
    precision: Literal["none", "part", "whole"] = "none"

    matters: Callable[[Any, Any], bool] = lambda _, __: True
    is_own_choice: bool = True
    is_optional: bool = False

    apply: Callable[[Any, Model], Undo] = lambda _, __: lambda: None
    idle: Callable[[Settings, Model], Iterable[Finding]] = lambda _, __: ()

    words: str | Mapping[Any, str] | None = None
    sentences: Mapping[Any, str] = field(default_factory=dict)
    told: Callable[[Settings], Iterable[str]] | None = None
    risks: Mapping[Any, str] = field(default_factory=dict)

    def of(self, policy: Settings) -> Any:
        """Returns a policy's value of this knob."""
        return getattr(policy, self.name)

    def departs(self, policy: Settings) -> bool:
        """Returns whether a policy's value is not stock PyTorch's."""
        return bool(self.of(policy) != self.stock)

    def problem(self, value: Any) -> str | Literal[False]:
        """Returns why no policy can have this value; False if one can. Types are the reader's affair, but for words."""
        if any(isinstance(one, str) for one in self.values) and not is_in(value, self.values):
            return f"{self.name}: {value!r} is not one of {in_file(self.values)}"
        return False

    def in_words(self, value: Any) -> str:
        """Returns a value as a policy's line of text has it; rules are named one by one."""
        shown = " + ".join(map(str, value)) if isinstance(value, tuple) else value
        plain = self.name.replace("_", " ")
        words = self.words.get(value) if isinstance(self.words, Mapping) else self.words
        return (words or (plain if value is True else f"{plain} {{}}")).format(shown)

    def explained(self, policy: Settings) -> Iterable[str]:
        """Returns the sentences on what a policy's value does; none for a setting without meaning beside the others."""
        if self.told is not None:
            return self.told(policy)
        said = None if self.conflict(policy) else self.sentences.get(self.of(policy))
        return () if said is None else (said,)
