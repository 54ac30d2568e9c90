"""The policies of a distributed job's ranks: each rank tells its own, and looks at the others' once they are told.

Nothing here waits for other ranks but `weight`: a job in which some ranks apply nothing, or another model, goes on.
"""

from __future__ import annotations

import json
import os
import platform
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from amptune.errors import PolicyApplyError
from amptune.policy.serialization import policy_to_dict
from amptune.runtime.digest import model_digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import nn

    from amptune.policy.settings import Policy

__all__ = ["Ranks", "world_size"]

# The others' policies are looked for at so many forward passes: all ranks apply theirs before the first one ends.
MOST_LOOKS = 64
# All have applied theirs by the time that one asks for its weight; a rank that has not would be waited for this long.
WEIGHT_S = 120.0

# How often a policy was applied to a model with this digest: ranks compare the first with the first.
_applied: Counter[str] = Counter()


class Ranks:
    """The policies of all ranks of this job for one model. `store` is where the ranks met."""

    def __init__(self, policy: Policy, digest: str, where: str, store: Any) -> None:
        _applied[digest] += 1
        self._rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self._keys = [f"amptune/{digest}/{_applied[digest]}/{rank}" for rank in range(size)]
        self._store = store
        self._looks = 0
        own = {
            "where": where,
            "settings": policy_to_dict(replace(policy, batch_size=None, accumulate=1)),
            "words": str(replace(policy, batch_size=None, accumulate=1)),
            "batch_size": policy.batch_size,
            "accumulate": policy.accumulate,
        }
        store.set(self._keys[self._rank], json.dumps(own))

    @staticmethod
    def of_this_job(policy: Policy, model: nn.Module, origin: str) -> Ranks | None:
        """Returns None outside a distributed job of several ranks. `origin` is where the policy was read from."""
        distributed = torch.distributed
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            return None
        find = getattr(distributed.distributed_c10d, "_get_default_store", None)  # no public name leads to it
        if find is None:
            return None
        first = next(model.parameters(), None)
        on_gpu = first is not None and first.device.type == "cuda"
        device = torch.cuda.get_device_name(first.device) if on_gpu else "CPU"  # type: ignore[union-attr]
        where = f"{platform.node()}, {device}, {origin or 'a policy of Python'}"
        return Ranks(policy, model_digest(model), where, find())

    def are_done(self) -> bool:
        """Looks at the other ranks' policies; returns True once all agree, or some have told none for long.

        Batch sizes may differ. Raises `PolicyApplyError` if another setting does: on the rank that sees it first, and
        on the others unless the job ends before.
        """
        self._looks += 1
        if not self._store.check(self._keys):
            return self._looks >= MOST_LOOKS
        told = self._told()
        if any(one["settings"] != told[0]["settings"] for one in told):
            raise PolicyApplyError(_differ(told))
        return True

    @cached_property
    def weight(self) -> float:
        """The factor of this rank's mean loss, read once: DDP averages over ranks, not over samples.

        It is 1 if all have one batch size. Raises `PolicyApplyError` if a rank has applied no policy, or only some of
        the policies have a batch size.
        """
        try:
            self._store.wait(self._keys, timedelta(seconds=WEIGHT_S))
        except RuntimeError as error:
            raise PolicyApplyError("the batch sizes of other ranks are unknown: they applied no policy") from error
        told = self._told()
        if len({one["batch_size"] is None for one in told}) > 1:
            raise PolicyApplyError("some ranks' policies have a batch_size and others leave it out: set it in all")
        samples = [(one["batch_size"] or 1) * one["accumulate"] for one in told]
        return float(samples[self._rank] * len(samples) / sum(samples))

    def _told(self) -> list[dict[str, Any]]:
        return [json.loads(self._store.get(key)) for key in self._keys]


def world_size() -> int:
    """Returns the number of ranks of this job; before its process group is initialized, as the launcher says."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    said = os.environ.get("WORLD_SIZE", "")
    return int(said) if said.isdecimal() else 1


def _differ(told: Sequence[Mapping[str, Any]]) -> str:
    """Returns the error's text: each policy with the ranks that have it, and where the first of them runs."""
    ranks: dict[str, list[int]] = {}
    for rank, one in enumerate(told):
        ranks.setdefault(json.dumps(one["settings"]), []).append(rank)
    lines = [
        f"\n  rank{'s' if len(of) > 1 else ''} {_listed(of)} ({told[of[0]]['where']}): {told[of[0]]['words']}"
        for of in ranks.values()
    ]
    return (
        f"the ranks of this job do not have one policy:{''.join(lines)}\nOnly batch_size and accumulate may differ: "
        "give all ranks one entry, or start only where one matches, with AMPTUNE_REQUIRE=1"
    )


MOST_LISTED = 6


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MOST_LISTED]))
    return shown if len(ranks) <= MOST_LISTED else f"{shown} and {len(ranks) - MOST_LISTED} more"
