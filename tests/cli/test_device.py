"""Whether `--device` exists, as CUDA's driver says it; the driver is a stand-in."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from amptune.cli.device import require_device
from amptune.errors import DeviceError


def driver(answer: int, count: int) -> Any:
    def has(pointer: Any) -> int:
        pointer._obj.value = count
        return 0

    return SimpleNamespace(cuInit=lambda _: answer, cuDeviceGetCount=has)


@pytest.mark.parametrize(
    ("answer", "count", "device", "said"),
    [
        (0, 2, "cuda:1", None),
        (0, 2, "cuda:2", "CUDA's driver has 2"),
        (100, 0, "cuda", "CUDA's driver has none"),
        (999, 0, "cuda", None),  # a driver that fails says nothing: torch will
        (100, 0, "cpu", None),
        (100, 0, None, None),
        (0, 2, "cuda:x", "'cuda:x' is no device: write cpu, cuda or cuda:1"),
    ],
)
def test_a_device_is_refused_if_the_driver_does_not_have_it(
    answer: int, count: int, device: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: driver(answer, count))
    if said is None:
        require_device(device)
        return
    with pytest.raises(DeviceError, match=said):
        require_device(device)


def test_a_machine_without_a_driver_has_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(_: str) -> None:
        raise OSError

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.setattr("amptune.hardware.cuda_driver._ROCM", tmp_path / "kfd")
    require_device("cpu")
    with pytest.raises(DeviceError, match="device 'cuda' does not exist here"):
        require_device("cuda")
    (tmp_path / "kfd").touch()
    require_device("cuda")  # torch says what is wrong with AMD's
