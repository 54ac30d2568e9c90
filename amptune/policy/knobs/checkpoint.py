"""Modules whose activations are computed again in the backward pass, in place of being kept for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from amptune.policy.knobs.knob import Knob, Settings

__all__ = ["CHECKPOINT"]


def _conflict(policy: Settings) -> str | Literal[False]:
    if "" in policy.checkpoint:
        return "checkpoint: a pattern must not be empty"
    if len(set(policy.checkpoint)) < len(policy.checkpoint):
        return "checkpoint: a pattern stands there twice"
    return False


def _told(policy: Settings) -> Iterator[str]:
    if policy.checkpoint:
        yield (
            f"checkpoint {', '.join(policy.checkpoint)}: the backward pass computes the activations of these modules "
            "again, which saves their memory and costs the time of their forward pass."
        )


# `apply_policy` swaps the modules' classes, last of all: a module is computed again in the precision it has.
CHECKPOINT = Knob(
    name="checkpoint",
    stock=(),
    conflict=_conflict,
    # Eager, the same kernels compute the same numbers, random ones too. A compiler fuses, and rounds, what is computed
    # again as it likes.
    numerics="none",
    in_numerics=lambda policy: () if policy.compile == "off" else policy.checkpoint,
    # A search calls a choice of repeated blocks by a word.
    matters=lambda value, subject: value == "none" or bool(subject.blocks),
    is_optional=True,
    words="checkpoint {}",
    told=_told,
)
