"""Keeps the artifacts of torch.compile in the study's folder, for training."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from amptune.measure.results.outcome import Measurement, Outcome
from amptune.policy.artifact_file import ArtifactFile, kept_in
from amptune.policy.file_io import write_bytes
from amptune.policy.settings import Policy

if TYPE_CHECKING:
    import torch

__all__ = ["keep_artifacts"]

# The keys of the artifacts in each file that this process wrote: most measurements compile nothing new.
_kept: dict[Path, object] = {}


def keep_artifacts(policy: Policy, outcome: Outcome, device: torch.device, folder: Path | None) -> None:
    """Writes all that this process has compiled, if the policy was measured and is compiled; None keeps nothing.

    A process that the final comparison started has compiled one policy alone, and is the last to write its file. A
    file that cannot be written is in the log; the measurement counts.
    """
    if folder is None or policy.compile == "off" or not isinstance(outcome, Measurement):
        return
    import torch

    from amptune.errors import OutputError
    from amptune.runtime.compiler_artifacts import facts_of

    saved, path = torch.compiler.save_cache_artifacts(), kept_in(folder, policy)
    if saved is None or _kept.get(path) == saved[1]:
        return
    try:
        folder.mkdir(exist_ok=True)
        file = ArtifactFile(fits=facts_of(policy, device), graphs=saved[0], objects=_objects())
        write_bytes(file.to_bytes(), path)
        _kept[path] = saved[1]
    except (OSError, OutputError):
        traceback.print_exc()


def _objects() -> dict[str, bytes]:
    """Returns the compiled C++ that this process has loaded from torch.compile's cache, by path; on Linux alone.

    PyTorch's artifacts hold the kernels of a GPU compiled, and those of a CPU as source, which takes most of the time.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    folder, maps = Path(cache_dir()).resolve(), Path("/proc/self/maps")
    lines = maps.read_text().splitlines() if maps.exists() else []
    mapped = sorted({Path(line[line.index("/") :]) for line in lines if line.endswith(".so")})
    own = [path for path in mapped if path.is_relative_to(folder) and path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in own}
