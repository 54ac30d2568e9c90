"""A speed-up that was measured elsewhere: as text, or from the evidence in a policy file."""

from __future__ import annotations

import re

from amptune.errors import DeviceError, FileFormatError, Problem
from amptune.policy.file_io import load_any
from amptune.policy.policy_file import PolicyFile
from amptune.predict.gpu_table import gpus_named
from amptune.predict.speed_up import Known

__all__ = ["known_from"]


def known_from(text: str) -> Known:
    """Returns what `GPU=SPEEDUP` says, or a policy file's AMP recipe over its baseline.

    Raises `DeviceError` for a GPU that the table lacks or a speed-up that is none, `FileFormatError` for a policy file
    without both figures.
    """
    name, sign, figure = text.partition("=")
    if sign and not name.endswith((".yaml", ".yml")):
        try:
            speed_up = float(figure)
        except ValueError:
            speed_up = 0.0
        if not 0 < speed_up < float("inf"):
            raise DeviceError(f"{figure!r} is no speed-up; write --measured V100=2.1")
        return Known(gpu=gpus_named(name)[0], speed_up=speed_up)
    return _from_policy(text)


def _from_policy(path: str) -> Known:
    found = load_any(path)
    if not isinstance(found, PolicyFile):
        raise FileFormatError([Problem(message="is a profile; give the policy file of one GPU", source=path)])
    parts = (found.evidence.get("baseline", {}), found.evidence.get("amp_recipe", {}))
    rates = [float(part.get("samples_per_s") or 0.0) for part in parts]
    product = found.valid_for.get("nvidia.com/gpu.product", "")
    if not all(rates) or not product:
        message = "has no figures of a baseline and an AMP recipe on a GPU; give GPU=SPEEDUP instead"
        raise FileFormatError([Problem(message=message, source=path)])
    name = re.sub(r"-(PCIE|SXM\d?|HBM\d?e?|\d+GB)\b", "", product, flags=re.IGNORECASE)
    return Known(gpu=gpus_named(name)[0], speed_up=rates[1] / rates[0])
