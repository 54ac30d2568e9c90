"""The choices of which repeated blocks compute their activations again, as the patterns that a policy has. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from amptune.measure.results.subject import Subject
from amptune.search.space.knobs import Value
from amptune.search.space.module_rules import general_rules

__all__ = ["checkpoints_of"]


def checkpoints_of(subject: Subject) -> Mapping[Value, tuple[str, ...]]:
    """Returns the patterns of each choice of the knob `checkpoint`; {} if the model has no repeated blocks."""
    if not subject.blocks:
        return {}
    chosen: dict[Value, tuple[str, ...]] = {"none": (), "alternate": subject.blocks[::2], "all": subject.blocks}
    return {choice: _patterns(blocks, subject) for choice, blocks in chosen.items()}


def _patterns(blocks: Collection[str], subject: Subject) -> tuple[str, ...]:
    every_type = {name for module in subject.modules for name in module.types}  # a pattern is a path
    rules = general_rules(blocks, subject.modules, root_types=every_type)
    return tuple(rule.path for rule in rules if rule.path is not None)
