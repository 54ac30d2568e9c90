"""A profile gives each machine its entry, says why it passed the others over, and what in it can never be taken."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amptune.errors import FileFormatError, HardwareMismatchError
from amptune.hardware.detect import probe
from amptune.policy.condition import condition_of
from amptune.policy.file_io import load, parse_policy, require_useful, save
from amptune.policy.hardware_match import require_valid
from amptune.policy.policy_file import PolicyFile
from amptune.policy.profile import Entry, Profile, entry_for, resolve, resolve_here, same_machines
from amptune.policy.settings import STOCK, Policy
from amptune.policy.yaml_text import parse

PRODUCT, MEMORY = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"
BF16 = PolicyFile(policy=Policy(autocast="bf16"))
TUNED = PolicyFile(policy=STOCK, name="resnet50-h200", valid_for={PRODUCT: "NVIDIA-H200", MEMORY: "143771"})


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
        (">=70000,<90000", "81559", True),
        (">=70000,<90000", "95830", False),
        ("NVIDIA-H200", "NVIDIA-H200-SHARED", True),
        ("NVIDIA-H200-SHARED", "NVIDIA-H200", True),
    ],
)
def test_a_match_is_a_value_or_a_comparison_of_numbers(wanted: str, value: str, holds: bool) -> None:
    profile = Profile(entries=(Entry(match={"x": wanted}, policy=BF16),), default=TUNED)
    assert resolve(profile, {"x": value}).entry == (0 if holds else "default")


def test_the_first_entry_that_matches_wins_and_those_before_say_why_not() -> None:
    wrong, right = Entry(match={"x": ">=10"}, policy=TUNED), Entry(match={"x": "9"}, policy=BF16)
    found = resolve(Profile(entries=(wrong, right, right)), {"x": "9"})
    assert (found.entry, found.policy_file) == (1, BF16)
    assert [(r.entry, r.because) for r in found.rejected] == [(0, ("needs x >=10, and it is 9 here",))]


def test_a_profile_without_an_entry_for_this_machine_lists_them_all() -> None:
    profile = Profile(entries=(Entry(match={"x": "1"}, policy=BF16), Entry(match={"y": "2"}, policy=BF16)))
    with pytest.raises(HardwareMismatchError) as caught:
        resolve(profile, {"x": "3"})
    assert "entry 0: needs x 1, and it is 3 here" in str(caught.value)
    assert "entry 1: needs y 2, and this machine reports none" in str(caught.value)


def test_loading_a_profile_gives_the_entry_of_the_machine_at_hand(tmp_path: Path) -> None:
    name, value = probe("cpu").labels[0]
    path = tmp_path / "cluster.yaml"
    save(Profile(entries=(Entry(match={name: value}, policy=BF16),), default=TUNED), path)
    assert load(path) == BF16


def tuned_with(memory_mib: int, product: str = "NVIDIA-A100-SXM4") -> PolicyFile:
    return PolicyFile(policy=STOCK, name=str(memory_mib), valid_for={PRODUCT: product, MEMORY: str(memory_mib)})


def built_of(policies: tuple[PolicyFile, ...]) -> Profile:
    entries = tuple(entry for one in policies if (entry := entry_for(one)) is not None)
    assert list(same_machines(entries)) == []
    return Profile(entries=entries)


@pytest.mark.parametrize("policies", list(itertools.permutations(map(tuned_with, (40536, 81920, 24000)))))
def test_each_memory_of_one_product_gets_its_own_policy_whatever_the_order(policies: tuple[PolicyFile, ...]) -> None:
    profile = built_of(policies)
    for own in policies:
        found = resolve(profile, own.valid_for).policy_file
        assert found is own
        assert require_valid(found, own.valid_for) == ()
    with pytest.raises(HardwareMismatchError):
        resolve(profile, {PRODUCT: "NVIDIA-A100-SXM4", MEMORY: "60000"})


def test_two_policies_for_the_same_machines_are_found() -> None:
    entries = [entry_for(tuned_with(mib)) for mib in (40536, 81920, 40960)]
    assert list(same_machines([entry for entry in entries if entry is not None])) == [(0, 2)]


def test_a_job_may_refuse_to_start_without_an_entry_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = Profile(entries=(Entry(match={"x": "1"}, policy=TUNED),), default=BF16)
    assert resolve_here(profile, {}).entry == "default"
    monkeypatch.setenv("AMPTUNE_REQUIRE", "0")
    assert resolve_here(profile, {}).entry == "default"
    monkeypatch.setenv("AMPTUNE_REQUIRE", "1")
    assert resolve_here(profile, {"x": "1"}).entry == 0
    with pytest.raises(HardwareMismatchError, match="AMPTUNE_REQUIRE=1 does not let it take the default"):
        resolve_here(profile, {})


@pytest.mark.parametrize(
    "label",
    ["nvidia.com/cuda.driver.major", "nvidia.com/cuda.driver-version.major"],
)
def test_the_driver_has_its_old_and_its_new_labels(label: str) -> None:
    profile = Profile(entries=(Entry(match={label: ">=570"}, policy=BF16),))
    assert resolve(profile, {"driver": "580.159.04"}).entry == 0
    with pytest.raises(HardwareMismatchError, match="it is 535 here"):
        resolve(profile, {"driver": "535.1"})


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
    assert (tmp_path / "scontrol.asked").read_text() == "show node n1 --oneliner\n"
    resolve_here(Profile(entries=(Entry(match={"x": "1"}, policy=BF16),), default=TUNED))
    assert (tmp_path / "scontrol.asked").read_text().count("show") == 1
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert resolve_here(profile).entry == "default"


def profile_text(*matches: str) -> str:
    lines = "".join(f"  - match: {match}\n    policy: {{autocast: bf16}}\n" for match in matches)
    return f"schema: amptune.profile/1\nentries:\n{lines}"


@pytest.mark.parametrize("wanted", ["abc>=80000", ">=", ">=80GB", "=5", "!=", ">=5,", ">=5;<6", "<a,!=b", "> = 5"])
def test_a_malformed_comparison_is_an_error_with_its_line(wanted: str) -> None:
    with pytest.raises(FileFormatError) as caught:
        parse_policy(parse(profile_text("{b: c}", f'{{a: "{wanted}"}}'), "p.yaml"))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"p.yaml:5:16: a: {wanted!r} is no comparison: write one of >=, <=, >, <")


def test_a_malformed_comparison_is_reported_with_all_other_problems() -> None:
    text = (
        "schema: amptune.profile/1\nentries:\n"
        '  - match: {a: ">=x"}\n    policy: {autocast: bf15}\n  - match: {}\n    polcy: {}\n'
    )
    with pytest.raises(FileFormatError) as caught:
        parse_policy(parse(text, "p.yaml"))
    places = [line.split(" ")[0] for line in str(caught.value).splitlines()]
    assert places == ["p.yaml:3:16:", "p.yaml:4:24:", "p.yaml:6:5:"]


@pytest.mark.parametrize(
    ("matches", "said"),
    [
        (['{a: ">=5,<3"}'], "p.yaml:3:16: entry 0: no value is >=5,<3, so this entry never matches"),
        (["{}", "{a: b}"], "p.yaml:5:12: entry 1: entry 0 stands before and takes every machine that this entry"),
        (['{m: ">=10"}', '{m: ">=20"}'], "entry 1: entry 0 stands before"),
        (['{m: ">=10"}', '{m: "15", b: c}'], "entry 1: entry 0 stands before"),
        (['{m: "!=x"}', '{m: "y"}'], "entry 1: entry 0 stands before"),
        (['{torch: ">=2.9"}', '{torch: ">2.10"}'], "entry 1: entry 0 stands before"),
        (["{a: b}", "{c: d}", "{a: b}"], "entry 2: entry 0 stands before"),
    ],
)
def test_an_entry_that_no_machine_takes_is_an_error_with_its_line(matches: list[str], said: str) -> None:
    document = parse(profile_text(*matches), "p.yaml")
    profile = parse_policy(document)
    assert isinstance(profile, Profile)
    with pytest.raises(FileFormatError) as caught:
        require_useful(profile, document)
    (line,) = str(caught.value).splitlines()
    assert said in line


@pytest.mark.parametrize(
    "matches",
    [
        ['{m: ">=20"}', '{m: ">=10"}'],
        ['{m: ">=10", b: c}', '{m: ">=20"}'],
        ['{m: ">10"}', '{m: ">=10"}'],
        ['{m: "<10"}', '{m: ">=10"}'],
        ['{m: ">=10,<=10"}', "{m: x}"],
        ['{torch: ">=2.10"}', '{torch: ">=2.9"}'],
        ['{m: "!=x"}', '{m: "x"}'],
    ],
)
def test_entries_that_some_machine_takes_are_well(matches: list[str]) -> None:
    document = parse(profile_text(*matches), "p.yaml")
    profile = parse_policy(document)
    assert isinstance(profile, Profile)
    require_useful(profile, document)


SIGNS = st.sampled_from([">=", "<=", ">", "<", "!="])
LIMITS = st.builds(lambda sign, limit: f"{sign}{limit}", SIGNS, st.integers(0, 4))
WANTED = st.lists(LIMITS, min_size=1, max_size=3).map(",".join) | st.integers(0, 4).map(str)
# Between and beside all limits, too.
VALUES = [str(half / 2) for half in range(-1, 10)]


@given(WANTED, WANTED)
def test_what_is_said_of_conditions_is_true_of_values(one: str, other: str) -> None:
    a, b = condition_of("m", one), condition_of("m", other)
    fits_a, fits_b = ({value for value in VALUES if each.holds(_written(value))} for each in (a, b))
    if not a.can_hold:
        assert not fits_a
    if not a.overlaps(b):
        assert not fits_a & fits_b
    if a.implies(b):
        assert fits_a <= fits_b


def _written(value: str) -> str:
    """A whole number as a label has it: 2 and not 2.0."""
    return value.removesuffix(".0")
