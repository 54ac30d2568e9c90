"""amptune: the fastest numerically safe way to run a PyTorch training step on the GPU at hand.

The public names are loaded when first used, so that importing amptune in a training script costs nothing
that training does not need.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amptune.errors import AmptuneError as AmptuneError
    from amptune.hardware.detect import probe as probe
    from amptune.hardware.machine import Hardware as Hardware
    from amptune.policy.file_io import load as load
    from amptune.policy.file_io import save as save
    from amptune.policy.policy_file import PolicyFile as PolicyFile
    from amptune.policy.profile import Profile as Profile
    from amptune.policy.settings import Float8Rule as Float8Rule
    from amptune.policy.settings import Fp32Rule as Fp32Rule
    from amptune.policy.settings import HalfRule as HalfRule
    from amptune.policy.settings import LossScale as LossScale
    from amptune.policy.settings import Policy as Policy
    from amptune.runtime.apply_policy import PolicyDriftWarning as PolicyDriftWarning
    from amptune.runtime.apply_policy import apply as apply
    from amptune.runtime.guard.misuse import PolicyMisuseWarning as PolicyMisuseWarning
    from amptune.runtime.tuned import Tuned as Tuned
    from amptune.search.api import tune as tune
    from amptune.search.decide.decision import Decision as Decision
    from amptune.workload.workload import Workload as Workload

    __version__: str

_HOME = {
    "AmptuneError": "amptune.errors",
    "Decision": "amptune.search.decide.decision",
    "Float8Rule": "amptune.policy.settings",
    "Fp32Rule": "amptune.policy.settings",
    "HalfRule": "amptune.policy.settings",
    "Hardware": "amptune.hardware.machine",
    "LossScale": "amptune.policy.settings",
    "Policy": "amptune.policy.settings",
    "PolicyFile": "amptune.policy.policy_file",
    "PolicyDriftWarning": "amptune.runtime.apply_policy",
    "PolicyMisuseWarning": "amptune.runtime.guard.misuse",
    "Profile": "amptune.policy.profile",
    "Tuned": "amptune.runtime.tuned",
    "Workload": "amptune.workload.workload",
    "apply": "amptune.runtime.apply_policy",
    "load": "amptune.policy.file_io",
    "probe": "amptune.hardware.detect",
    "save": "amptune.policy.file_io",
    "tune": "amptune.search.api",
}

__all__ = [*_HOME, "__version__"]  # names of the table above


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name not in _HOME:
        raise AttributeError(f"module 'amptune' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)


def _version() -> str:
    """The installed version, which the build takes from the git tag; "0+unknown" if nothing is installed."""
    from importlib.metadata import PackageNotFoundError, version  # training asks for no version

    try:
        return version("amptune")
    except PackageNotFoundError:
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted(__all__)
