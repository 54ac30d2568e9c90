"""Reads the CPU and its memory: from /proc, /sys and the cgroup on Linux, from psutil elsewhere.

All files are read below `root`, so a test can supply the files of another machine.
"""

from __future__ import annotations

import platform
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from amptune.hardware.machine import Cpu

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["read_cpu"]

_MIB = 1024 * 1024


def read_cpu(root: Path = Path("/")) -> Cpu:
    """Returns the CPU with the cores this process may run on and the memory its cgroup allows."""
    facts = _first_processor(_text(root / "proc/cpuinfo") or "")
    flags = facts.get("flags", "").split()
    return Cpu(
        model=facts.get("model name") or platform.processor() or platform.machine() or "unknown CPU",
        architecture=platform.machine(),
        cores=_cores(root),
        memory_mib=_memory_mib(root),
        vendor=facts.get("vendor_id"),
        family=_number(facts.get("cpu family")),
        model_number=_number(facts.get("model")),
        avx512_bf16="avx512_bf16" in flags,
        amx_bf16="amx_bf16" in flags,
    )


def _first_processor(cpuinfo: str) -> Mapping[str, str]:
    lines = cpuinfo.strip().partition("\n\n")[0].splitlines()
    pairs = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _cores(root: Path) -> int:
    """Returns the number of physical cores: logical CPUs with equal sibling lists are threads of one core."""
    import psutil

    allowed = _allowed_cpus()
    siblings = {_text(root / f"sys/devices/system/cpu/cpu{n}/topology/thread_siblings_list") for n in allowed}
    if None in siblings:
        return min(psutil.cpu_count(logical=False) or len(allowed), len(allowed))
    return len(siblings)


def _allowed_cpus() -> tuple[int, ...]:
    import psutil

    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # not on macOS
        return tuple(process.cpu_affinity())
    return tuple(range(psutil.cpu_count() or 1))


def _memory_mib(root: Path) -> int:
    import psutil

    return int(min([psutil.virtual_memory().total, *_cgroup_limits(root)]) // _MIB)


def _cgroup_limits(root: Path) -> Iterator[int]:
    """Yields every memory limit, in bytes, from this process's cgroup up to the top; all of them apply.

    Inside a container the cgroup's path may be the host's; then only the top is visible.
    """
    for hierarchy, path in _memory_cgroups(_text(root / "proc/self/cgroup") or ""):
        folder, limit = ("", "memory.max") if hierarchy == "0" else ("memory", "memory.limit_in_bytes")
        for group in (path, *path.parents):
            text = _text(root / "sys/fs/cgroup" / folder / str(group).lstrip("/") / limit)
            if text is not None and text.isdigit():  # "max" means no limit
                yield int(text)


def _memory_cgroups(cgroup: str) -> Iterable[tuple[str, PurePosixPath]]:
    """Yields (hierarchy, path) for cgroup version 2 (lines `0::/path`) and version 1's memory controller."""
    for line in cgroup.splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" or "memory" in controllers.split(","):
            yield hierarchy, PurePosixPath(path)


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdigit() else None
