"""NVML's readings, from a recording of one H200 behind `pynvml`: the one seam where no machine needs a GPU."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest

from amptune.hardware.detect import as_torch_has_it, with_readings
from amptune.hardware.nvml import NvmlAbsent, NvmlGpu, connect, open_gpu

UUID = "3b2c0d11-9c5e-4a4f-8f2b-1d5a6e7f8091"
MIB = 1024 * 1024
MIG_NAME = "NVIDIA H200 MIG 1g.18gb"

RECORDED: dict[str, Any] = {
    "nvmlSystemGetDriverVersion": "580.159.04",
    "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=143771 * MIB, used=619 * MIB),
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetTotalEnergyConsumption": 1_234_567,
    "nvmlDeviceGetClockInfo": {pynvml.NVML_CLOCK_SM: 345, pynvml.NVML_CLOCK_MEM: 3201},
    "nvmlDeviceGetMaxClockInfo": {pynvml.NVML_CLOCK_SM: 1980},
    "nvmlDeviceGetCurrentClocksEventReasons": 0x1,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4,
    "nvmlDeviceGetTemperature": 31,
    "nvmlDeviceGetMigMode": [0, 1],
    "nvmlDeviceGetEccMode": [1, 0],
    "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=pid) for pid in (os.getpid(), 4242, 17)],
}


class RecordedNvml(ModuleType):
    """`pynvml` with recorded answers; `failing` maps a function to the NVML error it raises.

    Its handles are the words "board" and "slice".
    """

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.users = 0
        self.failing: dict[str, Exception] = {}
        self.devices = {f"GPU-{UUID}": "board"}
        self.asked_of: dict[str, str] = {}

    def __getattr__(self, name: str) -> Any:
        """Constants and exceptions are the real library's."""
        if not name.startswith("nvml"):
            return getattr(pynvml, name)
        return lambda *arguments: self._answer(name, *arguments)

    def _answer(self, name: str, handle: str = "", *which: int) -> Any:
        if name in self.failing:
            raise self.failing[name]
        self.users += {"nvmlInit": 1, "nvmlShutdown": -1}.get(name, 0)
        assert self.users > 0 or name == "nvmlShutdown", f"{name} asked for while NVML is closed"
        assert self.users >= 0, "NVML shut down more often than initialized"
        if name == "nvmlDeviceGetHandleByUUID" and handle not in self.devices:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        own = {
            "nvmlDeviceGetHandleByUUID": self.devices.get(handle),
            "nvmlDeviceIsMigDeviceHandle": int(handle == "slice"),
            "nvmlDeviceGetDeviceHandleFromMigDeviceHandle": "board",
        }
        if name in own or name not in RECORDED:
            return own.get(name)
        self.asked_of[name] = handle
        answer = RECORDED[name]
        return answer[which[0]] if isinstance(answer, dict) else answer


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> RecordedNvml:
    recorded = RecordedNvml()
    monkeypatch.setitem(sys.modules, "pynvml", recorded)
    return recorded


