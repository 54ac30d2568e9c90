"""CUDA graphs of the model's own training passes, kernel for kernel, with blocks compiled or nothing."""

from __future__ import annotations

from collections.abc import Iterator

from amptune.policy.findings import Finding
from amptune.policy.knobs.compile_mode import WHOLE_MODES
from amptune.policy.knobs.knob import TRUTH, Knob, Model, Settings

__all__ = ["CUDA_GRAPHS"]


def _idle(policy: Settings, _: Model) -> Iterator[Finding]:
    import torch

    if policy.cuda_graphs and not torch.cuda.is_available():
        yield Finding(
            code="cuda-graphs-without-effect",
            message="CUDA graphs are a GPU's, and this PyTorch has none: the model runs as without cuda_graphs",
        )


# `apply_policy` records the model last of all, since what training calls is then another one.
CUDA_GRAPHS = Knob(
    name="cuda_graphs",
    stock=False,
    values=TRUTH,
    conflict=lambda policy: (
        policy.compile in WHOLE_MODES
        and f"cuda_graphs: what torch.compile makes has CUDA graphs by its mode (reduce-overhead), and compile is "
        f"{policy.compile}"
    ),
    numerics="none",
    idle=_idle,
    words="CUDA graphs",
    risks={
        True: "A replay runs no Python: what forward() does besides computing happens at recordings alone. "
        "amptune compares replays with the model now and then, and ends a recording that differs."
    },
    sentences={
        True: "cuda_graphs true: training passes are recorded once for each shape and replayed; keep shapes constant."
    },
)
