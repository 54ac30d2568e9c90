"""When a training loop waits for its data, and what to do about it."""

from __future__ import annotations

__all__ = ["MOST_WAITING", "WORTH_SAYING", "waiting_in_words"]

# A smaller share of the loop's time is less than two processes, or two runs of a few seconds, differ by.
WORTH_SAYING = 0.02
# If a loop waits for its data for more than this share of its time, a faster step shows in the step alone.
MOST_WAITING = 0.1


def waiting_in_words(share: float) -> str:
    """Returns what to do about a loader that the loop waits for during `share` of its time."""
    percent = f"{share:.1%}" if share < 0.1 else f"{share:.0%}"
    return (
        f"waiting for the loader takes {percent} of the loop's time, which no faster step wins back: try more "
        "DataLoader workers, persistent_workers=True, pin_memory=True, or less work per sample"
    )