def torch_properties(name: str = "NVIDIA H200", total_mib: int = 143156) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` gives; its memory is a little less than NVML's."""
    return SimpleNamespace(
        name=name, major=9, minor=0, total_memory=total_mib * MIB, multi_processor_count=132, uuid=UUID
    )


def gpu_at(uuid: str) -> NvmlGpu:
    gpu = open_gpu(uuid)
    assert gpu is not None
    return gpu


READINGS: dict[str, tuple[str, Any]] = {  # method: the NVML function behind it, and what it makes of the recording
    "driver_version": ("nvmlSystemGetDriverVersion", "580.159.04"),
    "memory_mib": ("nvmlDeviceGetMemoryInfo", 143771),
    "power_limit_w": ("nvmlDeviceGetEnforcedPowerLimit", 700.0),
    "energy_j": ("nvmlDeviceGetTotalEnergyConsumption", 1234.567),
    "sm_clock_mhz": ("nvmlDeviceGetClockInfo", 345),
    "sm_clock_max_mhz": ("nvmlDeviceGetMaxClockInfo", 1980),
    "memory_clock_mhz": ("nvmlDeviceGetClockInfo", 3201),
    "temperature_c": ("nvmlDeviceGetTemperature", 31),
    "mig_mode": ("nvmlDeviceGetMigMode", False),
    "ecc": ("nvmlDeviceGetEccMode", True),
    "processes": ("nvmlDeviceGetComputeRunningProcesses", (17, 4242)),
}


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize(
    "error", [pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED), pynvml.NVMLLibraryMismatchError("an old driver")]
)
def test_a_reading_comes_in_the_unit_of_its_name_and_is_none_and_says_why_while_it_fails(
    nvml: RecordedNvml, reading: str, error: Exception
) -> None:
    function, value = READINGS[reading]
    with gpu_at(UUID) as gpu:
        assert getattr(gpu, reading)() == value
        nvml.failing[function] = error
        assert getattr(gpu, reading)() is None
        (line,) = gpu.unread()
        assert line.endswith(f": {error}")
        nvml.failing.clear()
        assert getattr(gpu, reading)() == value
        assert gpu.unread() == ()
    assert nvml.users == 0


def test_an_old_driver_gives_clock_event_reasons_under_their_old_name(nvml: RecordedNvml) -> None:
    with gpu_at(UUID) as gpu:
        assert gpu.clock_event_reasons() == 0x1
        missing = pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        nvml.failing["nvmlDeviceGetCurrentClocksEventReasons"] = missing
        assert gpu.clock_event_reasons() == 0x4
        nvml.failing["nvmlDeviceGetCurrentClocksThrottleReasons"] = missing
        assert gpu.clock_event_reasons() is None


def test_an_h200_is_what_torch_and_nvml_say_together(nvml: RecordedNvml) -> None:
    assert nvml.users == 0
    of_torch = as_torch_has_it(3, torch_properties())
    assert (of_torch.index, of_torch.name, of_torch.compute_capability) == (3, "NVIDIA H200", (9, 0))
    assert (of_torch.generation, of_torch.fp16_rate, of_torch.multiprocessors) == ("hopper", 2.0, 132)
    assert (of_torch.tensor_cores, of_torch.bf16, of_torch.tf32, of_torch.fp8) == (True, True, True, True)
    with gpu_at(UUID) as gpu:
        found = with_readings(of_torch, gpu)
    readings = {name: READINGS[name][1] for name in READINGS if hasattr(found, name)}
    assert readings.keys() > {"memory_mib", "power_limit_w", "sm_clock_mhz", "temperature_c", "ecc"}
    assert found == replace(of_torch, uuid=f"GPU-{UUID}", mig=False, other_processes=(17, 4242), **readings)


@pytest.mark.parametrize("uuid", [UUID, f"GPU-{UUID}"])
@pytest.mark.parametrize("knows_mig", [True, False])
def test_a_gpu_is_found_with_and_without_the_prefix_of_its_uuid(nvml: RecordedNvml, uuid: str, knows_mig: bool) -> None:
    if not knows_mig:
        nvml.failing["nvmlDeviceIsMigDeviceHandle"] = pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    with gpu_at(uuid) as gpu:
        assert (gpu.uuid, gpu.mig_slice) == (f"GPU-{UUID}", False)
        assert gpu.processes(exclude=(17,)) == (4242,)
        assert gpu.unread() == ()


@pytest.mark.parametrize("uuid", [UUID, f"MIG-{UUID}"])
def test_of_a_mig_slice_memory_is_its_own_and_power_its_parents(nvml: RecordedNvml, uuid: str) -> None:
    nvml.devices = {f"MIG-{UUID}": "slice"}
    with gpu_at(uuid) as gpu:
        assert gpu.mig_slice
        with_readings(as_torch_has_it(0, torch_properties(name=MIG_NAME, total_mib=16384)), gpu)
        assert gpu.energy_j() is None
    own = {name for name, handle in nvml.asked_of.items() if handle == "slice"}
    assert own == {"nvmlDeviceGetMemoryInfo", "nvmlDeviceGetComputeRunningProcesses"}
    assert nvml.asked_of["nvmlDeviceGetEnforcedPowerLimit"] == "board"


def test_a_mig_slice_never_gets_the_memory_of_the_whole_gpu(nvml: RecordedNvml) -> None:
    """Should torch give the parent's UUID for a slice, NVML knows the whole GPU alone."""
    assert list(nvml.devices.values()) == ["board"]
    with gpu_at(UUID) as gpu:
        found = with_readings(as_torch_has_it(0, torch_properties(name=MIG_NAME, total_mib=16384)), gpu)
    assert (found.memory_mib, found.other_processes, found.power_limit_w) == (16384, None, 700.0)


def test_where_nvml_is_not_or_does_not_know_the_gpu_there_is_one_reason(
    nvml: RecordedNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.devices = {}
    assert connect(UUID) == NvmlAbsent(why=f"NVML: GPU-{UUID}: Not Found")
    assert open_gpu(UUID) is None
    assert nvml.users == 0
    nvml.failing["nvmlInit"] = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert connect(UUID) == NvmlAbsent(why="NVML: NVML Shared Library Not Found")
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert connect(UUID) == NvmlAbsent(why="NVML: nvidia-ml-py is not installed")


def test_closing_twice_gives_nvml_back_once(nvml: RecordedNvml) -> None:
    other, gpu = gpu_at(UUID), gpu_at(UUID)
    gpu.close()
    gpu.close()
    assert nvml.users == 1
    other.close()


def test_the_real_library_knows_no_made_up_gpu() -> None:
    """No recording: with a driver NVML does not find it, without one NVML does not start; neither is an error."""
    assert isinstance(connect(UUID), NvmlAbsent)
