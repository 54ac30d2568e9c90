"""When a training loop waits for its data, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from amptune.policy.settings import Loader

__all__ = [
    "MOST_WAITING",
    "WORTH_SAYING",
    "LoaderGain",
    "LoaderTrial",
    "loader_gain",
    "pays",
    "share_in_words",
    "waiting_in_words",
]

# A smaller share of the loop's time is less than two processes, or two runs of a few seconds, differ by.
WORTH_SAYING = 0.02
# If a loop waits for its data for more than this share of its time, a faster step shows in the step alone.
MOST_WAITING = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderTrial:
    """A step of the loop with a DataLoader of these settings: its mean time in ms, and the share of it that it waits.

    `error` says why there are none.
    """

    settings: Loader
    step_ms: float = 0.0
    wait_share: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderGain:
    """The gain of the best settings: ms of the loop's step with its own and with these, and the share that it waits."""

    settings: Loader
    own_ms: float
    step_ms: float
    wait_share: float

    def __str__(self) -> str:
        return (
            f"with a loader of {self.settings}, a step of the loop takes {self.step_ms:.3g} in place of "
            f"{self.own_ms:.3g} ms ({self.own_ms / self.step_ms:.2g} times as fast)"
        )


def loader_gain(trials: Sequence[LoaderTrial]) -> LoaderGain | None:
    """Returns what the best of the settings gain beside the first ones, the loader's own; None if none is better."""
    timed = [one for one in trials if not one.error]
    own = [one for one in timed if one.settings == trials[0].settings]
    best = min((one for one in timed if one not in own), key=lambda one: one.step_ms, default=None)
    own_ms = min((one.step_ms for one in own), default=0.0)
    if best is None or not pays(best, own_ms):
        return None
    return LoaderGain(settings=best.settings, own_ms=own_ms, step_ms=best.step_ms, wait_share=best.wait_share)


def pays(trial: LoaderTrial, own_ms: float) -> bool:
    """Returns True if settings save enough of a step that takes `own_ms`: processes cost memory, and steps differ."""
    return not trial.error and trial.step_ms < (1 - MOST_WAITING) * own_ms


def share_in_words(share: float) -> str:
    """Returns a share in percent."""
    return f"{share:.1%}" if share < 0.1 else f"{share:.0%}"


def waiting_in_words(share: float) -> str:
    """Returns what to do about a loader that the loop waits for during `share` of its time."""
    return (
        f"waiting for the loader takes {share_in_words(share)} of the loop's time, which no faster step wins back: try "
        "more DataLoader workers, persistent_workers=True, pin_memory=True, or less work per sample"
    )
