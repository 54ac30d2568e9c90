"""Access to NVIDIA's management library (NVML), one GPU at a time. No other module imports `pynvml`.

Any single reading may be missing: MIG slices have no utilization, Jetsons and other machines with unified
memory have no memory figures, WSL answers some requests with "Unknown Error". So each reading is requested
separately and is None if NVML cannot give it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from amptune.hardware.machine import MIB

if TYPE_CHECKING:
    from collections.abc import Collection
    from types import ModuleType, TracebackType

__all__ = ["NvmlAbsent", "NvmlGpu", "connect", "open_gpu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlAbsent:
    """The reason why NVML gave no GPU: no library, no driver, or no device with that UUID."""

    why: str


def open_gpu(uuid: str) -> NvmlGpu | None:
    """Returns the GPU or MIG slice with this UUID, or None if NVML does not have it. The caller must close it."""
    gpu = connect(uuid)
    return gpu if isinstance(gpu, NvmlGpu) else None


def connect(uuid: str) -> NvmlGpu | NvmlAbsent:
    """Like `open_gpu`, but returns the reason on failure. `uuid` may lack `GPU-` or `MIG-`, as torch prints it."""
    try:
        import pynvml
    except ModuleNotFoundError:  # training nodes need not have it
        return NvmlAbsent(why="NVML: nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return NvmlAbsent(why=f"NVML: {error}")
    why = ""
    for full_uuid in _spellings(uuid):
        try:
            return NvmlGpu(pynvml, full_uuid, pynvml.nvmlDeviceGetHandleByUUID(full_uuid))
        except pynvml.NVMLError as error:
            why = f"NVML: {full_uuid}: {error}"
    pynvml.nvmlShutdown()
    return NvmlAbsent(why=why)


def _spellings(uuid: str) -> tuple[str, ...]:
    """Returns the slice's spelling first: if torch gives the UUID of a slice, no GPU has this UUID."""
    return (uuid,) if uuid.startswith(("GPU-", "MIG-")) else (f"MIG-{uuid}", f"GPU-{uuid}")


class NvmlGpu:
    """An open GPU or MIG slice; a reading that NVML cannot give is None, and `unread` says why.

    For a MIG slice, memory and processes are its own; power limit, clocks, temperature and ECC are those of
    its parent GPU. No reading may be requested after `close`.
    """

    def __init__(self, nvml: ModuleType, uuid: str, handle: Any) -> None:
        self.uuid = uuid
        self._nvml = nvml
        self._open = True
        self._why_unread: dict[str, str] = {}
        self._handle = handle
        self.mig_slice = _is_mig_slice(nvml, handle)
        self._board = handle
        if self.mig_slice:
            self._board = self._ask("parent GPU", "nvmlDeviceGetDeviceHandleFromMigDeviceHandle", handle) or handle

    def close(self) -> None:
        """Releases NVML. NVML counts its users, so others in this process keep access. A second call does nothing."""
        if self._open:
            self._open = False
            self._nvml.nvmlShutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def unread(self) -> tuple[str, ...]:
        """One line for each reading whose last attempt failed, with NVML's reason."""
        return tuple(f"{what}: {why}" for what, why in self._why_unread.items())

    def driver_version(self) -> str | None:
        version: str | None = self._ask("driver version", "nvmlSystemGetDriverVersion")
        return version

    def memory_mib(self) -> int | None:
        memory = self._ask("memory", "nvmlDeviceGetMemoryInfo", self._handle)
        return None if memory is None else memory.total // MIB

    def power_limit_w(self) -> float | None:
        limit_mw = self._ask("power limit", "nvmlDeviceGetEnforcedPowerLimit", self._board)
        return None if limit_mw is None else limit_mw / 1000

    def energy_j(self) -> float | None:
        """Returns the energy used since the driver was loaded; None for a MIG slice, which shares the GPU's meter."""
        if self.mig_slice:
            return None
        energy_mj = self._ask("energy", "nvmlDeviceGetTotalEnergyConsumption", self._board)
        return None if energy_mj is None else energy_mj / 1000

    def sm_clock_mhz(self) -> int | None:
        return self._clock_mhz("SM clock", "nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)

    def sm_clock_max_mhz(self) -> int | None:
        return self._clock_mhz("highest SM clock", "nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_SM)

    def memory_clock_mhz(self) -> int | None:
        return self._clock_mhz("memory clock", "nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM)

    def clock_event_reasons(self) -> int | None:
        """Returns the reasons for the current clocks, as the bits `nvmlClocksEventReason*`."""
        what = "clock event reasons"
        reasons: int | None = self._ask(what, "nvmlDeviceGetCurrentClocksEventReasons", self._board)
        if reasons is None:  # the function's name before driver 535
            reasons = self._ask(what, "nvmlDeviceGetCurrentClocksThrottleReasons", self._board)
        return reasons

    def temperature_c(self) -> int | None:
        sensor = self._nvml.NVML_TEMPERATURE_GPU
        temperature_c: int | None = self._ask("temperature", "nvmlDeviceGetTemperature", self._board, sensor)
        return temperature_c

    def mig_mode(self) -> bool | None:
        """Returns True if MIG mode is on; None also if the GPU does not support MIG."""
        return self._enabled("MIG mode", "nvmlDeviceGetMigMode")

    def ecc(self) -> bool | None:
        return self._enabled("ECC", "nvmlDeviceGetEccMode")

    def processes(self, exclude: Collection[int] = ()) -> tuple[int, ...] | None:
        """Returns the ids of compute processes on this GPU, without this process and those in `exclude`.

        NVML reports the host's process ids; inside a container they may be unknown numbers, or missing.
        """
        running = self._ask("processes", "nvmlDeviceGetComputeRunningProcesses", self._handle)
        if running is None:
            return None
        return tuple(sorted({process.pid for process in running} - {os.getpid(), *exclude}))

    def foreign_processes(self, exclude: Collection[int] = ()) -> tuple[int, ...] | None:
        """Like `processes`, for a caller that computes on this GPU: returns None if NVML does not list the caller.

        In that case NVML's process ids differ from this process's (a container), so `exclude` cannot be applied.
        """
        running = self._ask("processes", "nvmlDeviceGetComputeRunningProcesses", self._handle)
        if running is None:
            return None
        pids = {process.pid for process in running}
        return tuple(sorted(pids - {os.getpid(), *exclude})) if os.getpid() in pids else None

    def _clock_mhz(self, what: str, function: str, domain: int) -> int | None:
        clock_mhz: int | None = self._ask(what, function, self._board, domain)
        return clock_mhz

    def _enabled(self, what: str, function: str) -> bool | None:
        modes = self._ask(what, function, self._board)
        if modes is None:
            return None
        current, _after_reset = modes
        return bool(current)

    def _ask(self, what: str, function: str, *arguments: Any) -> Any:
        nvml = self._nvml
        try:
            answer = getattr(nvml, function)(*arguments)
        except (nvml.NVMLError, nvml.NVMLLibraryMismatchError) as error:
            self._why_unread[what] = str(error)
            return None
        self._why_unread.pop(what, None)
        return answer


def _is_mig_slice(nvml: ModuleType, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceIsMigDeviceHandle(handle))
    except nvml.NVMLError:  # the GPU or the driver does not support MIG
        return False
