"""The number of CPU threads that one operation is shared out among."""

from __future__ import annotations

from collections.abc import Iterator

from amptune.policy.findings import Finding
from amptune.policy.knobs.knob import Knob, Model, Settings, Undo

__all__ = ["THREADS"]


def _apply(threads: int, _: Model) -> Undo:
    import torch

    from amptune.changes.flags import before, hold, is_held

    own = before("threads", torch.get_num_threads)
    if not 0 < threads < own and not is_held("threads"):
        return lambda: None
    return hold("threads", min(threads or own, own), torch.get_num_threads, torch.set_num_threads)


def _idle(policy: Settings, model: Model) -> Iterator[Finding]:
    if not policy.threads:
        return
    import torch

    own, first = torch.get_num_threads(), next(model.parameters(), None)
    if first is not None and first.device.type != "cpu":
        message = f"threads is for a CPU, and the model is on {first.device}"
        yield Finding(code="threads-without-effect", message=message)
    elif policy.threads > own:
        message = f"threads {policy.threads}: PyTorch takes {own} in this process, and goes on with these"
        yield Finding(code="threads-without-effect", message=message)


def _told(policy: Settings) -> Iterator[str]:
    if policy.threads:
        yield f"threads {policy.threads}: so many CPU threads share an operation."


THREADS = Knob(
    name="threads",
    stock=0,
    is_count=True,
    is_optional=True,
    is_global=True,
    conflict=lambda policy: policy.threads < 0 and f"threads: {policy.threads} is not at least 0",
    # Each thread sums its own part.
    numerics="order",
    # The number is compiled into the loops of torch.compile's C++ backend (torch/_inductor/codegen/cpp.py).
    matters=lambda value, subject: value < subject.threads,
    apply=_apply,
    idle=_idle,
    told=_told,
)
