"""How a DataLoader makes batches: its processes, and what lies ready. It changes how long training waits for data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from amptune.policy.knobs.knob import Knob, Settings

__all__ = ["LOADER", "Loader"]

# More than any machine has cores: a policy is data, and no reason to start processes without end.
_MOST = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """Settings of a `torch.utils.data.DataLoader`, under its own names; the defaults are PyTorch's.

    `persistent_workers` and `prefetch_factor` (None: PyTorch's, 2) belong to worker processes.
    """

    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}

    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    prefetch_factor: int | None = None

    def __post_init__(self) -> None:
        """Raises `ValueError` with every problem, one per line, each starting with the field's name."""
        wrong = []
        if not 0 <= self.num_workers <= _MOST:
            wrong.append(f"num_workers: {self.num_workers} is not from 0 to {_MOST}")
        if self.prefetch_factor is not None and not 1 <= self.prefetch_factor <= _MOST:
            wrong.append(f"prefetch_factor: {self.prefetch_factor} is not from 1 to {_MOST}")
        if self.num_workers == 0 and self.persistent_workers:
            wrong.append("persistent_workers: there are none with num_workers 0")
        if self.num_workers == 0 and self.prefetch_factor is not None:
            wrong.append("prefetch_factor: only worker processes prefetch, and num_workers is 0")
        if wrong:
            raise ValueError("\n".join(wrong))

    def __str__(self) -> str:
        words = [f"{self.num_workers} worker process{'' if self.num_workers == 1 else 'es'}"]
        if self.prefetch_factor is not None:
            words[0] += f" with {self.prefetch_factor} batches each"
        words += ["kept between epochs"] if self.persistent_workers else []
        words += ["pinned memory"] if self.pin_memory else []
        return ", ".join(words)


def _told(policy: Settings) -> Iterator[str]:
    if policy.loader is not None:
        yield (
            f"loader: {policy.loader}. `amptune run` sets it where a DataLoader is built; in a loop of your own, "
            "DataLoader(…, **tuned.loader_options)."
        )


LOADER = Knob(
    name="loader",
    stock=None,
    numerics="none",
    memory=False,
    graph=False,
    is_own_choice=False,
    told=_told,
    words="loader with {}",
)
