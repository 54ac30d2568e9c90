"""The table of GPUs, `gpus.yaml`: peak rates, bandwidth and memory, each row with its source."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from amptune.errors import DeviceError
from amptune.hardware.generations import Generation, generation_of
from amptune.policy.yaml_text import read

__all__ = ["GpuModel", "gpu_models", "gpus_named"]

_WORDS = re.compile(r"nvidia|geforce|tesla|gtx|rtx|hbm\d?e?|sxm\d?|-|_|\s")


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """A GPU as its data sheet has it: rates in TFLOPS without sparsity, bandwidth in GB/s, memory in GiB.

    `half` and `tf32` are None if it has no tensor cores for them.
    """

    name: str
    kind: str
    compute: tuple[int, int]
    fp32: float
    half: float | None
    tf32: float | None
    bandwidth: float
    memory: float
    source: str

    @property
    def generation(self) -> Generation:
        return generation_of(self.compute, self.name.replace("-", " "))


@cache
def gpu_models() -> tuple[GpuModel, ...]:
    """Returns all GPUs of the table, in its order."""
    document = read(Path(__file__).with_name("gpus.yaml"))
    return tuple(
        GpuModel(
            name=row["name"],
            kind=row["kind"],
            compute=(int(row["compute"].split(".")[0]), int(row["compute"].split(".")[1])),
            fp32=row["fp32"],
            half=None if row["half"] == "none" else row["half"],
            tf32=None if row["tf32"] == "none" else row["tf32"],
            bandwidth=row["bandwidth"],
            memory=row["memory"],
            source=row["source"],
        )
        for row in document.data["gpus"]
    )


def gpus_named(text: str) -> tuple[GpuModel, ...]:
    """Returns the GPUs named in a list with commas, or each if `text` is `all`. Raises `DeviceError`."""
    if text.strip().lower() == "all":
        return gpu_models()
    names = [name.strip() for name in text.split(",") if name.strip()]
    found = [(name, _found(name)) for name in names]
    unknown = [name for name, gpu in found if gpu is None]
    if unknown or not names:
        raise DeviceError("; ".join(map(_not_known, unknown)) or "no GPU is named; write --gpu V100 or --gpu all")
    return tuple(gpu for _, gpu in found if gpu is not None)


def _found(name: str) -> GpuModel | None:
    """Returns the GPU of that name, or of that name without its memory."""
    known = {_key(gpu.name): gpu for gpu in gpu_models()}
    return known.get(_key(name)) or known.get(_key(re.sub(r"\b\d+ ?gi?b\b", "", name.lower())))


def _not_known(name: str) -> str:
    keys = {_key(gpu.name): gpu.name for gpu in gpu_models()}
    near = [keys[key] for key in difflib.get_close_matches(_key(name), keys, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"the table has no GPU {name!r}; {hint}It has {', '.join(keys.values())}"


def _key(name: str) -> str:
    return _WORDS.sub("", name.lower())
