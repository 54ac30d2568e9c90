"""`amptune.tune`, in a module that imports little: worker processes import torch while it imports the search."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from amptune.errors import TargetError
from amptune.measure.workers.processes import start_importing
from amptune.measure.workers.worker import is_measuring
from amptune.policy.settings import Policy
from amptune.search.plan.budget import Budget
from amptune.workload.workload import Workload

if TYPE_CHECKING:
    from amptune.search.decide.decision import Decision
    from amptune.search.events import Observer
    from amptune.search.sampler.policy_sampler import Sampler
    from amptune.search.table.objective import ObjectiveName

__all__ = ["tune"]


def tune(
    workload: Workload | Callable[[], Workload] | str,
    *,
    budget_s: float = 300.0,
    trials: int | None = None,
    space: str | Path | None = None,
    pins: Mapping[str, str] | None = None,
    baseline: Policy | None = None,
    batch_size: int | Literal["auto"] | None = None,
    global_batch: int | None = None,
    devices: int = 1,
    max_memory_mib: float | None = None,
    compile: bool | None = None,  # noqa: A002  # the policy's own name for it
    device: str | None = None,
    study: str | Path | None = None,
    seed: int = 0,
    sampler: Sampler | None = None,
    objective: ObjectiveName = "throughput",
    least_speed: float | None = None,
    observer: Observer | None = None,
) -> Decision:
    """Finds the best policy for a workload on this machine: `amptune tune` as a function.

    `workload` is a `Workload` (its functions travel to the worker processes by value), a function that builds one
    there, or a target such as `"train.py:workload"`. `budget_s` is wall-clock seconds, final comparison included;
    `trials` bounds the number of policies tried. `space` names a search space or its file, `pins` fixes knobs by name,
    `study` is a folder or a database URL to remember trials in (default: under `.amptune/`). `batch_size` is a number,
    or "auto" to search it too. So many `devices` will train together: if so many GPUs are visible, steps are timed on
    all of them, the exchange of gradients included. `global_batch` is the samples of one optimizer step over all of
    them; batches are accumulated to reach it. `compile` says whether to try torch.compile; by default the budget
    decides. A `sampler` of Optuna proposes policies in place of amptune's own, for throughput.

    The `objective` is samples per second; or "memory", the least peak memory at no less than `least_speed` times the
    baseline's samples per second (default: 1); or "energy", joules per sample, where the GPU counts them. One study
    serves all three.

    Raises a subclass of `AmptuneError`, and `TuningInterrupted` on Ctrl-C or if an error ends it, with the best so far.
    """
    if is_measuring():
        raise TargetError(
            "a measuring process imports this script, which calls amptune.tune again: put the call under "
            '`if __name__ == "__main__":`'
        )
    started_s = time.monotonic()
    start_importing(workload if isinstance(workload, str) else "")  # while this process imports the search
    from amptune.search.pipeline import run_tuning
    from amptune.search.request import TuningRequest, place_of, ranks_of, source_of
    from amptune.search.space.candidates import Wanted
    from amptune.search.space.global_batch import GlobalBatch
    from amptune.search.table.objective import objective_of

    source = source_of(workload)
    name = workload if isinstance(workload, str) else getattr(workload, "name", None) or "workload"
    folder, storage = place_of(study, name)
    request = TuningRequest(
        source=source,
        wanted=Wanted(
            baseline=baseline,
            space=space,
            pins=pins or {},
            batch_size=batch_size,
            global_batch=None if global_batch is None else GlobalBatch(samples=global_batch, devices=devices),
            compile=compile,
            memory_mib=max_memory_mib,
            devices=devices,
        ),
        budget=Budget(seconds=budget_s, trials=trials, started=started_s),
        folder=folder,
        study=storage,
        device=device,
        ranks=ranks_of(devices, device),
        seed=seed,
        sampler=sampler,
        objective=objective_of(objective, least_speed),
    )
    return run_tuning(request, observer or (lambda _: None))
