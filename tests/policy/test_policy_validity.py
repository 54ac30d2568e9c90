"""Another machine is refused, other software warned about, and a profile says why it passed an entry over."""

from __future__ import annotations

from pathlib import Path

import pytest

from amptune.errors import HardwareMismatchError
from amptune.hardware.detect import probe
from amptune.policy.file_io import load, save
from amptune.policy.hardware_match import require_valid
from amptune.policy.policy_file import PolicyFile
from amptune.policy.profile import Entry, Profile, entry_for, resolve
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


@pytest.mark.parametrize(
    ("wanted", "value", "holds"),
    [
        ("a", "a", True),
        ("a", "b", False),
        (">=80000", "80000", True),
        (">80000", "80000", False),
        (">=80000", "143771", True),
        (">=80000", "9999", False),
        ("<=9", "10", False),
        ("<10", "9", True),
        ("!=a", "a", False),
        ("!=a", "b", True),
    ],
)
def test_a_match_is_a_value_or_a_comparison_of_numbers(wanted: str, value: str, holds: bool) -> None:
    profile = Profile(entries=(Entry(match={"x": wanted}, policy=BF16),), default=TUNED)
    assert resolve(profile, {"x": value}).entry == (0 if holds else "default")


def test_the_first_entry_that_matches_wins_and_those_before_say_why_not() -> None:
    wrong, right = Entry(match={"x": ">=10"}, policy=TUNED), Entry(match={"x": "9"}, policy=BF16)
    found = resolve(Profile(entries=(wrong, right, right)), {"x": "9"})
    assert (found.entry, found.policy_file) == (1, BF16)
    assert [(r.entry, r.because) for r in found.rejected] == [(0, ("x is wanted to be >=10, and is 9 here",))]


def test_a_profile_without_an_entry_for_this_machine_lists_them_all() -> None:
    profile = Profile(entries=(Entry(match={"x": "1"}, policy=BF16), Entry(match={"y": "2"}, policy=BF16)))
    with pytest.raises(HardwareMismatchError) as caught:
        resolve(profile, {"x": "3"})
    assert "entry 0: x is wanted to be 1, and is 3 here" in str(caught.value)
    assert "entry 1: y is wanted to be 2, and this machine has no such label" in str(caught.value)


def test_loading_a_profile_gives_the_entry_of_the_machine_at_hand(tmp_path: Path) -> None:
    name, value = probe("cpu").labels[0]
    path = tmp_path / "cluster.yaml"
    save(Profile(entries=(Entry(match={name: value}, policy=BF16),), default=TUNED), path)
    assert load(path) == BF16


def test_a_policy_of_python_has_the_words_of_a_file_too() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared whole
        Policy(autocast="bf61", memory_format="channel_last", batch_size=0)  # type: ignore[arg-type]
    assert str(caught.value).splitlines() == [
        "autocast: 'bf61' is not one of off, bf16, fp16",
        "memory_format: 'channel_last' is not one of contiguous, channels_last, channels_last_3d",
        "batch_size: 0 is not at least 1",
    ]
