"""The settings of a worker, and the bench that is built from them: in the worker, and in each of its followers."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from amptune.errors import DeviceError
from amptune.measure.workers.cpu_share import cores, limit_threads
from amptune.measure.workers.source import Source, workload_of

if TYPE_CHECKING:
    from amptune.measure.bench.bench import Bench
    from amptune.measure.bench.trial_group import Leader

__all__ = ["Setting", "built_bench"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings of a fresh worker. `device` None means the best one; `log` receives what the user's code prints.

    A trial that needs more device memory than `memory_mib` fails as out of memory, even if more is free. What is
    compiled is kept in the folder `artifacts`, if there is one.
    Steps are timed over so many `ranks`, each a process: the worker on its device, and followers on the next ones.
    """

    source: Source
    device: str | None
    log: Path
    memory_mib: float | None = None
    artifacts: Path | None = None
    ranks: int = 1


def built_bench(setting: Setting, rank: int = 0, leader: Leader | None = None) -> Bench:
    """Builds a rank's workload, on its device. Raises `TargetError`, `UserCodeError` or `DeviceError`."""
    import torch

    from amptune.hardware.cuda_driver import gpu_count
    from amptune.hardware.detect import probe
    from amptune.hardware.nvml import open_gpu
    from amptune.measure.bench.bench import Bench
    from amptune.measure.bench.peak_memory import limit_memory

    gpu = probe(setting.device).gpu
    if gpu is None and setting.ranks > 1 and setting.device != "cpu" and gpu_count():
        raise DeviceError(
            f"steps are to be timed on {setting.ranks} GPUs, and this PyTorch cannot use them: install one with CUDA, "
            "or choose --device cpu"
        )
    if gpu is not None:
        torch.cuda.set_device(gpu.index + rank)
    device = torch.device("cpu") if gpu is None else torch.device("cuda", gpu.index + rank)
    nvml = open_gpu(gpu.uuid) if gpu is not None and gpu.uuid and rank == 0 else None
    limit = setting.memory_mib
    if limit is not None:
        limit_memory(device, limit)
    workload = workload_of(setting.source)
    if gpu is None and setting.ranks > 1:
        # each rank has a share of the cores, and may move: on fixed ones Gloo's thread waits for the one that computes
        limit_threads(max(1, cores() // setting.ranks))
    if (give_back := getattr(workload.model, "give_back", None)) is not None:
        give_back()
    bench = Bench(workload, device, nvml, memory_mib=limit, rank=rank, leader=leader)
    gc.collect()
    gc.freeze()  # what was imported and built is then skipped by each trial's garbage collection
    return bench
