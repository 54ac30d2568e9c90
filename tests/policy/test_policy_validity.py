"""Another machine is refused, and other software warned about."""

from __future__ import annotations

import pytest

from amptune.errors import HardwareMismatchError
from amptune.policy.hardware_match import require_valid
from amptune.policy.policy_file import PolicyFile
from amptune.policy.profile import Profile, entry_for, resolve
from amptune.policy.settings import STOCK, Policy

H200 = {"nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.memory": "143771", "torch": "2.11"}
BF16 = PolicyFile(policy=Policy(autocast="bf16"))
TUNED = PolicyFile(policy=STOCK, name="resnet50-h200", valid_for=H200)


def test_the_machine_it_was_tuned_on_has_nothing_to_say() -> None:
    assert require_valid(TUNED, H200) == ()


def test_another_machine_is_refused_with_each_label_and_the_way_around() -> None:
    with pytest.raises(HardwareMismatchError) as caught:
        require_valid(TUNED, {"nvidia.com/gpu.product": "NVIDIA-A100", "torch": "2.11"})
    text = str(caught.value)
    for part in (
        "resnet50-h200",
        "NVIDIA-H200",
        "NVIDIA-A100",
        "143771",
        "any_hardware=True",
        "AMPTUNE_ANY_HARDWARE=1",
    ):
        assert part in text


@pytest.mark.parametrize(("here", "fits"), [("143771", True), ("141000", True), ("146600", True), ("140000", False)])
def test_memory_may_differ_by_two_percent(here: str, fits: bool) -> None:
    labels = H200 | {"nvidia.com/gpu.memory": here}
    if fits:
        assert require_valid(TUNED, labels) == ()
    else:
        with pytest.raises(HardwareMismatchError, match="140000 here"):
            require_valid(TUNED, labels)


@pytest.mark.parametrize(("nvml", "torch"), [(15360, 14909), (8192, 7966), (143771, 143167)])
def test_memory_as_torch_has_it_is_that_of_the_same_gpu(nvml: int, torch: int) -> None:
    """A T4, an RTX 3070 and an H200, tuned with NVML; a training node need not have its package."""
    product = {"nvidia.com/gpu.product": "NVIDIA"}
    tuned = PolicyFile(policy=STOCK, valid_for=product | {"nvidia.com/gpu.memory": str(nvml)})
    here = product | {"nvidia.com/gpu.memory": str(torch)}
    assert require_valid(tuned, here, nvml=False) == ()
    entry = entry_for(tuned)
    assert entry is not None
    assert resolve(Profile(entries=(entry,)), here).entry == 0
    with pytest.raises(HardwareMismatchError):
        require_valid(tuned, product | {"nvidia.com/gpu.memory": str(nvml // 2)}, nvml=False)


def test_other_software_is_a_warning_that_names_the_change() -> None:
    (finding,) = require_valid(TUNED, H200 | {"torch": "2.13"})
    assert "torch was 2.11" in str(finding)
    assert "2.13" in str(finding)


def test_the_user_may_say_that_another_machine_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    require_valid(TUNED, {}, any_hardware=True)
    monkeypatch.setenv("AMPTUNE_ANY_HARDWARE", "1")
    require_valid(TUNED, {})
    monkeypatch.setenv("AMPTUNE_ANY_HARDWARE", "0")
    with pytest.raises(HardwareMismatchError):
        require_valid(TUNED, {})


def test_a_policy_of_python_has_the_words_of_a_file_too() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared whole
        Policy(autocast="bf61", memory_format="channel_last", batch_size=0)  # type: ignore[arg-type]
    assert str(caught.value).splitlines() == [
        "autocast: 'bf61' is not one of off, bf16, fp16",
        "memory_format: 'channel_last' is not one of contiguous, channels_last, channels_last_3d",
        "batch_size: 0 is not at least 1",
    ]
