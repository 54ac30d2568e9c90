"""The features that Slurm gives to the node of this job, as labels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess

__all__ = ["FEATURE", "node_features"]

# A node with `Feature=a100` in slurm.conf has the label `slurm.feature/a100: "true"`.
FEATURE = "slurm.feature/"
# scontrol asks the controller, which may be busy.
LIMIT_S = 10.0


def node_features() -> dict[str, str]:
    """Returns a label for each active feature of the node; {} outside a job, or if Slurm does not answer."""
    node, scontrol = os.environ.get("SLURMD_NODENAME"), shutil.which("scontrol")
    if node is None or scontrol is None:
        return {}
    command = [scontrol, "show", "node", node, "--oneliner"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return {}
    found = re.search(r"\bActiveFeatures=(\S+)", answer)
    names = [] if found is None or found[1] == "(null)" else found[1].split(",")
    return {f"{FEATURE}{name}": "true" for name in names}
