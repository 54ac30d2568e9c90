"""A clock, an NVML and a host that say what a test wrote down: sampling is tested without a GPU and without waiting."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

from amptune.hardware.nvml import NvmlGpu
from amptune.measure.bench.run_delay import RunDelays

HW_THERMAL, SW_THERMAL, POWER_BRAKE, POWER_CAP, IDLE = 0x40, 0x20, 0x80, 0x4, 0x1


class ScriptedClock:
    """Its time passes by steps alone: the n-th step ever, counted from 0, takes `step_ms(n)`.

    The first `lead` steps of a call take `idle_ms` longer.
    """

    def __init__(self, step_ms: Callable[[int], float] = lambda _: 10.0, lead: int = 0, idle_ms: float = 0.0) -> None:
        self.step_ms = step_ms
        self.lead = lead
        self.idle_ms = idle_ms
        self.steps = 0
        self.stretches: list[int] = []
        self.busy = False
        self._now_s = 0.0

    def time_steps(
        self, step: Callable[[], object], count: int, while_busy: Callable[[], object] = lambda: None
    ) -> list[float]:
        times = []
        for i in range(count):
            step()
            times.append(self.step_ms(self.steps) + (self.idle_ms if i < self.lead else 0.0))
            self.steps += 1
            self._now_s += times[-1] / 1000
        self.stretches.append(count)
        self.busy = True
        while_busy()
        self.busy = False
        return times

    def now_s(self) -> float:
        return self._now_s

    def wait(self, seconds: float) -> None:
        self._now_s += seconds


class ScriptedNvml(ModuleType):
    """`pynvml` of one GPU. A reading is a value, a function asked each time, or None where NVML cannot say."""

    def __init__(self, **readings: Any) -> None:
        super().__init__("pynvml")
        self.readings: dict[str, Any] = {
            "reasons": 0,
            "sm_clock_mhz": 1980,
            "temperature_c": 40,
            "energy_mj": 0,
            "pids": (os.getpid(),),
            **readings,
        }

    def gpu(self) -> NvmlGpu:
        return NvmlGpu(self, "GPU-scripted", "board")

    def __getattr__(self, name: str) -> Any:
        """Constants and exceptions are the real library's."""
        answers: dict[str, Callable[[], Any]] = {
            "nvmlDeviceIsMigDeviceHandle": lambda: 0,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda: self._now("reasons"),
            "nvmlDeviceGetClockInfo": lambda: self._now("sm_clock_mhz"),
            "nvmlDeviceGetMaxClockInfo": lambda: 1980,
            "nvmlDeviceGetTemperature": lambda: self._now("temperature_c"),
            "nvmlDeviceGetTotalEnergyConsumption": lambda: self._now("energy_mj"),
            "nvmlDeviceGetComputeRunningProcesses": lambda: [SimpleNamespace(pid=pid) for pid in self._now("pids")],
        }
        if name not in answers:
            return getattr(pynvml, name)
        return lambda *_: answers[name]()

    def _now(self, reading: str) -> Any:
        value = self.readings[reading]
        value = value() if callable(value) else value
        if value is None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return value


class ScriptedMemory:
    """An allocator that retried as often as told."""

    def __init__(self) -> None:
        self.retries: Callable[[], int] = lambda: 0

    def reset(self) -> None:
        pass

    def peak_mib(self) -> tuple[float, float]:
        return 1.0, 1.0

    def alloc_retries(self) -> int:
        return self.retries()


class ScriptedHost:
    """A host on which a thread waits `delay()` seconds per second for a CPU; it counts nothing if that is None."""

    def __init__(self, clock: ScriptedClock, delay: Callable[[], float | None] = lambda: None) -> None:
        self.delay = delay
        self.clock = clock
        self._at_s = clock.now_s()
        self._waited_s = 0.0

    def run_delays(self) -> RunDelays | None:
        delay, now_s = self.delay(), self.clock.now_s()
        if delay is None:
            return None
        self._waited_s += delay * (now_s - self._at_s)
        self._at_s = now_s
        return RunDelays(waited_s=((1, self._waited_s),), at_s=now_s)
