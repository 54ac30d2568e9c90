"""A profile gives each machine its entry and says why not the others; a policy is valid where it was tuned."""

from __future__ import annotations

import itertools
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amptune.errors import FileFormatError, HardwareMismatchError
from amptune.policy.condition import condition_of
from amptune.policy.file_io import parse_policy, require_useful
from amptune.policy.hardware_match import require_valid
from amptune.policy.policy_file import PolicyFile
from amptune.policy.profile import Entry, Profile, entry_for, resolve, resolve_here, taken_before
from amptune.policy.settings import STOCK, Policy
from amptune.policy.yaml_text import parse

PRODUCT, MEMORY = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"
H200 = {PRODUCT: "NVIDIA-H200", MEMORY: "143771", "torch": "2.11"}
BF16 = PolicyFile(policy=Policy(autocast="bf16"))
TUNED = PolicyFile(policy=STOCK, name="resnet50-h200", valid_for=H200)


@pytest.mark.parametrize(
    ("label", "wanted", "here", "holds"),
    [
        ("x", "a", "a", True),
        ("x", ">80000", "80000", False),
        ("x", ">=80000", "80000", True),
        ("x", "<=9", "10", False),
        ("x", "!=a", "a", False),
        ("x", ">=70000,<90000", "95830", False),
        ("x", ">=70000", "80GB", False),
        ("x", "NVIDIA-H200", "NVIDIA-H200-SHARED", True),
        ("torch", ">=2.10", "2.9", False),
        ("driver", ">=570.1.2", "580.159.04", True),
        ("nvidia.com/cuda.driver.major", ">=570", "580", True),  # an old and a new label, of the driver's version
        ("torch", ">=2", "2.0", True),
        ("example.com/speed", ">=2.5", "2.10", False),
    ],
)
def test_a_match_is_a_value_or_a_comparison_of_numbers_or_versions(
    label: str, wanted: str, here: str, holds: bool
) -> None:
    profile = Profile(entries=(Entry(match={label: wanted}, policy=BF16),), default=TUNED)
    own = {"driver": f"{here}.1"} if "driver" in label and label != "driver" else {label: here}
    found = resolve(profile, own)
    assert found.entry == (0 if holds else "default")
    because = [] if holds else [(0, (f"needs {label} {wanted}, and it is {here} here",))]
    assert [(one.entry, one.because) for one in found.rejected] == because


def tuned_with(memory_mib: int) -> PolicyFile:
    return PolicyFile(policy=STOCK, name=str(memory_mib), valid_for={PRODUCT: "NVIDIA-A100", MEMORY: str(memory_mib)})


def entries_of(*policies: PolicyFile) -> tuple[Entry, ...]:
    return tuple(entry for one in policies if (entry := entry_for(one)) is not None)


@pytest.mark.parametrize("policies", [*itertools.permutations(map(tuned_with, (40536, 81920, 24000)))])
def test_each_memory_of_one_product_gets_its_own_policy_whatever_the_order(policies: tuple[PolicyFile, ...]) -> None:
    profile = Profile(entries=entries_of(*policies))
    assert list(taken_before(profile.entries)) == []
    assert all(resolve(profile, own.valid_for).policy_file is own for own in policies)
    with pytest.raises(HardwareMismatchError):
        resolve(profile, {PRODUCT: "NVIDIA-A100", MEMORY: "60000"})
    assert list(taken_before(entries_of(*map(tuned_with, (40536, 81920, 40960))))) == [(0, 2)]


def test_a_job_may_refuse_to_start_without_an_entry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Profile(entries=(Entry(match={"x": "1"}, policy=TUNED),), default=BF16)
    monkeypatch.setenv("AMPTUNE_REQUIRE", "0")
    assert resolve_here(profile, {}).entry == "default"
    monkeypatch.setenv("AMPTUNE_REQUIRE", "1")
    assert resolve_here(profile, {"x": "1"}).entry == 0
    with pytest.raises(HardwareMismatchError, match="AMPTUNE_REQUIRE=1 does not let it take the default"):
        resolve_here(profile, {})


def test_a_feature_of_slurms_node_is_a_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's answer is one line with many figures. It is asked only if an entry wants to know."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        '#!/bin/sh\necho "$*" >> "$0.asked"\n'
        "echo NodeName=n1 Arch=x86_64 AvailableFeatures=a100,ib ActiveFeatures=a100,nvlink Gres=gpu:4 State=IDLE\n"
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    profile = Profile(entries=(Entry(match={"slurm.feature/nvlink": "true"}, policy=BF16),), default=TUNED)
    assert resolve_here(profile).entry == "default"
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert resolve_here(profile).entry == 0
    resolve_here(Profile(entries=(Entry(match={"x": "1"}, policy=BF16),), default=TUNED))
    assert (tmp_path / "scontrol.asked").read_text() == "show node n1 --oneliner\n"
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert resolve_here(profile).entry == "default"


