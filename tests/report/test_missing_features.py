"""What a GPU lacks is told by its generation, and by the architectures that torch has kernels for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from amptune.hardware.detect import as_torch_has_it
from amptune.hardware.machine import Gpu
from amptune.report.missing_features import missing_on

EVERY_KERNEL = ("compute_50",)


def gpu(capability: tuple[int, int]) -> Gpu:
    major, minor = capability
    known = SimpleNamespace(name="a GPU", uuid=None, total_memory=0, multi_processor_count=1, major=major, minor=minor)
    return as_torch_has_it(0, known)


@pytest.mark.parametrize(
    ("capability", "missing"),
    [((6, 1), {"tensor-cores", "bf16", "tf32", "triton"}), ((7, 0), {"bf16", "tf32"}), ((9, 0), set())],
    ids=["GTX 1080 Ti", "V100", "H100"],
)
def test_what_a_gpu_lacks_is_told(capability: tuple[int, int], missing: set[str]) -> None:
    found = missing_on(gpu(capability), EVERY_KERNEL, "2.11.0")
    assert {finding.code for finding in found} == {f"missing-{name}" for name in missing}


@pytest.mark.parametrize(
    ("architectures", "capability", "missing"),
    [(["sm_75", "sm_80", "sm_90"], (7, 0), True), (["sm_75", "sm_80", "sm_90"], (8, 6), False),
     (["sm_70", "compute_70"], (10, 0), False), (["sm_90a"], (9, 0), False), (["sm_80", "sm_86"], (8, 0), False)],
)  # fmt: skip
def test_kernels_run_on_their_architecture_and_later_minor_versions(
    architectures: list[str], capability: tuple[int, int], missing: bool
) -> None:
    found = [one for one in missing_on(gpu(capability), architectures, "2.11.0") if one.code == "missing-kernels"]
    name = ".".join(map(str, capability))
    said = f"torch 2.11.0 here has no kernels for compute capability {name}: it has {', '.join(architectures)}"
    assert [finding.message for finding in found] == [said] * missing
