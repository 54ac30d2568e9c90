"""The forms in which a policy may be given to `apply` and to integrations."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from amptune.errors import PolicyApplyError
from amptune.policy.settings import Policy

if TYPE_CHECKING:
    from os import PathLike

    from amptune.policy.policy_file import PolicyFile

__all__ = ["kind_of", "read_policy", "settings_of"]


def read_policy(policy: str | PathLike[str] | Policy | PolicyFile) -> Policy | PolicyFile:
    """Loads a path (from a profile, the entry that fits this machine); returns a policy as it is.

    Raises `PolicyApplyError` for any other argument, and the errors of `amptune.load`.
    """
    if isinstance(policy, Policy):
        return policy
    from amptune.policy.policy_file import PolicyFile

    if isinstance(policy, str | os.PathLike):
        from amptune.policy.file_io import load

        policy = load(policy)
    if not isinstance(policy, PolicyFile):
        raise PolicyApplyError(
            f"a policy is a path, an amptune.Policy or what amptune.load(path) returns, not {kind_of(policy)}"
        )
    return policy


def settings_of(policy: Policy | PolicyFile) -> Policy:
    """Returns the settings alone, without the measurements of a policy file."""
    return policy if isinstance(policy, Policy) else policy.policy


def kind_of(value: object) -> str:
    """Returns the kind of a value, for error messages about a wrong argument."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
