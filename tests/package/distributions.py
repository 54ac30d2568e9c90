"""Installed distributions, and what they require."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, distribution

__all__ = ["normal", "required_by"]


def normal(name: str) -> str:
    """A distribution's name as `pip` compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def required_by(name: str) -> set[str]:
    """The distribution and all that it requires here, without extras."""
    found, pending = set[str](), [normal(name)]
    while pending:
        one = pending.pop()
        try:
            requirements = distribution(one).requires or []
        except PackageNotFoundError:  # for another system
            continue
        found.add(one)
        names = [normal(re.split(r"[^\w.-]", line, maxsplit=1)[0]) for line in requirements if "extra ==" not in line]
        pending += [required for required in names if required not in found]
    return found
