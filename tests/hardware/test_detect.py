from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from amptune.errors import DeviceError
from amptune.hardware.detect import probe

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROBE_AND_COUNT_MEMORY = """
import pynvml
pynvml.nvmlInit()
def used_mib():
    handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    return sum(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles) // 2**20
before = used_mib()
from amptune.hardware.detect import probe
probe("cuda:0")
print(used_mib() - before)
"""


def fresh_interpreter(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_the_cpu_can_be_probed_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AMPTUNE_LABELS", "rack=a12")
    hardware = probe("cpu")
    assert (hardware.device, hardware.gpu, hardware.generation) == ("cpu", None, "cpu")
    assert hardware.name == hardware.cpu.model
    assert hardware.software.torch == torch.__version__
    labels = dict(hardware.labels)
    assert labels["torch"] == ".".join(torch.__version__.split(".")[:2])
    assert labels["rack"] == "a12"
    assert "kubernetes.io/arch" in labels
    assert hardware.unread == ()


@no_gpu
def test_without_a_gpu_the_cpu_is_the_device() -> None:
    assert probe() == probe("cpu")


@pytest.mark.parametrize("device", ["", "gpu", "mps", "cuda:", "cuda:x", "cuda:99", "CPU"])
def test_no_other_word_is_a_device(device: str) -> None:
    with pytest.raises(DeviceError, match="does not exist here: choose cpu"):
        probe(device)


def test_a_gpu_of_rocm_is_refused_and_the_cpu_beside_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """An MI250 reports the compute capability of an H100."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    for device in (None, "cuda", "cuda:0"):
        with pytest.raises(DeviceError, match="built for ROCm, and amptune knows NVIDIA's GPUs alone: --device cpu"):
            probe(device)
    assert probe("cpu").device == "cpu"


def test_windows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(DeviceError, match="Linux and macOS machines, not Windows: run it in WSL 2"):
        probe("cpu")


def test_importing_the_room_imports_nothing_heavy() -> None:
    modules = fresh_interpreter(
        "import amptune.hardware.detect, amptune.hardware.machine, sys; print(*sys.modules)"
    ).split()
    assert "amptune.hardware.nvml" in modules
    assert not {"torch", "pynvml", "psutil", "pydantic", "optuna"} & set(modules)


@pytest.mark.gpu
@needs_gpu
def test_a_real_gpu_is_known_to_torch_and_nvml() -> None:
    hardware = probe()
    assert hardware.gpu is not None
    assert hardware.device == "cuda"
    assert hardware.name == torch.cuda.get_device_name()
    assert hardware.gpu.compute_capability == torch.cuda.get_device_capability()
    assert hardware.gpu.bf16 == torch.cuda.is_bf16_supported(including_emulation=False)
    assert str(torch.cuda.get_device_properties().uuid) in str(hardware.gpu.uuid)
    total_mib = torch.cuda.get_device_properties().total_memory / 2**20
    assert hardware.gpu.memory_mib == pytest.approx(total_mib, rel=0.02)
    assert dict(hardware.labels)["nvidia.com/gpu.memory"] == str(hardware.gpu.memory_mib)


@pytest.mark.gpu
@needs_gpu
def test_a_real_gpu_is_left_empty() -> None:
    assert int(fresh_interpreter(PROBE_AND_COUNT_MEMORY)) < 50


@pytest.mark.gpu
@needs_gpu
def test_a_gpu_beyond_the_last_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(DeviceError) as raised:
        probe(f"cuda:{torch.cuda.device_count()}")
    assert f"cuda:0 ({torch.cuda.get_device_name(0)})" in str(raised.value)
