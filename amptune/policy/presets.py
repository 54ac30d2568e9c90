"""Preset policies: the opt levels of NVIDIA's Apex, for training code that used `apex.amp.initialize`."""

from __future__ import annotations

from typing import TypeGuard

from amptune.errors import FileFormatError, Problem
from amptune.policy.file import PolicyFile
from amptune.policy.settings import LossScale, Policy

__all__ = ["APEX_LEVELS", "is_preset", "preset"]

_PREFIX = "apex:"

# Values of apex/amp/frontend.py and apex/amp/scaler.py until May 2025: a dynamic scale starts at 2^16, doubles after
# 2,000 clean steps and is at most 2^24.
_DYNAMIC = LossScale(init=2.0**16, growth_interval=2000, max=2.0**24)

# O1 patched the functions in its lists; autocast now does the same.
APEX_LEVELS = {
    "O0": Policy(),
    "O1": Policy(autocast="fp16", loss_scale=_DYNAMIC),
    "O2": Policy(weights="half", master_weights=True, keep_batchnorm_fp32=True, loss_scale=_DYNAMIC),
    "O3": Policy(weights="half"),
}


def is_preset(name: object) -> TypeGuard[str]:
    """Returns True if the name means a preset; name a file like that as `./apex:…`, or use a `pathlib.Path`."""
    return isinstance(name, str) and name.startswith(_PREFIX)


def preset(name: str) -> PolicyFile:
    """Returns the policy of a name such as `apex:O2`. Raises `FileFormatError` for a level that Apex does not have."""
    policy = APEX_LEVELS.get(name.removeprefix(_PREFIX))
    if policy is None:
        levels = ", ".join(_PREFIX + level for level in APEX_LEVELS)
        raise FileFormatError([Problem(message=f"is no opt level of Apex; there are {levels}", source=name)])
    return PolicyFile(policy=policy, name=name)