def profile_text(*matches: str) -> str:
    lines = "".join(f"  - match: {match}\n    policy: {{autocast: bf16}}\n" for match in matches)
    return f"schema: amptune.profile/1\nentries:\n{lines}"


@pytest.mark.parametrize("wanted", ["abc>=80000", ">=80GB", "=5", ">=5,", "<a,!=b"])
def test_a_malformed_comparison_is_an_error_with_its_line(wanted: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        parse_policy(parse(profile_text("{b: c}", f'{{a: "{wanted}"}}'), "p.yaml"))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"p.yaml:5:16: a: {wanted!r} is no comparison: write one of >=, <=, >, <")


@pytest.mark.parametrize(
    ("matches", "said"),
    [
        (['{a: ">=5,<3"}'], "p.yaml:3:16: entry 0: no value is >=5,<3, so this entry never matches"),
        (["{}", "{a: b}"], "p.yaml:5:12: entry 1: entry 0 stands before and takes every machine that this entry"),
        (["{a: b}", "{c: d}", "{a: b}"], "entry 2: entry 0 stands before"),
        (['{m: ">=10", b: c}', '{m: ">=20"}'], None),
        (['{m: ">=10,<=10"}', "{m: x}"], None),
    ],
)
def test_an_entry_that_no_machine_takes_is_an_error_with_its_line(matches: list[str], said: str | None) -> None:
    document = parse(profile_text(*matches), "p.yaml")
    profile = parse_policy(document)
    assert isinstance(profile, Profile)
    with nullcontext() if said is None else pytest.raises(FileFormatError, match=re.escape(said)):
        require_useful(profile, document)


SIGNS = st.sampled_from([">=", "<=", ">", "<", "!="])
LIMITS = st.builds(lambda sign, limit: f"{sign}{limit}", SIGNS, st.integers(0, 4))
WANTED = st.lists(LIMITS, min_size=1, max_size=2).map(",".join) | st.integers(0, 4).map(str)
# Whole numbers as labels have them, and what lies between and beside all limits.
VALUES = [str(half / 2).removesuffix(".0") for half in range(-1, 10)]


@given(WANTED, WANTED)
def test_what_is_said_of_conditions_is_true_of_values(one: str, other: str) -> None:
    a, b = condition_of("m", one), condition_of("m", other)
    fits_a, fits_b = ({value for value in VALUES if each.holds(value)} for each in (a, b))
    assert a.can_hold or not fits_a
    assert not a.implies(b) or fits_a <= fits_b


def test_another_machine_than_a_policy_was_tuned_on_is_refused_with_each_label_unless_the_user_means_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert require_valid(TUNED, H200) == ()
    (finding,) = require_valid(TUNED, H200 | {"torch": "2.13"})
    assert str(finding).startswith("torch was 2.11 when this policy was tuned, and is 2.13 here")
    with pytest.raises(HardwareMismatchError) as caught:
        require_valid(TUNED, {PRODUCT: "NVIDIA-A100", "torch": "2.11"})
    words = ["resnet50-h200", "NVIDIA-H200", "NVIDIA-A100", "143771"]
    assert [word for word in words if word not in str(caught.value)] == []
    require_valid(TUNED, {}, any_hardware=True)
    monkeypatch.setenv("AMPTUNE_ANY_HARDWARE", "1")
    require_valid(TUNED, {})
    monkeypatch.setenv("AMPTUNE_ANY_HARDWARE", "0")
    with pytest.raises(HardwareMismatchError):
        require_valid(TUNED, {})


@pytest.mark.parametrize(
    ("tuned", "here", "nvml", "fits"),
    [
        (143771, 146600, True, True),
        (143771, 140000, True, False),
        (15360, 14909, False, True),  # a T4 and an RTX 3070 by NVML and by torch; a node need not have NVML's package
        (8192, 4096, False, False),
    ],
)
def test_memory_may_differ_by_as_much_as_its_readings_do(tuned: int, here: int, nvml: bool, fits: bool) -> None:
    policy, labels = tuned_with(tuned), tuned_with(here).valid_for
    profile = Profile(entries=entries_of(policy), default=BF16)
    if fits:
        assert require_valid(policy, labels, nvml=nvml) == ()
        assert resolve(profile, labels).entry == 0
    else:
        with pytest.raises(HardwareMismatchError, match=f"{here} here"):
            require_valid(policy, labels, nvml=nvml)
