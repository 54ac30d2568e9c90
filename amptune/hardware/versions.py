"""The versions of what runs a training step: amptune with its commit, PyTorch, Python, CUDA, cuDNN, the driver."""

from __future__ import annotations

import subprocess
from functools import cache
from pathlib import Path

import amptune
from amptune.hardware.machine import Hardware

__all__ = ["own_version", "versions_of"]

_SOURCE = Path(amptune.__file__).resolve().parent.parent


def versions_of(hardware: Hardware) -> dict[str, str]:
    """Returns the known versions by name."""
    software = hardware.software
    found = {
        "amptune": own_version(),
        "torch": software.torch,
        "Python": software.python,
        "CUDA": software.cuda,
        "cuDNN": software.cudnn,
        "driver": software.driver,
    }
    return {name: version for name, version in found.items() if version}


@cache
def own_version() -> str:
    """Returns amptune's version, with its commit if it runs from a checkout."""
    version = amptune.__version__
    if not (_SOURCE / ".git").exists():
        return version
    asked = ["git", "-C", str(_SOURCE), "rev-parse", "--short=10", "HEAD"]
    try:
        commit = subprocess.run(asked, capture_output=True, text=True, timeout=5, check=False).stdout.strip()  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return version
    return f"{version} (commit {commit})" if commit else version
