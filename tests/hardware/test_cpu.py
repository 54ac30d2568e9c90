from __future__ import annotations

import os
from typing import TYPE_CHECKING

import psutil
import pytest

from amptune.hardware.detect import read_cpu

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MIB = 1024 * 1024
SAPPHIRE_RAPIDS = """\
processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8480C
flags\t\t: fpu vme sse2 avx512f avx512_bf16 amx_bf16 amx_tile

processor\t: 1
vendor_id\t: GenuineIntel
model\t\t: 144
"""
linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="CPU affinity and cgroups are Linux's")


def machine(root: Path, files: Mapping[str, str]) -> Path:
    """A file system with these files below `root`."""
    for name, text in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@linux
def test_cores_are_those_this_process_may_run_on_and_two_threads_of_one_are_one(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    assert 1 <= read_cpu().cores <= len(allowed)
    together = ",".join(map(str, sorted(allowed))) + "\n"
    files = {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": together for cpu in allowed}
    assert read_cpu(machine(tmp_path, files)).cores == 1
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert read_cpu().cores == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_an_x86_is_told_from_its_first_processor(tmp_path: Path) -> None:
    cpu = read_cpu(machine(tmp_path, {"proc/cpuinfo": SAPPHIRE_RAPIDS}))
    assert (cpu.model, cpu.vendor, cpu.family) == ("Intel(R) Xeon(R) Platinum 8480C", "GenuineIntel", 6)
    assert (cpu.model_number, cpu.avx512_bf16, cpu.amx_bf16) == (143, True, True)


@pytest.mark.parametrize("cpuinfo", ["Features\t: fp asimd bf16\nCPU implementer\t: 0x41\n", "", "no colon here"])
def test_a_cpuinfo_without_x86_facts_still_gives_a_cpu(tmp_path: Path, cpuinfo: str) -> None:
    cpu = read_cpu(machine(tmp_path, {"proc/cpuinfo": cpuinfo}))
    assert cpu.model
    assert (cpu.vendor, cpu.family, cpu.model_number) == (None, None, None)
    assert (cpu.avx512_bf16, cpu.amx_bf16) == (False, False)


@pytest.mark.parametrize(
    ("cgroup", "limits", "limit_mib"),
    [
        ("0::/jobs/mine\n", {"jobs/mine/memory.max": "max\n", "jobs/memory.max": f"{64 * MIB}\n"}, 64),  # cgroup 2
        (  # cgroup 1
            "9:name=systemd:/\n4:cpu,memory:/jobs/mine\n0::/\n",
            {"memory/jobs/mine/memory.limit_in_bytes": f"{96 * MIB}\n", "memory/memory.limit_in_bytes": f"{2**62}\n"},
            96,
        ),
        ("0::/kubepods/pod1/abc\n", {"memory.max": f"{48 * MIB}\n"}, 48),  # in a container, with the host's path
        ("0::/\n", {"memory.max": f"{2**60}\n"}, None),  # above the machine's
        ("", {}, None),
    ],
)
def test_a_limit_of_memory_below_the_machines_holds(
    tmp_path: Path, cgroup: str, limits: Mapping[str, str], limit_mib: int | None
) -> None:
    files = {"proc/self/cgroup": cgroup} | {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    whole_mib = psutil.virtual_memory().total // MIB
    assert read_cpu(machine(tmp_path, files)).memory_mib == (limit_mib or whole_mib)
