"""The modules that a search calls by a word, as a policy names them: blocks computed again, Linears in FP8. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from amptune.measure.results.subject import Subject
from amptune.policy.settings import Float8Rule
from amptune.search.space.knobs import CHECKPOINTS, FLOAT8, Value
from amptune.search.space.module_rules import general_rules

__all__ = ["IN_WORDS", "checkpoints_of"]


def checkpoints_of(subject: Subject) -> Mapping[Value, tuple[str, ...]]:
    """Returns the patterns of each choice of the knob `checkpoint`; {} if the model has no repeated blocks."""
    if not subject.blocks:
        return {}
    chosen: dict[Value, tuple[str, ...]] = {"none": (), "alternate": subject.blocks[::2], "all": subject.blocks}
    return {choice: _patterns(blocks, subject) for choice, blocks in chosen.items()}


def _float8_of(subject: Subject) -> Mapping[Value, tuple[Float8Rule, ...]]:
    """Returns the rules of each choice of the knob `float8_modules`: they name Linears, whatever is beside these."""
    linears = [replace(one, runs=one.runs and "Linear" in one.types) for one in subject.modules]
    rules = general_rules(subject.wide_linears, linears, root_types=subject.root_types)
    return {"none": (), "wide": tuple(Float8Rule(path=rule.path, type=rule.type) for rule in rules)}


def _patterns(blocks: Collection[str], subject: Subject) -> tuple[str, ...]:
    every_type = {name for module in subject.modules for name in module.types}  # a pattern is a path
    rules = general_rules(blocks, subject.modules, root_types=every_type)
    return tuple(rule.path for rule in rules if rule.path is not None)


# The settings that name modules by words in a search, and the value of each word.
IN_WORDS: Mapping[str, Callable[[Subject], Mapping[Value, tuple[Any, ...]]]] = {
    CHECKPOINTS: checkpoints_of,
    FLOAT8: _float8_of,
}
