"""The source of a workload: how a worker gets what it is to measure."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amptune.workload.workload import Workload

__all__ = ["Source", "digest_of", "workload_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The source of a worker's workload: a target's text; or a `Workload`, or a function that returns one, as bytes.

    `batch_size` replaces the workload's own batch size; `arguments` are what the target's script finds in `sys.argv`.
    A target that `is_script` is run, and its loop is the workload; what it writes goes to the folder `scratch`.
    """

    target: str | None = None
    arguments: tuple[str, ...] = ()
    pickled: bytes | None = None
    batch_size: int | None = None
    is_script: bool = False
    scratch: Path | None = None


def workload_of(source: Source) -> Workload:
    """Returns the workload, of the batch size that was asked for. Raises `TargetError` or `UserCodeError`."""
    own = _built(source)
    return own if source.batch_size is None else replace(own, batch_size=source.batch_size)


def _built(source: Source) -> Workload:
    """Returns the workload; what a script draws when it is imported, such as weights, is the same in every process."""
    from amptune.measure.bench.bench import SEED
    from amptune.measure.bench.drawn_batches import seed_everything

    seed_everything(SEED)
    if source.is_script and source.target is not None:
        from amptune.workload.running_script import workload_of_script

        return workload_of_script(Path(source.target), source.arguments, source.scratch)
    if source.target is not None:
        from amptune.workload.targets import load_workload, parse_target

        return load_workload(parse_target(source.target))
    from amptune.workload.by_value import from_bytes
    from amptune.workload.targets import workload_in

    return workload_in(from_bytes(source.pickled or b""), "workload", name=None)


def digest_of(source: Source) -> str:
    """Returns a SHA-256 of what the workload is made from."""
    if source.target is not None:
        from amptune.workload.code_digest import source_digest
        from amptune.workload.targets import parse_target

        digest = source_digest(parse_target(source.target))
        return digest if not source.arguments else _sha256("\0".join([digest, *source.arguments]).encode())
    return _sha256(source.pickled or b"")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
