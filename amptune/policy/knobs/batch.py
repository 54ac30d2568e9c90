"""The samples of a batch, and the batches of an optimizer step."""

from __future__ import annotations

from collections.abc import Iterator

from amptune.policy.knobs.knob import Knob, Settings

__all__ = ["ACCUMULATE", "BATCH_SIZE"]


def _told(policy: Settings) -> Iterator[str]:
    if policy.batch_size is not None:
        total = "" if policy.accumulate == 1 else f", accumulated over {policy.accumulate} micro-batches"
        yield f"batch_size {policy.batch_size} per device{total}."


# The batch's size decides memory and graph too; both are known for each size by itself. Neither knob is reverted or
# counted by itself: both change the training.
BATCH_SIZE = Knob(
    name="batch_size",
    stock=None,
    is_count=True,
    conflict=lambda policy: policy.batch_size < 1 and f"batch_size: {policy.batch_size} is not at least 1",
    numerics="none",
    memory=False,
    is_own_choice=False,
    told=_told,
)
ACCUMULATE = Knob(
    name="accumulate",
    stock=1,
    is_count=True,
    conflict=lambda policy: policy.accumulate < 1 and f"accumulate: {policy.accumulate} is not at least 1",
    numerics="none",
    memory=False,
    graph=False,
    is_own_choice=False,
    told=lambda _: (),  # the batch size's sentence says it
)
