"""What may be given as a policy, wherever one is applied."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from amptune.errors import PolicyApplyError
from amptune.policy.settings import Policy

if TYPE_CHECKING:
    from os import PathLike

    from amptune.policy.file import PolicyFile

__all__ = ["kind_of", "read_policy", "settings_of"]


def read_policy(policy: str | PathLike[str] | Policy | PolicyFile) -> Policy | PolicyFile:
    """Loads a path (of a profile, the entry that fits this machine); what is a policy already is returned itself.

    Raises `PolicyApplyError` for anything else, and what `amptune.load` raises.
    """
    if isinstance(policy, Policy):
        return policy
    from amptune.policy.file import PolicyFile

    if isinstance(policy, str | os.PathLike):
        from amptune.policy.loading import load

        policy = load(policy)
    if not isinstance(policy, PolicyFile):
        raise PolicyApplyError(
            f"a policy is a path, an amptune.Policy or what amptune.load(path) returns, not {kind_of(policy)}"
        )
    return policy


def settings_of(policy: Policy | PolicyFile) -> Policy:
    """The settings alone, without what they were measured to be worth."""
    return policy if isinstance(policy, Policy) else policy.policy


def kind_of(value: object) -> str:
    """What something is, for an error about what it is not."""
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"
