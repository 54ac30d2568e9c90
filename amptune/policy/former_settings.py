"""Settings that policies had once: a file or an option that still names one is told why it went."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["FORMER", "taken_out"]

# Each with the reason, and with what does the same if anything does.
FORMER: Mapping[str, str] = {
    # reports/README.md of commit f0d2760, h100/attention
    "attention": "no order of attention's kernels was faster than the one that PyTorch prefers by itself",
    # the same, h200/float8
    "activation_budget": "it sets torch.compile for the whole process, and checkpoint saves as much memory without it",
}


def taken_out(name: str) -> str:
    """Returns why a former setting is none any more."""
    return f"{name} was taken out, because {FORMER[name]}"
