from __future__ import annotations

import re
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amptune.errors import DeviceError
from amptune.hardware.labels import is_software_label, labels_of, site_labels
from amptune.hardware.machine import Cpu, Gpu, Software

H200 = Gpu(
    index=0, name="NVIDIA H200", uuid="GPU-3b2c0d11", generation="hopper", compute_capability=(9, 0),
    memory_mib=143771, multiprocessors=132, tensor_cores=True, bf16=True, tf32=True, fp8=True, mig=False,
)  # fmt: skip
XEON = Cpu(
    model="Intel(R) Xeon(R) Platinum 8480C", architecture="x86_64", cores=56, memory_mib=131072,
    vendor="GenuineIntel", family=6, model_number=143, avx512_bf16=True, amx_bf16=True,
)  # fmt: skip
SOFTWARE = Software(torch="2.11.0+cu130", python="3.12.3", cuda="13.0", cudnn="9.10.2", driver="580.159.04")


def every_field(kind: type[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, **{field.name: ... for field in fields(kind)})


def test_an_h200_has_the_labels_its_cluster_gives_it() -> None:
    assert dict(labels_of(XEON, H200, SOFTWARE)) == {
        "kubernetes.io/arch": "amd64",
        "nvidia.com/gpu.product": "NVIDIA-H200",
        "nvidia.com/gpu.family": "hopper",
        "nvidia.com/gpu.memory": "143771",
        "nvidia.com/gpu.compute.major": "9",
        "nvidia.com/gpu.compute.minor": "0",
        "nvidia.com/mig.capable": "true",
        "torch": "2.11",
        "cuda": "13.0",
        "cudnn": "9.10",
        "driver": "580.159.04",
        "nvidia.com/cuda.driver-version.full": "580.159.04",
    }


def test_a_cpu_has_the_labels_of_node_feature_discovery_and_no_gpu_software() -> None:
    assert dict(labels_of(XEON, None, SOFTWARE)) == {
        "kubernetes.io/arch": "amd64",
        "feature.node.kubernetes.io/cpu-model.vendor_id": "Intel",
        "feature.node.kubernetes.io/cpu-model.family": "6",
        "feature.node.kubernetes.io/cpu-model.id": "143",
        "feature.node.kubernetes.io/cpu-cpuid.AVX512BF16": "true",
        "feature.node.kubernetes.io/cpu-cpuid.AMXBF16": "true",
        "torch": "2.11",
    }


@pytest.mark.parametrize(
    ("name", "product"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "NVIDIA-H100-80GB-HBM3-MIG-1g.10gbme"),
        ("Quadro T2000 with  Max-Q Design ", "Quadro-T2000-with-Max-Q-Design"),
    ],
)
def test_a_product_is_written_as_gpu_feature_discovery_writes_it(name: str, product: str) -> None:
    assert dict(labels_of(XEON, replace(H200, name=name), SOFTWARE))["nvidia.com/gpu.product"] == product


def test_an_unknown_generation_has_no_family_and_an_unread_gpu_neither_memory_nor_mig() -> None:
    ada = replace(H200, generation="ada", compute_capability=(8, 9))
    assert dict(labels_of(XEON, ada, SOFTWARE))["nvidia.com/gpu.family"] == "ada-lovelace"
    unread = replace(H200, generation="sm_130", compute_capability=(13, 0), memory_mib=None, mig=None)
    names = dict(labels_of(XEON, unread, SOFTWARE)).keys()
    assert not names & {"nvidia.com/gpu.family", "nvidia.com/gpu.memory", "nvidia.com/mig.capable"}
    assert "nvidia.com/gpu.compute.major" in names


@pytest.mark.parametrize(("version", "label"), [("2.13.0+cpu", "2.13"), ("2.9.0a0+git1a2b3c", "2.9"), ("2.10", "2.10")])
def test_a_torch_label_is_its_major_and_minor_version_and_a_site_label_stands_over_what_was_read(
    version: str, label: str
) -> None:
    arm = Cpu(model="Neoverse-V2", architecture="aarch64", cores=72, memory_mib=None)
    software = replace(SOFTWARE, torch=version)
    assert dict(labels_of(arm, None, software)) == {"kubernetes.io/arch": "arm64", "torch": label}
    assert dict(labels_of(arm, None, software, {"torch": "own", "rack": "a12"})) == {
        "kubernetes.io/arch": "arm64", "torch": "own", "rack": "a12",
    }  # fmt: skip


@given(cpu=every_field(Cpu), gpu=st.none() | every_field(Gpu), software=every_field(Software))
def test_every_label_of_every_machine_is_a_string_under_one_name(cpu: Cpu, gpu: Gpu | None, software: Software) -> None:
    labels = labels_of(cpu, gpu, software)
    assert all(type(name) is str and type(value) is str for name, value in labels)
    assert len(dict(labels)) == len(labels)
    product = dict(labels).get("nvidia.com/gpu.product", "")
    assert re.fullmatch(r"[A-Za-z0-9_.-]*", product)


def test_versions_and_the_model_are_software_and_everything_else_is_hardware() -> None:
    software = {name for name, _ in labels_of(XEON, H200, SOFTWARE, {"rack": "a12"}) if is_software_label(name)}
    assert software == {"torch", "cuda", "cudnn", "driver", "nvidia.com/cuda.driver-version.full"}
    assert is_software_label("model")
    assert is_software_label("nvidia.com/cuda.runtime-version.major")
    assert not is_software_label("feature.node.kubernetes.io/cpu-model.id")


def test_site_labels_are_read_and_every_malformed_one_is_named_with_the_form_wanted() -> None:
    read = {"rack": "a12", "example.com/pool": "a=b", "empty": ""}
    assert site_labels(" rack = a12 ,example.com/pool=a=b,empty=,") == read
    assert site_labels("") == {}
    with pytest.raises(DeviceError, match=r"^AMPTUNE_LABELS: 'a100', '=b': a label is written name=value, and labels"):
        site_labels("a100,rack=a12,=b")
